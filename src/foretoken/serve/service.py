"""What the ways to ask have in common: parameters, prompts, tickets, and what a request has used."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM, Prompt
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.text.reasoning import knows_reasoning
from foretoken.engine.updates import Update
from foretoken.options.option import declared
from foretoken.options.sampling import SamplingParams
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.loop import EngineLoop, Ticket
from foretoken.serve.metrics import Timings
from foretoken.serve.schema import AnyText, JsonObject, NamedSchema, ResponsesRequest, Sampling, SchemaFormat
from foretoken.serve.token_text import TokenText

_DECLARED = tuple(each.name for each in declared(SamplingParams) if each.option.over_http)
_COMPLETIONS = 128  # that one request may always ask for: the largest n
FINGERPRINT = f"foretoken-{version('foretoken')}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes.

    Attributes:
        body: bytes of a request, at most.
        patience: seconds that a client may take to receive one piece of a stream.
    """

    body: int = 8 * 2**20
    patience: float = 60.0


class Service:
    """One model after its loop.

    Args:
        loop: runs it.
        name: what clients call it.
        limits: what is taken.
        reasoning: whether "<think>…</think>" in an answer to a conversation is told apart; None: where the chat
            template knows of it.
    """

    def __init__(
        self, loop: EngineLoop, name: str, limits: Limits | None = None, *, reasoning: bool | None = None
    ) -> None:
        self.loop = loop
        self.name = name
        self.limits = limits or Limits()
        self.created = int(time.time())
        self.timings = Timings(name)
        self.token_text = TokenText(self.llm.tokenizer)
        self.reasoning = knows_reasoning(self.llm.tokenizer) if reasoning is None else reasoning
        asked = self.llm.default_params
        # a checkpoint that asks for nothing leaves OpenAI's default, which is to sample
        self._defaults = replace(asked, temperature=1.0) if asked.greedy else asked

    @property
    def llm(self) -> LLM:
        return self.loop.llm

    def check_model(self, name: str) -> None:
        """Refuse another model than the one that is served.

        Raises:
            ApiError: 404.
        """
        if name != self.name:
            message = f"the model '{name}' is not served here; there is '{self.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def params(self, body: Sampling, **more: Any) -> SamplingParams:
        """Sampling params of a request: what it says, else the defaults.

        Args:
            more: fields that are not of the same name in every way to ask; None: the default's.
        Raises:
            ApiError: 400, names the field.
        """
        given = {name: getattr(body, name) for name in _DECLARED} | more
        if body.structured_outputs is not None:
            if more.get("structured_outputs") is not None:
                message = (
                    "structured_outputs are given next to a response_format or tools that say what is written: keep one"
                )
                raise ApiError(400, message, param="structured_outputs")
            given["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        given["seed"] = None if body.seed is None else body.seed % 2**63
        try:
            return replace(self._defaults, **{name: value for name, value in given.items() if value is not None})
        except ForetokenError as error:
            raise api_error(error) from None

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: Sampling | ResponsesRequest,
        param: str,
        form: str = "structured_outputs",
    ) -> list[Request]:
        """The requests of some prompts, ``params.n`` for each.

        Args:
            body: what else was asked.
            param: the field that the prompts come from.
            form: the field that says what an answer has to be.
        Raises:
            ApiError: 400: a prompt or the params cannot be used.
        """
        most = max(self.loop.capacity, _COMPLETIONS)
        if len(prompts) * params.n > most:
            message = (
                f"{len(prompts)} prompts with n={params.n} are more completions than one request may ask for, {most}"
            )
            raise ApiError(400, f"{message}: send several requests", param=param)
        max_draft = None if body.speculation is None else body.speculation.max_draft
        found = []
        for prompt in prompts:
            try:
                found += self.llm.new_requests(prompt, params, max_draft=max_draft, cache_salt=body.cache_salt)
            except ForetokenError as error:
                if str(error).startswith("structured_outputs"):
                    raise api_error(error, form) from None
                raise api_error(error, param if "prompt 0" in str(error) else None) from None
        return found

    @contextmanager
    def running(self, requests: Sequence[Request], *, streamed: bool = True) -> Iterator[Ticket]:
        """Run requests while somebody waits for them; they end with the block.

        Args:
            streamed: whether pieces are wanted, or what comes of each as a whole.
        Raises:
            ApiError: 429 or 503: there is no room, or no engine.
        """
        try:
            ticket = self.loop.submit(requests, streamed=streamed)
        except ForetokenError as error:
            raise api_error(error) from None
        try:
            yield ticket
        finally:
            self.loop.cancel(ticket)
            self.timings.count(ticket)

    async def whole(self, requests: Sequence[Request]) -> list[Update]:
        """Run requests to their end: all that came of each.

        Raises:
            ApiError: one of them failed; the others are ended.
        """
        found: dict[int, Update] = {}
        with self.running(requests, streamed=False) as ticket:
            async for deltas in ticket.deltas():
                for delta in deltas:
                    refuse_failure(delta)
                    if delta.index in found:
                        found[delta.index].join(delta)
                    else:
                        found[delta.index] = delta
        return [found[index] for index in sorted(found)]

    def usage(
        self, requests: Sequence[Request], num_prompts: int, *, reasoning: int = 0, told: int | None = None
    ) -> dict[str, Any]:
        """What requests have used, and how speculation went.

        Args:
            num_prompts: of how many prompts they are: a prompt counts once.
            reasoning: tokens of their reasoning.
            told: tokens that their reader knows of, where they still run; None: they have ended. How speculation
                goes is not said before: the engine is writing it down.
        """
        firsts = requests[:: max(1, len(requests) // num_prompts)]
        prompt = sum(request.num_prompt for request in firsts)
        cached = sum(request.num_cached for request in firsts)
        tokens = sum(request.num_output for request in requests) if told is None else told
        speculation = self._speculation(requests) if told is None else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": 0 if self.llm.engine.prefixes is None else prompt - cached,
            },
            "completion_tokens_details": {"reasoning_tokens": reasoning, **speculation},
        }

    def _speculation(self, requests: Sequence[Request]) -> dict[str, Any]:
        total = Metrics()
        for request in requests:
            total.add(request.metrics)
        report = {
            "method": self.llm.recipe.method,
            "promise": self.llm.recipe.promise_for(requests[0].params),
            "steps": total.num_steps,
            "tokens_per_step": round(total.tokens_per_step, 4),
            "draft_tokens": total.num_draft_tokens,
            "accepted_tokens": total.num_accepted_tokens,
            "distortion": None if total.distortion != total.distortion else total.distortion,
        }
        return {"speculation": report}

    def shown(self, delta: Update) -> list[dict[str, Any]]:
        """The tokens of a delta and where each comes from; special ones, which are no text, have no bytes."""
        special = self.token_text.special
        return [
            {"bytes": [] if token in special else list(self.token_text(token)[1]), "drafted": drafted}
            for token, drafted in zip(delta.token_ids, delta.drafted, strict=True)
        ]

    def logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """How probable a token was, and the most probable ones next to it."""
        text, raw = self.token_text(entry.token_id)
        top = [{"token": t, "logprob": value, "bytes": list(b)} for t, b, value in self.top(entry)]
        return {"token": text, "logprob": entry.logprob, "bytes": list(raw), "top_logprobs": top}

    def top(self, entry: TokenLogprob) -> list[tuple[str, bytes, float]]:
        """The most probable tokens of a place: text, bytes, log-probability."""
        return [(*self.token_text(token), value) for token, value in entry.top]


