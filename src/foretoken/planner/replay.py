"""Replay a drafter along the target's recorded text, without running the target.

    recorded text    x0 x1 x2 ... xn             the target's stand-in "computes" the recorded token at every row
    engine           propose, verify, commit, observe: the real ones, one request at a time

A lossless rule emits the recorded text x whatever is drafted, so a draft is accepted as far as it agrees with x. Two
ways:

* :func:`run_fixed` runs the steps of one draft length, for every deterministic draft, trees included. At temperature 0
  it is the real run, step by step.
* :func:`draft_everywhere` drafts after every token of the answer and keeps the probability of each recorded token.
  expected.py derives the steps of every length from it, for chains.

A drafter that reads hidden states gets those of one reading pass over the text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Plan, Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict, follow
from foretoken.engine.intake.admission import Admission
from foretoken.engine.intake.prompts import PromptReader
from foretoken.engine.recipe import MAX_NODES, Recipe
from foretoken.engine.request import Request
from foretoken.engine.step import Engine
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan, DensePlans
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.prefill import chunks
from foretoken.planner.expected import Expected, Start
from foretoken.planner.trace import Answer, Trace, driven
from foretoken.verifiers.match import MatchVerifier

_MAX_ROWS = 512
_STATE_BYTES = 512 << 20  # of hidden states that are kept for the next drafter; others are read again


class CannotReplay(ForetokenError):
    """The steps of a drafter or rule do not follow from the recorded text; the message is the reason, a clause."""


class States:
    """The target's hidden states of recorded texts, from one reading pass each; the first ones are kept.

    Args:
        target: the loaded model.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._kept: dict[tuple[int, tuple[int, ...]], dict[int, Tensor]] = {}
        self._bytes = 0

    def of(self, answer: Answer, depths: tuple[int, ...]) -> dict[int, Tensor]:
        """depth -> [tokens, D] of prompt and answer."""
        key = (answer.prompt, depths)
        if key in self._kept:
            return self._kept[key]
        target, tokens = self._target, answer.text
        cache = target.new_cache(1)
        slot = cache.acquire()
        pieces = []
        for _, _, batch in chunks(cache, slot, tokens, rows=128):
            span = Span(0, target.num_layers, taps=depths)
            pieces.append(target.forward(batch, DensePlan(cache, batch), span=span).hidden)
        found = {depth: torch.cat([piece[depth].clone() for piece in pieces]) for depth in depths}
        size = sum(each.nbytes for each in found.values())
        if self._bytes + size <= _STATE_BYTES:
            self._bytes += size
            self._kept[key] = found
        return found


class _RecordedTarget:
    """Stands in for the target: a forward computes nothing, and gives the recorded token at every row.

    A row with another token gets it as well: the verifier never looks at such a row.

    Attributes:
        text: prompt and answer of the request that runs.
        best: the most probable tokens of the last forward's wanted rows.
        roots: position of the root and number of draft rows of every verification.
    """

    def __init__(self, target: LanguageModel, states: States, *, greedy: bool) -> None:
        self._target = target
        self._states = states
        self._greedy = greedy
        self._can_branch = target.new_cache(1).can_branch
        self.answer: Answer | None = None
        self.text: list[int] = []
        self.best: list[int] = []
        self.roots: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def begin(self, answer: Answer) -> None:
        """Answer with this text from now on."""
        self.answer, self.text, self.roots = answer, answer.text, []

    def new_cache(self, max_slots: int) -> KVCache:
        """A cache without layers: lengths only."""
        cache = KVCache(0, max_slots, self._target.max_length)
        cache.can_branch = self._can_branch
        cache.keeps_keys = False
        return cache

    def forward(
        self, batch: PackedBatch, plan: Plan, *, top: int = 0, span: Span | None = None, head: Any = None
    ) -> Output:
        """The recorded tokens, and the hidden states of the reading pass."""
        text, last = self.text, len(self.text) - 1
        self.best = [text[min(batch.positions[row] + 1, last)] for row in batch.wanted]
        for segment in batch.segments:
            if segment.verification:
                self.roots.append((segment.prefix, segment.num_rows - 1))
        hidden: dict[int, Tensor] = {}
        if span is not None and span.taps:
            assert self.answer is not None
            rows = range(len(batch)) if span.tap_rows is None else span.tap_rows
            places = [min(batch.positions[row], last) for row in rows]
            states = self._states.of(self.answer, span.taps)
            hidden = {depth: states[depth][places] for depth in span.taps}
        shape = (len(batch.wanted), self._target.vocab_size)
        logits_MV = torch.zeros(()).expand(shape) if self._greedy else torch.zeros(shape)
        return Output(logits_MV, self.best, [0.0] * len(batch.wanted), hidden=hidden)


class _FollowText(MatchVerifier):
    """Accepts a draft as far as it agrees with the recorded text: any rule on deterministic drafts, given the text."""

    def __init__(self, target: _RecordedTarget) -> None:
        self._target = target

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        return follow(draft.tree, self._target.best)


class _KeepProbabilities(_FollowText):
    """Accepts nothing, and keeps the probability of the recorded tokens in every draft.

    Attributes:
        starts: by the place in the answer that the draft comes after.
        columns: of the last draft; None: it scored the whole vocabulary.
    """

    def __init__(self, target: _RecordedTarget) -> None:
        super().__init__(target)
        self.starts: dict[int, Start] = {}
        self.columns: Columns | None = None

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        text, place = self._target.text, target.positions[0]
        assert self._target.answer is not None
        answered = place - len(self._target.answer.prompt_ids)
        if answered > 0:
            self.starts[answered - 1] = Start(len(draft), tuple(self._log_q(draft, text[place:])))
        return Verdict((), text[place])

    def _log_q(self, draft: Draft, following: Sequence[int]) -> list[float]:
        law, found = draft.law, list[float]()
        agrees = True
        for node, (token, wanted) in enumerate(zip(draft.tree.tokens, following, strict=False)):
            if isinstance(law, PointMass):
                chance = float(token == wanted)
            else:
                self.columns = law.columns
                chance = law.chance(node, wanted)
            found.append(math.log(chance) if agrees and chance > 0.0 else -math.inf)
            agrees = agrees and token == wanted  # distributions after another token are not those along the text
        return found


