"""``POST /v1/chat/completions``: conversations, as one object or as a stream."""

from collections.abc import Sequence
from typing import Any

from foretoken.engine.request import TokenLogprob
from foretoken.engine.updates import Update
from foretoken.serve.choices import ChoicesAnswer
from foretoken.serve.conversation import Conversation, offered
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import ChatRequest, NamedTool, Tool
from foretoken.serve.service import Service, structure
from foretoken.serve.tool_choice import ToolChoice
from foretoken.serve.tools import joined

_UNLIMITED = 2**31  # the limit is the context length


class Chat(ChoicesAnswer):
    """One conversation to answer.

    Args:
        service: the model.
        body: the request.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs=true", param="top_logprobs")
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise ApiError(
                400, "max_tokens and max_completion_tokens are the same limit, and differ: keep one", param="max_tokens"
            )
        self.body = body
        named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        chosen = body.tool_choice if isinstance(body.tool_choice, str) else None
        tools = [tool for tool in offered(body) if isinstance(tool, Tool)]
        choice = ToolChoice(tools, chosen, named, parallel=body.parallel_tool_calls, writes=service.tool_grammar)
        talk = Conversation(service, body.messages, choice, body)
        params = service.params(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens or _UNLIMITED,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=talk.structure(structure(body.response_format)),
        )
        if body.structured_outputs is None:
            form = "response_format" if choice.structure(None) is None else "tools"
        else:
            form = "structured_outputs"
        self.requests = service.requests([talk.prompt], talk.completed(params), body, "messages", form)
        self.readers = [talk.reader(request) for request in self.requests]

    def _openings(self) -> list[dict[str, Any]]:
        return [_piece(index, {"role": "assistant", "content": ""}) for index in range(len(self.requests))]

    def _usage(self, delivered: int | None = None) -> dict[str, Any]:
        reasoning = sum(each.reasoning_tokens for each in self.readers)
        return self.service.usage(self.requests, 1, reasoning=reasoning, delivered=delivered)

    def _choice(self, delta: Update) -> dict[str, Any]:
        reader = self.readers[delta.index]
        piece = reader.read(delta)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
        if piece.calls:
            message |= {"content": piece.content.strip() or None, "tool_calls": joined(piece.calls)}
        return {
            "index": delta.index,
            "message": message | _reasoning(piece.reasoning),
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": reader.reason(delta),
        }

    def _streamed(self, delta: Update) -> dict[str, Any]:
        reader = self.readers[delta.index]
        read = reader.read(delta)
        content: dict[str, Any] = {"content": read.content, **_reasoning(read.reasoning)}
        if read.calls:
            content["tool_calls"] = read.calls
        piece = _piece(delta.index, content, reader.reason(delta))
        if self.body.logprobs:
            piece["logprobs"] = self._logprobs(delta.logprobs)
        return piece

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": [self.service.logprob(each) for each in entries], "refusal": None}


def _piece(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning under the two names that clients read."""
    return {"reasoning": text, "reasoning_content": text} if text else {}