def structure(form: AnyText | JsonObject | SchemaFormat | NamedSchema | None) -> dict[str, Any] | None:
    """What a format asks of a text, as ``structured_outputs`` say it; None: nothing.

    Raises:
        ApiError: 400: it has no schema.
    """
    if form is None or isinstance(form, AnyText):
        return None
    if isinstance(form, JsonObject):
        return {"json_object": True}
    named = form.json_schema if isinstance(form, SchemaFormat) else form
    if named.json_schema is None:
        raise ApiError(400, f"the format '{named.name}' has no schema", param="response_format")
    return {"json": named.json_schema}


def refuse_failure(delta: Update) -> None:
    """Raise what ended a request, if that was a failure.

    Raises:
        ApiError: 500; 503 where the loop has ended it, 400 where nothing can be written that is what it asks for.
    """
    if delta.error is not None:
        if delta.unserved:
            raise ApiError(503, delta.error, code="unavailable")
        raise ApiError(400 if delta.unfit else 500, delta.error)


async def first_of(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events, of which the first exists already: what is refused is refused before the answer begins."""
    try:
        begun = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def again() -> AsyncGenerator[bytes, None]:
        try:
            yield begun
            async for each in events:
                yield each
        finally:
            await events.aclose()

    return again()


def new_id(kind: str) -> str:
    """An identifier that begins as OpenAI's do: by its beginning clients tell what it is of."""
    return f"{kind}{uuid.uuid4().hex}"
