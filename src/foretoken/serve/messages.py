"""Anthropic's ``POST /v1/messages``: an answer as content blocks, as one object or as events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from foretoken.engine.updates import Update
from foretoken.serve.conversation import Conversation, Piece
from foretoken.serve.errors import ApiError
from foretoken.serve.messages_schema import CountRequest, MessagesRequest
from foretoken.serve.service import Service, new_id, of_prediction, refuse_failure
from foretoken.serve.stream import event
from foretoken.serve.tool_choice import ToolChoice
from foretoken.serve.tool_formats import ToolGrammar
from foretoken.serve.tools import json_or_none

_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}
_PING_SECONDS = 10.0
_SIGNATURE = "foretoken"  # opaque to clients, which send it back
_TYPES = {413: "request_too_large", 503: "overloaded_error"}  # others are OpenAI's


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    said = error.body["error"]
    kind = _TYPES.get(error.status, said["type"].replace("server_error", "api_error"))
    return {"type": "error", "error": {"type": kind, "message": said["message"]}, "request_id": request_id}


def count_tokens(service: Service, body: CountRequest) -> dict[str, int]:
    """Return the number of tokens of a request's prompt.

    Raises:
        ApiError: the request is not valid.
    """
    service.check_model(body.model)
    talk = Conversation(service, body.conversation(), _choice(body, service.tool_grammar), body)
    return {"input_tokens": len(talk.prompt["prompt_token_ids"])}


class Messages:
    """One answer to compute.

    Args:
        service: the model.
        body: the request.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    def __init__(self, service: Service, body: MessagesRequest) -> None:
        self.model = service.check_model(body.model)
        self.service = service
        self.id = new_id("msg_")
        choice = _choice(body, service.tool_grammar)
        talk = Conversation(service, body.conversation(), choice, body)
        form = None if body.output_config is None or body.output_config.format is None else body.output_config.format
        wanted = talk.structure(None if form is None else {"json": form.json_schema})
        params = service.params(body, max_tokens=body.max_tokens, structured_outputs=wanted)
        self._limit = body.max_tokens
        self._stops = params.stop_strings
        of = "output_config" if choice.structure(None) is None else "tools"
        self.requests = service.requests([talk.prompt], talk.completed(params), body, "messages", of)
        self.reader = talk.reader(self.requests[0])

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        (delta,) = await self.service.whole(self.requests)
        blocks = _Blocks()
        for _ in self._changes(blocks, delta):
            pass
        for _ in blocks.close():
            pass
        stop = self._stop(delta)
        return {**self._message(), "content": blocks.found, **stop, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield one event for each change of the answer."""
        usage = {"input_tokens": 0, "output_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        blocks = _Blocks()
        with self.service.running(self.requests) as ticket:
            begun = False
            async for deltas in _with_pings(ticket.deltas()):
                if not begun:
                    begun = True
                    usage = usage if deltas is None else {**self._usage(), "output_tokens": 0}
                    start = {
                        **self._message(),
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": usage,
                    }
                    yield _event("message_start", message=start)
                if deltas is None:
                    yield _event("ping")
                    continue
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        yield event(error_body(error, self.id), "error")
                        return
                    for change in self._changes(blocks, delta):
                        yield change
        for change in blocks.close():
            yield change
        yield _event("message_delta", delta=self._stop(delta), usage=self._usage())
        yield _event("message_stop")

    # ------------------------------------------------------------------ inside

    def _changes(self, blocks: "_Blocks", delta: Update) -> Iterator[bytes]:
        for piece in self.reader.pieces(delta):
            yield from blocks.add(piece)

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _stop(self, delta: Update) -> dict[str, Any]:
        request = self.requests[0]
        if delta.finish_reason == "length":
            whole = request.num_output >= self._limit
            return {"stop_reason": "max_tokens" if whole else "model_context_window_exceeded", "stop_sequence": None}
        if self.reader.num_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if request.stop_reason in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": request.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage; ``input_tokens`` leaves out the tokens that were reused."""
        request = self.requests[0]
        copied = {} if request.prediction is None else of_prediction(self.requests)
        return {
            "input_tokens": request.num_prompt - request.num_cached,
            "cache_read_input_tokens": request.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": request.num_output,
            "output_tokens_details": {"thinking_tokens": self.reader.reasoning_tokens, **copied},
        }


class _Blocks:
    """The content blocks of an answer under construction, and the events that report them.

    Attributes:
        found: the complete blocks.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments = ""
        self._spaces = ""  # spaces and line ends that start a text if more follows

    def add(self, piece: Piece) -> Iterator[bytes]:
        """Take in a piece of the answer."""
        if piece.reasoning:
            yield from self._write("thinking", "thinking", piece.reasoning)
        begun = [call for call in piece.calls if "id" in call]
        for call in piece.calls:
            if "id" not in call:
                yield from self._argue(call["function"]["arguments"])
        text = self._spaces + piece.content
        if text.strip() or (text and self._open is not None and self._open["type"] == "text"):
            self._spaces = ""
            yield from self._write("text", "text", text)
        else:
            self._spaces = "" if begun else text
        for call in begun:
            yield from self.close()
            name = call["function"]["name"]
            yield from self._begin(
                {"type": "tool_use", "id": call["id"].replace("call_", "toolu_", 1), "name": name, "input": {}}
            )
            yield from self._argue(call["function"]["arguments"])

    def close(self) -> Iterator[bytes]:
        """End the open block."""
        block = self._open
        if block is None:
            return
        if block["type"] == "tool_use":
            found = json_or_none(self._arguments or "{}")
            block["input"] = found if isinstance(found, dict) else {}  # a call that was cut has none
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta("signature_delta", "signature", _SIGNATURE)
        yield _event("content_block_stop", index=len(self.found))
        self.found.append(block)
        self._open, self._arguments = None, ""

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        self._open = block
        yield _event("content_block_start", index=len(self.found), content_block=dict(block))

    def _write(self, kind: str, field: str, text: str) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin({"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {}))
        assert self._open is not None
        self._open[field] += text
        yield self._delta(f"{kind}_delta", field, text)

    def _argue(self, text: str) -> Iterator[bytes]:
        if text:
            self._arguments += text
            yield self._delta("input_json_delta", "partial_json", text)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=len(self.found), delta={"type": kind, field: text})


def _choice(body: CountRequest, writes: ToolGrammar) -> ToolChoice:
    wanted = body.tool_choice
    kind = None if wanted is None else wanted.type
    if kind == "tool" and (wanted is None or not wanted.name):
        raise ApiError(400, "tool_choice of type 'tool' needs a name", param="tool_choice.name")
    parallel = not (wanted is not None and wanted.disable_parallel_tool_use)
    function = wanted.name if wanted is not None and kind == "tool" else None
    return ToolChoice(
        body.offered(), None if kind is None else _CHOICES[kind], function, parallel=parallel, writes=writes
    )


async def _with_pings(updates: AsyncIterator[list[Update]]) -> AsyncGenerator[list[Update] | None, None]:
    """Yield updates, and None after each silence."""
    waiting: asyncio.Future[list[Update]] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(updates))
            done, _ = await asyncio.wait({waiting}, timeout=_PING_SECONDS)
            if not done:
                yield None
                continue
            try:
                found = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield found
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
