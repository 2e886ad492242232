"""Rules with a known bias. An exactness check is worth something only if it catches every one of them.

Each tooth is a mistake that has been made in published code or is one line away from a correct rule. The checks run
them through the same enumeration as the real verifiers; the untampered twin must pass it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.analysis.enumeration import CHAINS, Kind, Shape, Stop, worst_error
from foretoken.core.draft import Draft, Law, PointMass, Sampled
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier

CAUGHT = 1e-3  # a bias of this size is six orders above the tolerance of the exact rules


class PlainRatio:
    """The ratio rule written as slowly and plainly as it can be; the teeth tamper with one method each."""

    name = "plain ratio"
    promise = "same law"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept with chance min(1, p/q) token by token; see verifiers/ratio.py for the real one."""
        assert not isinstance(draft.law, PointMass) or not len(draft)
        num = len(draft)
        for node, token in enumerate(draft.tree.tokens):
            assert not isinstance(draft.law, PointMass)
            p_V, q_V = target.p_MV[node], draft.law.q_at(node)
            if not rng.bernoulli("accept", (self.chance(p_V, q_V, token),))[0]:
                return Verdict(tuple(range(node)), rng.categorical("residual", self.residual(p_V, q_V)))
        return Verdict(tuple(range(num)), rng.categorical("bonus", target.p_MV[self.bonus_row(num)]))

    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return float(p_V[token] / q_V[token])

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        left_V = (p_V - q_V).clamp(min=0.0)
        return left_V if float(left_V.sum()) > 0.0 else p_V

    def bonus_row(self, num: int) -> int:
        return num


class _NoResidual(PlainRatio):
    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return p_V


class _WrongBonusRow(PlainRatio):
    def bonus_row(self, num: int) -> int:
        return max(num - 1, 0)


class _SwappedRatio(PlainRatio):
    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return float(q_V[token] / p_V[token]) if float(p_V[token]) > 0.0 else 0.0


class _ArgmaxOnly(PlainRatio):
    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return 1.0 if int(p_V.argmax()) == token else 0.0


class _LenientRatio(PlainRatio):
    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return 1.1 * super().chance(p_V, q_V, token)


class _ProductOnly(PlainRatio):
    """Accepts the whole block with the product of the ratios, but keeps the residual of the token-wise rule."""

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        weight, weights = 1.0, []
        for node, token in enumerate(draft.tree.tokens):
            assert not isinstance(draft.law, PointMass)
            weight = min(weight * self.chance(target.p_MV[node], draft.law.q_at(node), token), 1.0)
            weights.append(weight)
        stands = [i + 1 for i, good in enumerate(rng.bernoulli("accept", weights)) if good]
        num = max(stands, default=0)
        if num == len(draft) or isinstance(draft.law, PointMass):
            return Verdict(tuple(range(num)), rng.categorical("bonus", target.p_MV[num]))
        left_V = self.residual(target.p_MV[num], draft.law.q_at(num))
        return Verdict(tuple(range(num)), rng.categorical("residual", left_V))


class _SkipRepeats:
    """Recursive rejection that tries a repeated sibling once: right without replacement, wrong for free draws."""

    name = "skip repeats"
    promise = "same law"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Drop later siblings with a token seen before (bushes of depth 1 only), then verify what is left."""
        tokens = draft.tree.tokens
        kept = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
        assert isinstance(draft.law, Sampled)
        law = Sampled(draft.law.q_KV, tuple(draft.law.row_of[i] for i in kept))
        bush = Draft(TokenTree([tokens[i] for i in kept], [-1] * len(kept)), law)
        rows = [0, *(i + 1 for i in kept)]
        laws = Laws(target.logits_MV[rows], greedy=False, positions=[target.positions[row] for row in rows])
        verdict = RecursiveVerifier().verify(bush, laws, rng)
        return Verdict(tuple(kept[i] for i in verdict.path), verdict.extra)


class SameNoise(MatchVerifier):
    """Sample and match with one row of noise for all positions: neighbouring tokens are then tied together.

    Not among the teeth below, since `match` cannot be enumerated; the test over seeds must catch it.
    """

    name = "same noise"

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Forget the positions, then match."""
        forgetful = Laws(target.logits_MV, greedy=target.greedy, positions=[0] * len(target))
        return super().verify(draft, forgetful, rng)


_STEPS: tuple[Shape, ...] = CHAINS[1:]
_BUSHES: tuple[Shape, ...] = ((-1, -1), (-1, -1, -1))


@dataclass(frozen=True, slots=True)
class Tooth:
    """One biased rule, and where it bites.

    Attributes:
        name: what is wrong, in a few words.
        verifier: the rule.
        kind: the law that the draft is drawn by.
        shapes: parents of the draft trees.
        declared: the law that the rule is told; None is the truth.
        stop: the drafter's stop rule.
    """

    name: str
    verifier: Verifier
    kind: Kind = "sampled"
    shapes: Sequence[Shape] = _STEPS
    declared: Kind | None = None
    stop: Stop = "never"

    def bias(self, seed: int = 0) -> float:
        """The largest error that the enumeration finds."""
        return worst_error(
            self.verifier,
            num_pairs=1,
            kinds=(self.kind,),
            shapes=self.shapes,
            declared=self.declared,
            stop=self.stop,
            seed=seed,
        ).error


TEETH = (
    Tooth("residual not subtracted", _NoResidual()),
    Tooth("bonus drawn from the row before", _WrongBonusRow()),
    Tooth("ratio upside down", _SwappedRatio()),
    Tooth("accept the argmax only, at temperature 1", _ArgmaxOnly()),
    Tooth("ratio lenient by a tenth", _LenientRatio()),
    Tooth("block acceptance with token-wise residual", _ProductOnly()),
    Tooth("deterministic proposals declared as draws from q (ratio)", RatioVerifier(), "point", declared="sampled"),
    Tooth("deterministic proposals declared as draws from q (block)", BlockVerifier(), "point", declared="sampled"),
    Tooth("drawn tokens dropped for their own value", RatioVerifier(), stop="drop"),
    Tooth("repeated siblings skipped", _SkipRepeats(), shapes=_BUSHES),
    Tooth("siblings without replacement verified as free draws", RecursiveVerifier(), "without", _BUSHES, "sampled"),
    Tooth("free draws verified as without replacement", RecursiveVerifier(), "sampled", _BUSHES, "without"),
)
