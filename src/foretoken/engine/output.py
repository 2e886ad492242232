"""What a caller gets back."""

from dataclasses import dataclass

from foretoken.core.metrics import Metrics
from foretoken.engine.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        text: generated text; without the stop string unless ``include_stop_str_in_output``.
        token_ids: generated tokens; a stop token is included, since the model emitted it.
        finish_reason: "stop", "length", "cancelled", "error"; None while it runs.
        error: the message if it failed.
        metrics: counters and times.
        logprobs: one entry per token if requested.
        promise: what the recipe promises about this output.
        index: which of the prompt's completions.
        stop_reason: the stop string, or the one of ``stop_token_ids``, that ended it; None: the model's own end of
            text, or no stop at all.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None
    metrics: Metrics
    logprobs: list[TokenLogprob] | None
    promise: str
    index: int = 0
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all tokens together, under the model's own distribution; None unless ``logprobs`` are
        requested.
        """
        return None if self.logprobs is None else sum(each.logprob for each in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions; the members of the first completion are reachable directly.

    Attributes:
        prompt: the prompt as text (decoded if token ids were given).
        prompt_token_ids: the prompt as the model saw it.
        outputs: ``params.n`` completions.
        prompt_logprobs: one entry per token of the prompt but the first, if requested.
        request_id: of the first completion, unique within an ``LLM``.
        num_cached_tokens: tokens of the prompt that were read before (``enable_prefix_caching``).
        place: of the prompt among those of the call.
    """

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None
    request_id: str = ""
    num_cached_tokens: int = 0
    place: int = 0

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(each.finish_reason is not None for each in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def metrics(self) -> Metrics:
        return self.outputs[0].metrics

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def promise(self) -> str:
        return self.outputs[0].promise


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a streamed generation.

    Attributes:
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens, one or more.
        output: the whole output so far.
    """

    text: str
    token_ids: list[int]
    output: RequestOutput

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None
