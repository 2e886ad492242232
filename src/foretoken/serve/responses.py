"""``POST /v1/responses``, stateless: text and function tools, as one object or as events."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from foretoken.engine.updates import Update
from foretoken.serve.conversation import Conversation, Piece, offered
from foretoken.serve.errors import ApiError
from foretoken.serve.responses_schema import (
    LOGPROBS,
    InputCall,
    InputCallOutput,
    InputPart,
    InputReasoning,
    NamedResponseTool,
    ResponsesRequest,
    ResponseTool,
)
from foretoken.serve.schema import FunctionCall, Message, Tool, ToolCall
from foretoken.serve.service import Service, new_id, refuse_failure, structure
from foretoken.serve.stream import DONE, event
from foretoken.serve.tool_choice import ToolChoice

_UNLIMITED = 2**31  # the limit is the context length


class Response:
    """One response to compute.

    Args:
        service: the model.
        body: the request.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    def __init__(self, service: Service, body: ResponsesRequest) -> None:
        self.model = service.check_model(body.model)
        if body.background:
            raise ApiError(400, "background=true is not supported: leave it out, or use stream", param="background")
        for name in ("previous_response_id", "conversation"):
            if getattr(body, name) is not None:
                message = f"{name}: no response is stored here: send the earlier items in 'input'"
                raise ApiError(400, message, param=name)
        for value in body.include or ():
            if value not in (LOGPROBS, "reasoning.encrypted_content"):
                body.ignore(f"include[{value}]")
        if body.truncation == "auto":
            body.ignore("truncation")
        self.service = service
        self.body = body
        self.id, self.created = new_id("resp_"), int(time.time())
        named = body.tool_choice.name if isinstance(body.tool_choice, NamedResponseTool) else None
        chosen = body.tool_choice if isinstance(body.tool_choice, str) else None
        tools = [Tool(type="function", function=each) for each in offered(body) if isinstance(each, ResponseTool)]
        choice = ToolChoice(tools, chosen, named, parallel=body.parallel_tool_calls, writes=service.tool_grammar)
        talk = Conversation(service, _messages(body), choice, body)
        form = None if body.text is None else body.text.format
        scored = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
        if scored and (choice.tools or service.reasoning):
            what = "tools" if choice.tools else "a model that reasons"
            message = f"log-probabilities cannot be combined with {what} here: use /v1/chat/completions"
            raise ApiError(400, message, param="top_logprobs" if body.top_logprobs else "include")
        self.params = service.params(
            body,
            max_tokens=body.max_output_tokens or _UNLIMITED,
            logprobs=(body.top_logprobs or 0) if scored else None,
            structured_outputs=talk.structure(structure(form)),
        )
        self.format: dict[str, Any] = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        if "strict" in self.format:
            self.format["strict"] = True  # every answer fits
        of = "text.format" if choice.structure(None) is None else "tools"
        self.requests = service.requests([talk.prompt], talk.completed(self.params), body, "input", of)
        self.reader = talk.reader(self.requests[0])

    async def answer(self) -> dict[str, Any]:
        """Return the whole response."""
        (delta,) = await self.service.whole(self.requests)
        output = _Output()
        for _ in self._changes(output, delta):
            pass
        for _ in output.close(_status(delta)):
            pass
        return self._object(delta, output.items)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield one event for each change of the response."""
        number = 0

        def change_event(kind: str, fields: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

        begun, output = self._object(None, []), _Output()
        with self.service.running(self.requests) as ticket:
            yield change_event("response.created", {"response": begun})
            yield change_event("response.in_progress", {"response": begun})
            async for deltas in ticket.deltas():
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        failed = begun | {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
                        yield change_event("response.failed", {"response": failed})
                        return
                    for change in self._changes(output, delta):
                        yield change_event(*change)
        for change in output.close(_status(delta)):
            yield change_event(*change)
        whole = self._object(delta, output.items)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        yield change_event(kind, {"response": whole})
        yield DONE

    # ------------------------------------------------------------------ inside

    def _changes(self, output: "_Output", delta: Update) -> Iterator[tuple[str, dict[str, Any]]]:
        logprobs = [self.service.logprob(each) for each in delta.logprobs]
        for piece in self.reader.pieces(delta):
            yield from output.add(piece, logprobs)
            logprobs = []

    def _object(self, delta: Update | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, choice = self.body, self.body.tool_choice
        status = "in_progress" if delta is None else _status(delta)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": self.params.frequency_penalty,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": self.params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": self.format},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedResponseTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or () if isinstance(tool, ResponseTool)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None if delta is None else self._usage(),
            "user": body.user,
            **({} if delta is None else self.service.metrics(self.requests, body)),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.service.usage(self.requests, 1, reasoning=self.reader.reasoning_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


class _Output:
    """The items of a response under construction, and the events that report them.

    Attributes:
        items: the complete items.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item under construction
        self._spaces = ""  # spaces and line ends that start a message if text follows
        self._logprobs: list[dict[str, Any]] = []  # of tokens without text so far

    def add(self, piece: Piece, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a delta and the log-probabilities of its tokens; yield events as pairs of kind and fields."""
        self._logprobs += logprobs
        if piece.reasoning:
            yield from self._write("reasoning", piece.reasoning)
        begun = [call for call in piece.calls if "id" in call]
        for call in piece.calls:
            if "id" not in call:  # the remaining arguments of the open call precede the text
                yield from self._write("function_call", call["function"]["arguments"])
        content = self._spaces + piece.content
        if content.strip() or (content and self._open_kind == "message"):
            self._spaces = ""
            yield from self._write("message", content)
        else:
            self._spaces = "" if begun else content
        for call in begun:
            function = call["function"]
            yield from self._close("completed")
            item = {"type": "function_call", "id": new_id("fc_"), "call_id": call["id"], "name": function["name"]}
            yield from self._begin({**item, "arguments": "", "status": "in_progress"})
            if function["arguments"]:
                yield from self._write("function_call", function["arguments"])

    def close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Nothing follows."""
        if not self.items and self._open is None:
            yield from self._write("message", self._spaces)
        yield from self._close(status)

    @property
    def _open_kind(self) -> str | None:
        return None if self._open is None else self._open["type"]

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items)}

    def _begin(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        self._open = item
        shown = {key: [] if key == "content" else value for key, value in item.items()}
        yield "response.output_item.added", {"output_index": len(self.items), "item": shown}

    def _write(self, kind: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._open_kind != kind:
            yield from self._close("completed")
            yield from self._begin(_empty(kind))
            yield "response.content_part.added", {**self._place, "content_index": 0, "part": _part(kind, "")}
        assert self._open is not None
        if kind == "function_call":
            self._open["arguments"] += text
            yield "response.function_call_arguments.delta", {**self._place, "delta": text}
            return
        self._open["content"][0]["text"] += text
        fields: dict[str, Any] = {**self._place, "content_index": 0, "delta": text}
        if text and kind == "message":
            yield "response.output_text.delta", {**fields, "logprobs": self._scored()}
        elif text:
            yield "response.reasoning_text.delta", fields

    def _scored(self) -> list[dict[str, Any]]:
        """Return the new log-probabilities for the open message."""
        assert self._open is not None
        new, self._logprobs = self._logprobs, []
        self._open["content"][0]["logprobs"] += new
        return new

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            fields = {**self._place, "arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", fields
        else:
            text = item["content"][0]["text"]
            fields = {**self._place, "content_index": 0, "text": text}
            if item["type"] == "message":
                self._scored()  # of a token that ends an answer
                yield "response.output_text.done", {**fields, "logprobs": item["content"][0]["logprobs"]}
            else:
                yield "response.reasoning_text.done", fields
            yield "response.content_part.done", {**self._place, "content_index": 0, "part": item["content"][0]}
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open = None


def _empty(kind: str) -> dict[str, Any]:
    """An item that receives text."""
    if kind == "reasoning":
        return {"type": kind, "id": new_id("rs_"), "summary": [], "content": [_part(kind, "")], "status": "in_progress"}
    item = {"type": kind, "id": new_id("msg_"), "status": "in_progress", "role": "assistant"}
    return {**item, "content": [_part(kind, "")]}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(body: ResponsesRequest) -> list[Message]:
    """Convert the input to messages for the chat template; consecutive calls form one message."""
    found = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, InputCall):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function)
            if found and found[-1].tool_calls:
                found[-1].tool_calls.append(call)
            else:
                found.append(Message(role="assistant", tool_calls=[call]))
        elif isinstance(item, InputCallOutput):
            found.append(Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
        elif isinstance(item, InputReasoning):
            continue  # the reasoning of earlier answers is not part of the conversation
        else:
            found.append(Message(role=item.role, content=_joined(item.content)))
    return found


def _joined(content: str | Sequence[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content)


def _status(delta: Update) -> str:
    return "incomplete" if delta.finish_reason == "length" else "completed"
