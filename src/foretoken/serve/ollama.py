"""Ollama's ``/api/chat`` and ``/api/generate``: bodies, and answers as lines of JSON or as one object.

A body is translated to that of a chat or a completion, which checks its values and computes the answer.
"""

import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import datetime, timezone
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from foretoken.engine.text.reasoning import marks_of
from foretoken.engine.updates import Update
from foretoken.serve.chat import Chat
from foretoken.serve.completions import Completion
from foretoken.serve.conversation import AnswerReader
from foretoken.serve.errors import ApiError, invalid
from foretoken.serve.infill import Infill
from foretoken.serve.loop import Ticket
from foretoken.serve.model_pool import ModelSettings
from foretoken.serve.schema import Body, ChatRequest, CompletionRequest
from foretoken.serve.service import Service, new_id, refuse_failure
from foretoken.serve.tools import joined, json_or_none

# operations on the models of a machine, which this server does not have
MANAGEMENT = ("pull", "push", "create", "copy", "delete", "blobs", "embed", "embeddings")
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's, where the checkpoint has none
_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}  # of a message, here
_NO_LIMIT = 2**31  # the limit is the context length
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")


def _seconds(given: Any) -> Any:
    """Convert "5m", "1h30m" or a number of seconds; a negative one is for ever."""
    if isinstance(given, str):
        text = given.removeprefix("-")
        if not text or _DURATION.sub("", text):
            raise PydanticCustomError("duration", "Input should be seconds, or a time such as 5m or 1h30m")
        given = sum(float(value) * _UNITS[unit] for value, unit in _DURATION.findall(text)) * (1 - 2 * (given != text))
    return given


class OllamaRequest(Body):
    """The fields of both paths."""

    model: str | None = None
    stream: bool | None = True
    options: Annotated[
        dict[str, Any] | None, Field(description="Sampling options; Ollama's defaults, if the checkpoint has none.")
    ] = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, Field(description="json, or a JSON schema.")] = None
    think: Annotated[bool | str | None, Field(description="Whether to reason, or the effort.")] = None
    keep_alive: Annotated[
        float | None,
        BeforeValidator(_seconds),
        Field(description="Time in memory without requests: seconds or 5m; 0: leave now; negative: stay."),
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class OllamaChat(OllamaRequest):
    """``POST /api/chat``."""

    messages: Annotated[list[dict[str, Any]] | None, Field(description="None: load the model.")] = None
    tools: list[Any] | None = None


class OllamaGenerate(OllamaRequest):
    """``POST /api/generate``."""

    prompt: Annotated[str | None, Field(description="None: load the model.")] = None
    suffix: Annotated[str | None, Field(description="Text after the answer, for models with tokens for infill.")] = None
    system: str | None = None
    raw: Annotated[bool | None, Field(description="Continue the prompt without the chat template.")] = None
    images: Annotated[list[Any] | None, Field(max_length=0)] = None


class OllamaAnswer:
    """One request to answer.

    Args:
        service: the model.
        body: the request.
        began: when it arrived, from ``time.monotonic``.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    media_type = "application/x-ndjson"

    def __init__(self, service: Service, body: OllamaChat | OllamaGenerate, began: float) -> None:
        self.service, self.model, self.id = service, body.model or service.name, new_id("ollama-")
        self._began, self._loaded = began, monotonic()
        self._chats = isinstance(body, OllamaChat)
        self._calls: list[dict[str, Any]] = []
        self._shows = bool(body.logprobs)
        made: Chat | Completion
        try:
            if isinstance(body, OllamaGenerate) and (body.raw or body.suffix or not service.llm.is_chat_model):
                inner: Any = _with_defaults(CompletionRequest.model_validate(_of_text(body)), service)
                made, self._reader = Completion(service, inner), AnswerReader(None, None)
            else:
                inner = _with_defaults(ChatRequest.model_validate(_of_conversation(body)), service)
                made = Chat(service, inner)
                self._reader = made.readers[0]
        except ValidationError as error:
            raise invalid(error.errors()) from None
        except ApiError as error:
            raise ApiError(error.status, str(error).replace("structured_outputs.json", "format")) from None
        for name in inner.unknown:
            own = "think" if name in ("reasoning_effort", "enable_thinking") else name
            body.ignore(f"options.{name}" if name in (body.options or {}) else own)
        self.requests = made.requests

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        with self.service.running(self.requests, streamed=False) as ticket:
            (delta,) = [delta async for deltas in ticket.deltas() for delta in deltas]
            refuse_failure(delta)
            return self._piece(delta) | self._final(delta, ticket)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in lines."""
        with self.service.running(self.requests) as ticket:
            async for deltas in ticket.deltas():
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        yield _line({"error": str(error)})
                        return
                    yield _line(self._piece(delta) | {"done": False})
            yield _line(self._named("", {}) | self._final(delta, ticket))

    def _piece(self, delta: Update) -> dict[str, Any]:
        piece = self._reader.read(delta)
        self._calls += piece.calls
        found: dict[str, Any] = {"thinking": piece.reasoning} if piece.reasoning else {}
        if delta.finish_reason is not None and self._calls:
            functions = [call["function"] for call in joined(self._calls)]
            found["tool_calls"] = [
                {"function": {"name": each["name"], "arguments": json_or_none(each["arguments"]) or {}}}
                for each in functions
            ]
        logprobs = {"logprobs": [self.service.logprob(each) for each in delta.logprobs]} if self._shows else {}
        return self._named(piece.content.strip() if piece.calls else piece.content, found) | logprobs

    def _named(self, content: str, more: dict[str, Any]) -> dict[str, Any]:
        found = {"model": self.model, "created_at": stamp(time.time())}
        if self._chats:
            return found | {"message": {"role": "assistant", "content": content, **more}}
        return found | {"response": content, **more}

    def _final(self, delta: Update, ticket: Ticket) -> dict[str, Any]:
        request, now = self.requests[0], monotonic()
        first, ended = ticket.first_token or now, ticket.ended or now
        seconds = {
            "total": now - self._began,
            "load": self._loaded - self._began,
            "prompt_eval": first - ticket.submitted,
            "eval": ended - first,
        }
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "prompt_eval_count": request.num_prompt,
            "eval_count": request.num_output,
            **{f"{name}_duration": int(value * 1e9) for name, value in seconds.items()},
        }


