"""One request: its tokens, its history, its place in the caches, and how it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.laws import LawMaker
from foretoken.core.metrics import Metrics
from foretoken.core.randomness import Streams
from foretoken.engine.draft_length.draft_ledger import DraftLedger
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.prediction import PredictionReader
from foretoken.engine.text.detokenise import TextStream
from foretoken.forward.adapter import Adapter
from foretoken.options.sampling import SamplingParams

CacheKey = tuple[str | None, Adapter | None]
"""What requests that share cached rows have in common: their salt and their adapter."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one token under the model's own distribution (before temperature, penalties and filters).

    Attributes:
        token_id: the emitted token, or one of the prompt's.
        logprob: its log-probability.
        top: the k most probable tokens and their log-probabilities, most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    if not TYPE_CHECKING:  # hidden from type checkers

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"no '{name}' here: a log-probability has token_id, logprob and top, pairs of both")

    @classmethod
    def of_rows(cls, logits_MV: Tensor, tokens: Sequence[int], top: int) -> "list[TokenLogprob]":
        """Of each row's token, and its ``top`` most probable ones."""
        logp_MV = torch.log_softmax(logits_MV.float(), dim=-1)
        best = logp_MV.topk(min(top, logp_MV.shape[-1]), dim=-1)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            cls(token, float(logp_V[token]), tuple(zip(ids, values, strict=True)))
            for token, logp_V, (ids, values) in zip(tokens, logp_MV, tops, strict=True)
        ]


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; also the :class:`foretoken.core.protocols.Context` that drafters see.

    Attributes:
        request_id: unique within an engine.
        tokens: prompt and committed output. All but the last have keys and values once the prompt is processed.
        num_prompt: length of the prompt.
        params: its sampling parameters.
        streams: random streams of this request.
        laws: makes this request's distribution from logits.
        stop_ids: tokens that end it.
        max_total: longest allowed sequence, prompt included.
        text: incremental text of the output; None until a reader needs it.
        slot: its place in the target's cache, -1 while waiting.
        history_only: whether its drafts may follow from its own past only (``Recipe.history_only``).
        shown: whether the drafter is shown its hidden states, if it asks for any; else nothing is drafted for it.
        own_rule: decides the draft length of a seeded request; None if the engine's controller does, or it is fixed.
        cache_salt: only requests with the same one, and the same adapter, reuse its cached rows.
        adapter: corrects the target for it; None: the base model.
        num_cached: tokens of its prompt that were reused, not read.
        borders: lengths of its prompt, increasing, at which a chunk ends, so that others can go on from there.
        max_draft: draft nodes a step, at most; 0: plain decoding; None: as the recipe has it.
        source: the only one of the recipe's drafters that drafts for it (``Drafter.sources``); None: the best.
        ahead_rule: decides the length of drafts ahead; None if there are none.
        prediction: its place in its predicted output; None: there is none.
        off: the code of why it has no draft in this step; "": not known.
        ledger: its drafting so far, if the controller selects the requests that get drafts.
        model_ledger: the same of a second drafter (engine/draft_length/portfolio.py).
        started, admitted: when it was queued, and when it got its slot, by ``time.perf_counter``.
        prompt_logprobs: of the prompt's tokens but the first, as far as it was read; None: not requested.
        finish_reason: None while running; then "stop", "length", "cancelled" or "error".
        stop_reason: the stop string, or the one of the params' ``stop_token_ids``, that ended it; None: nothing of
            these did.
        error: why it failed.
        unfit: whether it failed because no text satisfies its constraint.
    """

    request_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    streams: Streams
    laws: LawMaker
    stop_ids: frozenset[int]
    max_total: int
    text: TextStream | None = None
    slot: int = -1
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unfit: bool = False
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    history_only: bool = False
    shown: bool = True
    own_rule: OwnPastRule | None = None
    cache_salt: str | None = None
    adapter: Adapter | None = None
    num_cached: int = 0
    borders: tuple[int, ...] = ()
    max_draft: int | None = None
    source: str | None = None
    ahead_rule: OwnPastRule | None = None
    prediction: PredictionReader | None = None
    off: str = ""
    ledger: DraftLedger = field(default_factory=DraftLedger)
    model_ledger: DraftLedger = field(default_factory=DraftLedger)
    started: float = 0.0
    admitted: float = 0.0

    @property
    def cache_key(self) -> CacheKey:
        """What requests that share cached rows have in common."""
        return self.cache_salt, self.adapter

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def tokens_left(self) -> int:
        """Tokens this request may still emit."""
        return self.max_total - len(self.tokens)

    def accept(self, tokens: Sequence[int]) -> int:
        """Append the tokens of one step, as many as the request may take, and decide whether it ends here.

        A stop token, a stop string or the length limit may fall inside the block: the tokens after it are dropped.

        Returns:
            how many of ``tokens`` were taken (at least one).
        """
        taken = list(tokens[: self.tokens_left])
        if len(taken) == self.tokens_left:
            self.finish_reason = "length"
        if self.stop_ids:
            for index, token in enumerate(taken):
                if token in self.stop_ids:
                    del taken[index + 1 :]
                    self.finish_reason = "stop"
                    self.stop_reason = token if token in self.params.stop_token_ids else None
                    break
        if self.text is not None:
            taken = self._read(taken)
        self.tokens += taken
        self.laws.append(taken)
        return len(taken)

    def _read(self, taken: list[int]) -> list[int]:
        """Feed the text; a stop string ends the request at the token that completes it."""
        assert self.text is not None
        stopped = self.finish_reason == "stop"
        # the stop token itself is not text, unless include_stop_str_in_output
        visible = taken[:-1] if stopped and not self.params.include_stop_str_in_output else taken
        for index, token in enumerate(visible):
            count = self.num_output + index + 1
            if self.text.push(token, may_stop=count >= self.params.min_tokens):
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
                return taken[: index + 1]
        return taken
