"""``POST /v1/chat/completions``: conversations, in one piece or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.engine.request import TokenLogprob
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.loop import Delta
from foretoken.serve.schema import ChatRequest, Message, Tool
from foretoken.serve.service import FINGERPRINT, Service, new_id, refuse_failure, structure
from foretoken.serve.stream import DONE, event
from foretoken.serve.tools import CallReader, calls_in

_UNLIMITED = 2**31  # the context's end is the limit


class Chat:
    """One conversation that is to be answered.

    Args:
        service: the model.
        body: what was asked.
    Raises:
        ApiError: it cannot be answered; nothing runs.
    """

    def __init__(self, service: Service, body: ChatRequest) -> None:
        service.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options go with stream=true only", param="stream_options")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs go with logprobs=true only", param="top_logprobs")
        self.service = service
        self.body = body
        self.id, self.created = new_id("chatcmpl"), int(time.time())
        self.with_tools = bool(body.tools) and body.tool_choice != "none"
        prompt = chat_prompt(service, body.messages, body.tools if self.with_tools else None)
        length = body.max_completion_tokens or body.max_tokens or _UNLIMITED
        params = service.params(
            body,
            max_tokens=length,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=structure(body.response_format),
        )
        self.requests = service.requests([prompt], params, body, "messages")

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        deltas = await self.service.whole(self.requests)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.service.name,
            "choices": [self._choice(delta) for delta in deltas],
            "usage": self.service.usage(self.requests, 1),
            "system_fingerprint": FINGERPRINT,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        options = self.body.stream_options
        every = options is not None and bool(options.continuous_usage_stats)
        readers = [CallReader() if self.with_tools else None for _ in self.requests]
        with self.service.running(self.requests) as ticket:
            for index in range(len(self.requests)):
                yield event(self._chunk([_piece(index, {"role": "assistant", "content": ""})]))
            async for deltas in ticket.deltas():
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        yield event(error.body)
                        return
                    usage = self.service.usage(self.requests, 1) if every else None
                    yield event(self._chunk([self._streamed(delta, readers[delta.index])], usage))
        if options is not None and options.include_usage:
            yield event(self._chunk([], self.service.usage(self.requests, 1)))
        yield DONE

    # ------------------------------------------------------------------ inside

    def _choice(self, delta: Delta) -> dict[str, Any]:
        content, calls = calls_in(delta.text) if self.with_tools else (delta.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        choice = {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason,
        }
        return choice | self._shown(delta)

    def _streamed(self, delta: Delta, reader: CallReader | None) -> dict[str, Any]:
        content: dict[str, Any] = {}
        reason = delta.finish_reason
        if reader is None:
            content["content"] = delta.text
        else:
            text, calls = reader.read(delta.text, final=reason is not None)
            content["content"] = text
            if calls:
                content["tool_calls"] = calls
            if reader.num_calls and reason == "stop":
                reason = "tool_calls"
        piece = _piece(delta.index, content, reason)
        if self.body.logprobs:
            piece["logprobs"] = self._logprobs(delta.logprobs)
        return piece | self._shown(delta)

    def _shown(self, delta: Delta) -> dict[str, Any]:
        wanted = self.body.speculation is not None and self.body.speculation.show
        return {"speculation": self.service.shown(delta)} if wanted else {}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
        options = self.body.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            chunk["usage"] = usage
        return chunk

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": [self._entry(each) for each in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        text, raw = self.service.token_text(entry.token_id)
        top = [{"token": t, "logprob": value, "bytes": list(b)} for t, b, value in self.service.top(entry)]
        return {"token": text, "logprob": entry.logprob, "bytes": list(raw), "top_logprobs": top}


def _piece(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def chat_prompt(service: Service, messages: Sequence[Message], tools: Sequence[Tool] | None) -> dict[str, list[int]]:
    """The prompt that the model's chat template makes of a conversation.

    Raises:
        ApiError: 400: the model has no template, or it does not take these messages or tools.
    """
    plain: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise ApiError(400, f"messages[{place}] of role '{message.role}' has no content", param="messages")
        said: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        said["content"] = message.text
        if message.tool_calls:
            said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                said[name] = getattr(message, name)
        plain.append(said)
    given = None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        return service.llm.chat_prompt(plain, tools=given)
    except ForetokenError as error:
        raise api_error(error, "messages") from None
