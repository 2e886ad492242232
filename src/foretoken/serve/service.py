"""Shared parts of the endpoints: parameters, prompts, tickets and usage."""

import re
import uuid
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM, Prompt
from foretoken.engine.prediction import SOURCE
from foretoken.engine.request import Request, TokenLogprob
from foretoken.engine.text.reasoning import marks_of
from foretoken.engine.updates import Update
from foretoken.models.token_text import TokenText
from foretoken.options.lora import LoRARequest
from foretoken.options.option import declared
from foretoken.options.sampling import SamplingParams
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.loop import EngineLoop, Ticket
from foretoken.serve.metrics import Histograms, Timings
from foretoken.serve.responses_schema import NamedSchema
from foretoken.serve.schema import AnyText, JsonObject, Sampling, SchemaFormat, Speculation
from foretoken.serve.tool_formats import ToolGrammar, format_of

_DECLARED = tuple(each.name for each in declared(SamplingParams) if each.option.over_http)
_COMPLETIONS = 128  # the largest n, which one request may always use
FINGERPRINT = f"foretoken-{version('foretoken')}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    Attributes:
        body: maximum bytes of a request.
        patience: maximum seconds for a client to receive one piece of a stream.
        strict: refuse every unknown field.
        metrics: the speculative metrics of answers, unless the request chooses: none, summary or detailed.
        queue, seconds: of each model, see :class:`EngineLoop`.
    """

    body: int = 8 * 2**20
    patience: float = 60.0
    strict: bool = False
    metrics: str = "none"
    queue: int = 256
    seconds: float | None = None


class Service:
    """One model and the loop that runs it.

    Args:
        loop: runs the model.
        names: the model's names for clients; the first is the one of ``/metrics``. A name with ``*`` stands for all
            names of that form.
        limits: limits of the requests.
        reasoning: whether to separate "<think>…</think>" from the answer in a conversation; None: if the chat template
            uses it.
        tool_parser: the form of the model's tool calls (tool_formats.py); "auto": by the chat template.
        adapters: folders of adapters by the names under which clients select them, also after the model's name and a
            colon.
        histograms: of the process; None: new ones.
    Raises:
        ForetokenError: an adapter cannot be loaded, does not fit the model or the recipe, or has the model's name.
    """

    def __init__(
        self,
        loop: EngineLoop,
        names: str | Sequence[str],
        limits: Limits | None = None,
        *,
        reasoning: bool | None = None,
        tool_parser: str = "auto",
        adapters: Mapping[str, str] | None = None,
        histograms: Histograms | None = None,
    ) -> None:
        self.loop = loop
        self.names = [names] if isinstance(names, str) else list(names)
        self.name = self.names[0]
        self.limits = limits or Limits()
        self.timings = Timings(self.name, histograms)
        self.token_text = TokenText(self.llm.tokenizer)
        self.reasoning = marks_of(self.llm.tokenizer) is not None if reasoning is None else reasoning
        tokenizer = self.llm.tokenizer
        self.special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if added.special:  # a text leaves all of these out
                self.special[added.content] = token
        self.tool_grammar = ToolGrammar(format_of(tokenizer, tool_parser), self.special)
        self.adapters: dict[str, LoRARequest] = {}
        for lora_name, folder in (adapters or {}).items():
            self.load_adapter(lora_name, folder)
        asked = self.llm.default_params
        # without a checkpoint's default, OpenAI's default applies: sample
        self._defaults = replace(asked, temperature=1.0) if asked.greedy else asked

    @property
    def llm(self) -> LLM:
        return self.loop.llm

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve an adapter under a name.

        Raises:
            ForetokenError: it cannot be loaded, does not fit, or the name is taken.
        """
        if name in self.names or name in self.adapters:
            raise ConfigError(f"adapter '{name}' has a name that is served already: choose another one")
        asked = LoRARequest(name, len(self.adapters) + 1, folder)
        self.llm.load_adapter(asked)
        self.adapters[name] = asked

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a model's name selects; None: it is none's."""
        found = None if name is None else adapter_in(name, self.names, self.adapters)
        return None if found is None else self.adapters[found]

    def check_model(self, name: str | None) -> str:
        """Return the name that answers carry: the requested one, else the first.

        Raises:
            ApiError: 404: another model is requested.
        """
        if name is not None and self.adapter_of(name) is None and not matches(name, self.names):
            raise not_served(name, self.names[:1], self.adapters)
        return name or self.name

    def params(self, body: Sampling, **more: Any) -> SamplingParams:
        """Return the sampling params of a request: its own values, else the defaults.

        Args:
            more: fields with names that differ between endpoints; None: the default.
        Raises:
            ApiError: 400; the message names the field.
        """
        given = {name: getattr(body, name) for name in _DECLARED} | more
        if body.structured_outputs is not None:
            if more.get("structured_outputs") is not None:
                message = (
                    "structured_outputs conflicts with a response_format or tools that also set the form: keep one"
                )
                raise ApiError(400, message, param="structured_outputs")
            given["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        given["prediction"] = None if body.prediction is None else body.prediction.text
        given["seed"] = None if body.seed is None else body.seed % 2**63
        try:
            return replace(self._defaults, **{name: value for name, value in given.items() if value is not None})
        except ForetokenError as error:
            raise api_error(error) from None

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: Sampling,
        param: str,
        form: str = "structured_outputs",
    ) -> list[Request]:
        """Return the requests of the prompts, ``params.n`` for each.

        Args:
            body: the request.
            param: the field that contains the prompts.
            form: the field that sets the form of the answer.
        Raises:
            ApiError: 400: a prompt or the params cannot be used.
        """
        most = max(self.loop.capacity, _COMPLETIONS)
        if len(prompts) * params.n > most:
            message = (
                f"{len(prompts)} prompts with n={params.n} are more completions than one request may ask for, {most}"
            )
            raise ApiError(400, f"{message}: send several requests", param=param)
        wanted = body.speculation or Speculation()
        max_draft = wanted.max_draft
        found, adapter = [], self.adapter_of(body.model)
        for prompt in prompts:
            try:
                found += self.llm.new_requests(
                    prompt,
                    params,
                    max_draft=max_draft,
                    method=wanted.source,
                    cache_salt=body.cache_salt,
                    lora_request=adapter,
                )
            except ForetokenError as error:
                if str(error).startswith("method="):
                    raise api_error(error, "speculation.method") from None
                if str(error).startswith("structured_outputs"):
                    sent = "structured_outputs.json" if form == "structured_outputs" else form
                    raise ApiError(400, str(error).replace("structured_outputs.json", sent, 1), param=form) from None
                raise api_error(error, param if "prompt 0" in str(error) else None) from None
        if params.prediction is not None and (max_draft == 0 or found[0].prediction is None):
            body.ignore("prediction")
        return found

    @contextmanager
    def running(self, requests: Sequence[Request], *, streamed: bool = True) -> Iterator[Ticket]:
        """Run requests inside a ``with`` block; they end with the block.

        Args:
            streamed: whether to deliver pieces, or each completion as a whole.
        Raises:
            ApiError: 429 or 503: the queue is full, or the engine has failed.
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
        """Run requests to their end; return the whole output of each.

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
        self, requests: Sequence[Request], num_prompts: int, *, reasoning: int = 0, delivered: int | None = None
    ) -> dict[str, Any]:
        """Return the usage of requests, with the speculation statistics.

        Args:
            num_prompts: number of prompts; a prompt counts once for all its completions.
            reasoning: number of reasoning tokens.
            delivered: number of tokens delivered so far, while they still run; None: they have ended. The speculation
                statistics are left out before the end, because the engine is still writing them.
        """
        firsts = requests[:: max(1, len(requests) // num_prompts)]
        prompt = sum(request.num_prompt for request in firsts)
        cached = sum(request.num_cached for request in firsts)
        tokens = sum(request.num_output for request in requests) if delivered is None else delivered
        speculation = self._speculation(requests) if delivered is None else {}
        if delivered is None and requests[0].prediction is not None:
            speculation |= of_prediction(requests)
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
            "sources": total.by_source,
            "off": total.off_steps,
            "distortion": None if total.distortion != total.distortion else total.distortion,
        }
        return {"speculation": report}

    def metrics(self, requests: Sequence[Request], body: Sampling) -> dict[str, Any]:
        """Return the speculative metrics of an answer that has ended, in vLLM's form, under the name ``metrics``.

        Returns:
            an empty mapping without them: they are not wanted, or the request has several completions.
        """
        wanted = (body.speculation.metrics if body.speculation else None) or self.limits.metrics
        if wanted == "none" or len(requests) != 1:
            return {}
        limit = None if body.speculation is None else body.speculation.max_draft
        if limit == 0 or self.llm.recipe.method == "none":
            return {"metrics": {"speculative_decoding": None}}
        return {"metrics": {"speculative_decoding": _in_vllms_form(requests[0].metrics, limit, wanted == "detailed")}}

    def shown(self, delta: Update) -> list[dict[str, Any]]:
        """Return a delta's tokens and the source of each; special tokens have no text and no bytes."""
        special = self.token_text.special
        method = self.llm.recipe.method
        return [
            {
                "bytes": [] if token in special else list(self.token_text(token)[1]),
                "drafted": drafted,
                "source": (source or method) if drafted else None,
                "refused": refused,
            }
            for token, drafted, source, refused in zip(
                delta.token_ids, delta.drafted, delta.sources, delta.refused, strict=True
            )
        ]

    def logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """Return a token's log-probability and the most probable alternatives."""
        text, raw = self.token_text(entry.token_id)
        top = [{"token": t, "logprob": value, "bytes": list(b)} for t, b, value in self.top(entry)]
        return {"token": text, "logprob": entry.logprob, "bytes": list(raw), "top_logprobs": top}

    def top(self, entry: TokenLogprob) -> list[tuple[str, bytes, float]]:
        """Return the most probable tokens of a position: text, bytes, log-probability."""
        return [(*self.token_text(token), value) for token, value in entry.top]