def ollama_card(settings: ModelSettings) -> dict[str, Any]:
    """Return what ``/api/show`` says of a model, whether it is loaded or not."""
    from foretoken.models.load import load_config, load_tokenizer

    tokenizer, config = (load(settings.model, **settings.origin) for load in (load_tokenizer, load_config))
    can = ["completion", *(["tools"] if tokenizer.chat_template else [])]
    can += ["thinking"] if marks_of(tokenizer) else []
    with suppress(ApiError):
        can += ["insert"] if Infill(tokenizer).stops is not None else []
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    info = {"general.architecture": config.model_type, f"{config.model_type}.context_length": length}
    return {"template": str(tokenizer.chat_template or ""), "details": {}, "model_info": info, "capabilities": can}


def stamp(seconds: float) -> str:
    """Return a time in ISO's form."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _with_defaults(body: Any, service: Service) -> Any:
    """Set Ollama's defaults, unless the checkpoint has its own."""
    for name, value in _DEFAULTS.items():
        if service.llm.default_params.greedy and getattr(body, name) is None:
            setattr(body, name, value)
    return body


def _shared(body: OllamaRequest) -> dict[str, Any]:
    """Return the fields that both paths have, under OpenAI's names."""
    found = {name: value for name, value in (body.options or {}).items() if value is not None}
    for name in [name for name in ("n", "best_of") if found.pop(name, None) is not None]:  # there is one answer
        body.ignore(f"options.{name}")
    if (limit := found.pop("draft_num_predict", None)) is not None:
        found["speculation"] = {"num_speculative_tokens": limit}
    if found.get("num_predict") in (-1, -2):  # as long as the context
        del found["num_predict"]
    if body.format:
        found["structured_outputs"] = {"json_object": True} if body.format == "json" else {"json": body.format}
    return {**found, "model": body.model}


def _of_text(body: OllamaGenerate) -> dict[str, Any]:
    found = {"max_tokens": _NO_LIMIT} if "num_predict" not in (shared := _shared(body)) else {}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return {**shared, **found, "prompt": body.prompt, "suffix": body.suffix, "logprobs": logprobs}


def _of_conversation(body: OllamaChat | OllamaGenerate) -> dict[str, Any]:
    found = {**_shared(body), "logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    found["enable_thinking" if isinstance(body.think, bool) else "reasoning_effort"] = body.think
    if isinstance(body, OllamaChat):
        return found | {"messages": list(map(_message, body.messages or ())), "tools": body.tools}
    system = [{"role": "system", "content": body.system}] if body.system else []
    return found | {"messages": [*system, {"role": "user", "content": body.prompt}]}


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """Rename the fields of a message; arguments of calls become texts."""
    found = {"content": "", **{_NAMES.get(name, name): value for name, value in given.items()}}
    if found.pop("images", None):
        raise ApiError(400, "messages have images, and this server reads text: leave them out")
    calls = found.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            call.setdefault("id", f"call_{number}")
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def _line(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "replace")
