"""Entropy-adaptive decoding, the small model's side: it writes while its mean entropy stays below a threshold.

    the small model's turn    read x ── H: below threshold? ── sample y ── read y ── H … alarm: the target's turn
    the target's turn         an empty draft; the small model reads the new tokens at the start of its next turn

A whole turn of the small model is one chain, which the target reads in one forward; this fills the target's cache and
gives the meter p at every token.

Letters: V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Coupled, Draft, GreedyLaws, Law, PointMass
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.needs import Declared, Offers
from foretoken.core.protocols import Budget, Context, Outcome
from foretoken.core.randomness import gumbel
from foretoken.core.tree import TokenTree
from foretoken.drafting.draft_runner import DRAFT_CHECKPOINT, DraftRunner, Rows, RunnerBuilder
from foretoken.methods.entropy_adaptive.turns import EntropyTurn, LargeTurn, Rule, Turn, Turns, entropy
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Checked, Option


@dataclass(slots=True)
class _Request:
    """The turns of one request.

    Attributes:
        asked: number of tokens at the last call of ``propose``.
        turns: number of tokens -> the turn after them: at ``asked``, and for later positions as far as known.
        yields: whether the target's turn follows the last draft.
    """

    asked: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)
    yields: bool = False


def _bits(name: str, value: Any) -> float:
    """Parse an entropy; a command line can write infinity only as 'inf'."""
    level = math.inf if str(value) in ("inf", "Infinity") else value
    if not isinstance(level, int | float) or isinstance(level, bool) or math.isnan(level) or level < 0:
        raise ConfigError(
            f"{name}={value!r:.60} must be a number of bits, 0 (the target alone) or more; an entropy is at most the "
            "logarithm of the vocabulary, inf is the small model alone"
        )
    return float(level)


class EntropyAdaptiveDrafter(DraftRunner):
    """Writes with a small model while its rolling mean entropy is below a threshold, else with the target.

    Paper:   Simonds 2025, "Entropy Adaptive Decoding", arXiv:2502.06833. No code was published.
    Exact:   tokens are sampled with the noise of (seed, position), and the end of a turn is decided before a token is
             sampled: under `match` and `greedy` this is a draft model with an entropy stop (each draft begins with a
             fresh mean), and lossless. Its own verifier, `entropy_adaptive`, is not.
    Limits:  with its own verifier, ``threshold`` = 0 equals the target, an infinite one equals the small model, token
             for token and seed for seed (tests/unit/methods/entropy_adaptive/test_drafter.py).
    Differs: the small model writes where the mean is *below* the threshold (printed: at most), so that 0 is exactly the
             target: a one-hot row has entropy 0. The rule chooses the first model, too. The paper does not specify the
             position from which a switch holds. From small to large it is the position that raised the alarm
             (``redo``); from large to small it is the next, as the target has computed this one. For the meter, the
             target reads the small model's tokens, at most ``max_draft`` late: target calls fall, its rows do not.
    """

    name = "entropy_adaptive"
    laws: tuple[type[Law], ...] = (Coupled,)
    declared = Declared(draft_model=True, own_verifier="entropy_adaptive")

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of entropy-adaptive decoding."""

        model: Annotated[str, DRAFT_CHECKPOINT]
        threshold: Annotated[
            float,
            Option(
                "The small model writes where the mean entropy is below this, in bits. 0 is the target alone, "
                "infinity (also 'inf') the small model alone.",
                convert=_bits,
            ),
        ] = 0.5
        window: Annotated[int, Option("Number of entropies in the mean.", least=1, most=10_000)] = 5
        dwell: Annotated[
            int, Option("Minimum tokens that a model writes before the turn changes.", least=1, most=10**9)
        ] = 10
        redo: Annotated[
            bool, Option("The target writes the position that raised the alarm; false: the one after it.")
        ] = True
        max_draft: Annotated[
            int,
            Option(
                "Most tokens that the target reads at once; a longer turn continues in the next step. The request's "
                "share of a step's rows limits it, too.",
                least=1,
                most=256,
            ),
        ] = 64

    def __init__(self, config: Config, target: LanguageModel, small: LanguageModel | None = None) -> None:
        super().__init__(config.model if small is None else small, target)
        self.config = config
        self.offers = Offers(evidence=(Turns, GreedyLaws), length=config.max_draft)
        self._rule = Rule(threshold=config.threshold, window=config.window, dwell=config.dwell, redo=config.redo)
        # the embedding may be padded beyond the tokenizer; padding rows are not tokens
        self._num_tokens = min(self.vocab_size, len(target.tokenizer))
        self._requests: dict[int, _Request] = {}

    def first_turn(self, context: Context) -> Turn:
        """Return the turn at the end of a prompt."""
        return EntropyTurn.first(self._rule)

    def entropy_of(self, logits_V: Tensor) -> float:
        """Return the entropy of a raw row of either model, in bits; ids outside the tokenizer are excluded."""
        return entropy(logits_V[: self._num_tokens])

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one turn of the small model for each request in its turn; an empty draft for the others.

        No state is dropped here: a repeated call with the same tokens returns the same drafts.
        """
        most = self.config.max_draft
        bounded = [replace(each, max_nodes=min(each.max_nodes, most)) for each in budgets]
        for context, budget in zip(contexts, budgets, strict=True):
            request = self._requests.setdefault(context.request_id, _Request())
            request.asked, request.yields = len(context.tokens), False
            known = request.turns.get(request.asked)
            if known is None or budget.evidence is not Turns:  # with another verifier every draft is a separate turn
                known = self.first_turn(context)
            request.turns = {request.asked: known}
        return super().propose(contexts, bounded)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            request = self._requests[outcome.request_id]
            position = request.asked + len(outcome.verdict.path)
            if isinstance(outcome.verdict, LargeTurn) and position + 1 not in request.turns:
                turn = request.turns[position]
                # the small model's own turn comes here if it has no tokens left: the target writes, and the turn stays
                request.turns[position + 1] = (
                    turn.read_by_large(self.entropy_of(outcome.verdict.logits_V)) if turn.large else turn
                )

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        super().release(request_id)

    # ------------------------------------------------------------------ growing

    def _wants_first(self, draft: RunnerBuilder) -> bool:
        request = self._requests[draft.context.request_id]
        return not request.turns[request.asked].large

    def _expand(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        return [draft for draft, its in zip(drafts, rows, strict=True) if self._write(draft, its)]

    def _write(self, draft: RunnerBuilder, its: Rows) -> bool:
        """Write the next token in the small model's turn; return whether the draft continues."""
        context, parent = draft.context, draft.frontier[0]
        request = self._requests[context.request_id]
        position = request.asked + len(draft.tokens)
        # 1. the entropy of the raw distribution, which determines the turn
        found = self.entropy_of(its.output.logits_MV[its.start])
        if math.isnan(found):
            raise RequestError(f"draft model '{self.config.model}' has no entropy: its logits are NaN or infinite")
        writes, following = request.turns[position].read_by_small(found)
        request.turns[position + 1] = following
        if not writes:
            request.yields, draft.frontier = True, []
            return False
        # 2. the token, by the request's own params
        logits_V = draft.process(its.output.logits_MV[its.start : its.start + 1], its.output.columns)[0]
        if not math.isfinite(float(logits_V.max())):
            raise RequestError(
                f"draft model '{self.config.model}' may write no token: logit_bias and min_tokens forbid all of them"
            )
        q_V = torch.softmax(logits_V.float(), dim=-1)
        if context.params.greedy:
            token = int(logits_V.argmax()) if not context.laws.trivial else its.output.best[its.start]
            if draft.budget.evidence is GreedyLaws:
                draft.greedy_rows.append(q_V)
        else:
            noise_V = gumbel(context.streams.seed, (position,), self.vocab_size, logits_V.device)[0]
            token = int(noise_V.add_(logits_V).argmax())
            draft.q_rows.append(q_V)
        node = draft.add(token, parent, float(q_V[token]), len(draft.tokens))
        # 3. the next turn
        request.yields = following.large
        goes_on = draft.has_room(node) and not following.large and token not in context.stop_ids
        draft.frontier = [node] if goes_on else []
        return goes_on

    def _finish(self, draft: RunnerBuilder) -> Draft:
        if not draft.tokens:
            return NO_DRAFT
        request = self._requests[draft.context.request_id]
        greedy = draft.context.params.greedy
        confidence = tuple(min(1.0, max(1e-6, each)) for each in draft.confidence)
        evidence: Turns | GreedyLaws | None = None
        if draft.budget.evidence is Turns:
            evidence = Turns(None if greedy else torch.stack(draft.q_rows), request.yields)
        elif draft.greedy_rows:
            evidence = GreedyLaws(torch.stack(draft.greedy_rows))
        return Draft(TokenTree(draft.tokens), PointMass() if greedy else Coupled(), confidence, evidence=evidence)