def matches(name: str, names: Iterable[str]) -> bool:
    """Whether a name is one of a model's, in which ``*`` stands for any text."""
    return any(re.fullmatch(".*".join(map(re.escape, each.split("*"))), name) for each in names)


def adapter_in(name: str, names: Collection[str], adapters: Collection[str]) -> str | None:
    """Return the adapter that a name selects, alone or after its model's name and a colon; None: it selects none."""
    base, colon, own = name.rpartition(":")
    return name if name in adapters else own if colon and own in adapters and base in names else None


def not_served(name: str, names: Sequence[str], adapters: Iterable[str]) -> ApiError:
    """Return the refusal of an unknown model, with the names that are known."""
    use = ", ".join(f"'{each}'" for each in (*names, *adapters))
    message = f"the model '{name}' is not served here: use {use}" + ", or leave 'model' out" * (len(names) == 1)
    return ApiError(404, message, param="model", code="model_not_found")


def of_prediction(requests: Sequence[Request]) -> dict[str, int]:
    """Return how many tokens of the prediction were drafted and accepted, and drafted and rejected."""
    drafted = sum(request.metrics.drafted_by_source.get(SOURCE, 0) for request in requests)
    accepted = sum(request.metrics.accepted_by_source.get(SOURCE, 0) for request in requests)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def _in_vllms_form(metrics: Metrics, limit: int | None, detailed: bool) -> dict[str, Any]:
    """Return counts of the steps with a draft.

    Args:
        limit: the request's limit on the nodes of a draft.
    """
    drafts = metrics.drafts
    steps, accepted = len(drafts), metrics.num_accepted_tokens
    longest = max((length for length, _ in drafts), default=0) if limit is None else limit
    histogram = [0] * (1 + max((stood for _, stood in drafts), default=0))
    for _, stood in drafts:
        histogram[stood] += 1
    found = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / metrics.num_draft_tokens if metrics.num_draft_tokens else 0.0,
        "acceptance_histogram": histogram if steps else [],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_tokens": longest,
    }
    if detailed:
        found["per_step_accepted"] = [stood for _, stood in drafts]
        found["per_step_drafted"] = [length for length, _ in drafts]
    return found


def structure(form: AnyText | JsonObject | SchemaFormat | NamedSchema | None) -> dict[str, Any] | None:
    """Convert a response format to ``structured_outputs``; None: no constraint.

    Raises:
        ApiError: 400: the schema is missing.
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
    """Raise a request's failure, if it failed.

    Raises:
        ApiError: 500; 503 if the loop ended it; 400 if no text can satisfy its constraint.
    """
    if delta.error is not None:
        if delta.unserved:
            raise ApiError(503, delta.error, code="unavailable")
        raise ApiError(400 if delta.unfit else 500, delta.error)


async def first_of(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Fetch the first event now and return all events: a refusal then precedes the start of the answer."""
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
    """Return an identifier with OpenAI's prefix, by which clients recognise the type."""
    return f"{kind}{uuid.uuid4().hex}"