class _ForcedStreams(Streams):
    """Draws the recorded tokens for a draft, so that its distributions are those along the text."""

    def __init__(self, rule: _KeepProbabilities, request: Request, text: Sequence[int], seed: int) -> None:
        super().__init__(seed)
        self._rule, self._request, self._text = rule, request, text
        self._root = self._drawn = 0

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        if purpose != "draft":
            return super().categorical(purpose, p_V)
        if self._root != len(self._request.tokens):
            self._root, self._drawn = len(self._request.tokens), 0
        place = self._root + self._drawn
        self._drawn += 1
        token = self._text[place] if place < len(self._text) else -1
        columns = self._rule.columns
        if columns is not None and len(columns) == len(p_V):
            token = columns.of(token)
        return token if 0 <= token < len(p_V) and float(p_V[token]) > 0.0 else int(p_V.argmax())

    def foreseen(self, purpose: str, size: int, count: int) -> list[float]:
        return [0.5, 0.0] * count


@dataclass(frozen=True, slots=True)
class Replayed:
    """One answer replayed at one length.

    Attributes:
        metrics: as a real run counts them.
        expected: the same steps, for the cost model.
    """

    metrics: Metrics
    expected: Expected


class Replay:
    """Replays the drafter of a recipe along the answers of a trace.

    Args:
        recipe: a composed recipe over the target; its drafter is used, and no other engine may use it meanwhile.
        target: the loaded model, for its sizes and for one reading pass if the drafter needs hidden states.
        trace: the recorded answers.
        states: shared by the replays of one trace.
    Raises:
        CannotReplay: its steps do not follow from the recorded text.
    """

    def __init__(self, recipe: Recipe, target: LanguageModel, trace: Trace, states: States) -> None:
        self._recipe, self._trace = recipe, trace
        self._greedy = trace.params.greedy
        self._recorded = _RecordedTarget(target, states, greedy=self._greedy)
        drafter = recipe.drafter
        if drafter.offers.resumes:
            raise CannotReplay("it runs the target's own layers while it drafts")
        if drafter.declared.finds_model:
            raise CannotReplay("it decides by measured times")
        if recipe.takes_turns or recipe.promise == "approximate":
            raise CannotReplay("its rule emits another text than plain decoding")
        self.deterministic = self._greedy or all(issubclass(law, PointMass) for law in drafter.laws)
        if not self.deterministic and (drafter.branches or drafter.laws != (Sampled,)):
            raise CannotReplay("its drafts are drawn as trees, or by several kinds of distribution")

    @property
    def rule(self) -> str:
        """The verifier of its drafts, as expected.py names them."""
        if self.deterministic:
            return "greedy"
        verifier = self._recipe.verifier
        name = "block" if verifier is None else verifier.name
        if name not in ("ratio", "block", "match"):
            raise CannotReplay(f"verifier '{name}' has no formula here")
        return name

    def run_fixed(self, answer: Answer, length: int) -> Replayed:
        """Run the steps of one answer with at most ``length`` draft tokens.

        Raises:
            CannotReplay: the draft is drawn from a distribution, so that its steps are random.
            RequestError: the drafter failed.
        """
        if not self.deterministic:
            raise CannotReplay("its drafts are drawn, so that its steps are random")
        rule = None if self._greedy else _FollowText(self._recorded)
        request = self._run(answer, self._engine(rule, length))
        steps = [(1.0, root, nodes) for root, nodes in self._recorded.roots]
        return Replayed(request.metrics, Expected(steps, len(answer.tokens) - 1))

    def draft_everywhere(self, answer: Answer, length: int = MAX_NODES) -> list[Start]:
        """Draft up to ``length`` tokens after every token of the answer but the last.

        Raises:
            CannotReplay: drafts are trees.
            RequestError: the drafter failed.
        """
        if self._recipe.drafter.branches:
            raise CannotReplay("its drafts are trees")
        rule = _KeepProbabilities(self._recorded)
        force = None
        if not self.deterministic:

            def force(request: Request) -> Streams:
                return _ForcedStreams(rule, request, answer.text, request.streams.seed)

        self._run(answer, self._engine(rule, length), force)
        return [rule.starts.get(place, Start(0, ())) for place in range(len(answer.tokens) - 1)]

    def _engine(self, rule: Verifier | None, length: int) -> Engine:
        fixed = replace(self._recipe, num_nodes=length, adaptive=False, may_skip_drafting=False)
        recipe = replace(fixed, verifier=rule, plan=DensePlans(), executor="serial")
        try:
            return Engine(cast(LanguageModel, self._recorded), recipe, max_slots=1, max_rows=_MAX_ROWS)
        except ForetokenError:
            raise CannotReplay("it reads the target's own keys and values") from None

    def _run(self, answer: Answer, engine: Engine, force: Callable[[Request], Streams] | None = None) -> Request:
        target = cast(LanguageModel, self._recorded)
        admission = Admission(target, engine.recipe, PromptReader(target), None)
        self._recorded.begin(answer)
        prompt = {"prompt_token_ids": list(answer.prompt_ids)}
        (request,) = admission.requests(prompt, self._trace.params_of(answer), 0)
        if force is not None:
            request.streams = force(request)
        return driven(engine, request)
