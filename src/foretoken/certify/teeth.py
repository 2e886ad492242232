"""Rules with a known bias. An exactness check is useful only if it catches every one of them.

Each tooth is a mistake from published code, or one line away from a correct rule: the rule of plain_rule.py or a real
one with one step changed, or a real rule with a wrongly declared distribution. The checks run them through the same
enumeration as the real verifiers; the unmodified twins must pass it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from foretoken.certify.enumeration import CHAINS, Kind, Shape, Stop, worst_error
from foretoken.certify.own_checks import ColderTarget
from foretoken.certify.plain_rule import PlainRule, positive, ratio
from foretoken.core.draft import Draft, Tabulated
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy_draft import GreedyDraftVerifier
from foretoken.verifiers.kseq import KSeqVerifier
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.spechub import SpecHubVerifier

CAUGHT = 1e-6
"""The smallest bias that counts as caught. Exact rules are within 1e-15 here, and certify allows them 1e-9; a
distribution rounded to bfloat16, the smallest mistake below, is off by about 1e-3.
"""


def _swapped(p_V: Tensor, q_V: Tensor, token: int) -> float:
    return ratio(q_V, p_V, token) if float(p_V[token]) > 0.0 else 0.0


def _argmax_only(p_V: Tensor, q_V: Tensor, token: int) -> float:
    return float(int(p_V.argmax()) == token)


def _shared_uniform(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """The uniform number that drew the token also decides its acceptance.

    With sampling by inversion, the token implies that the number lies in its interval [low, high) of the cumulative q;
    the returned value is the conditional probability that it is below p/q.
    """
    high, width = float(q_V[: token + 1].sum()), float(q_V[token])
    return (ratio(p_V, q_V, token) - (high - width)) / width


def _best_first(tokens: Sequence[int], q_V: Tensor) -> list[int]:
    return sorted(range(len(tokens)), key=lambda place: -float(q_V[tokens[place]]))


def _without_repeats(tokens: Sequence[int], q_V: Tensor) -> list[int]:
    """A repeated sibling is tried once: harmless without replacement, a bias for free draws."""
    return [place for place, token in enumerate(tokens) if token not in tokens[:place]]


class _ProductOnly(PlainRule):
    """Accepts the whole block with the product of the ratios, but keeps the residual of the token-wise rule."""

    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        if not len(draft):
            return super().verify(draft, target, rng)
        assert isinstance(draft.law, Tabulated)
        weight, weights = 1.0, []
        for node, token in enumerate(draft.tree.tokens):
            weight = min(weight * ratio(target.p_MV[node], draft.law.q_at(node), token), 1.0)
            weights.append(weight)
        stands = [i + 1 for i, good in enumerate(rng.bernoulli("accept", weights)) if good]
        num = max(stands, default=0)
        if num == len(draft):
            return Verdict(tuple(range(num)), rng.categorical("bonus", target.p_MV[num]))
        left_V = positive(target.p_MV[num] - draft.law.q_at(num), target.p_MV[num])
        return Verdict(tuple(range(num)), rng.categorical("residual", left_V))


class _EagerKSeq(KSeqVerifier):
    """Every draw gets the full test, as if it were the only draw."""

    @staticmethod
    def rho(p_BV: Tensor, q_BV: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(count_B).double(), torch.minimum(p_BV, q_BV).sum(-1).double()


class _ForgetfulHub(SpecHubVerifier):
    """The second test ignores the mass that the first has used."""

    @staticmethod
    def left_for_second(p: float, first: float) -> float:
        return p


class SameNoise(MatchVerifier):
    """Sample and match with one row of noise for all positions, which correlates neighbouring tokens.

    Not among the teeth below, since `match` cannot be enumerated; the test over seeds must catch it.
    """

    name = "same noise"

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Match without the positions."""
        forgetful = Laws(target.logits_MV, greedy=target.greedy, positions=[0] * len(target))
        return super().verify(draft, forgetful, rng)


_STEPS: tuple[Shape, ...] = CHAINS[1:]
_PAIRS: tuple[Shape, ...] = ((-1, -1),)
_BUSHES: tuple[Shape, ...] = ((-1, -1), (-1, -1, -1))


@dataclass(frozen=True, slots=True)
class Tooth:
    """One biased rule, and the drafts that reveal it.

    Attributes:
        name: the mistake, in a few words.
        verifier: the rule.
        kind: the distribution of the draft.
        shapes: parents of the draft trees.
        declared: the distribution that the draft declares; None: the true one.
        stop: the drafter's stop rule.
    """

    name: str
    verifier: Verifier
    kind: Kind = "sampled"
    shapes: Sequence[Shape] = _STEPS
    declared: Kind | None = None
    stop: Stop = "never"

    def bias(self, seed: int = 0) -> float:
        """Return the largest error of the enumeration."""
        return worst_error(
            self.verifier,
            num_pairs=1,
            kinds=(self.kind,),
            shapes=self.shapes,
            declared=self.declared,
            stop=self.stop,
            seed=seed,
        ).error


CONTROLS = (
    Tooth("ratio, untampered", PlainRule()),
    Tooth("recursive, untampered, free draws", PlainRule(), "sampled", _BUSHES),
    Tooth("recursive, untampered, without replacement", PlainRule(), "without", _BUSHES),
    Tooth("K-SEQ, untampered", KSeqVerifier(), "sampled", _PAIRS),
    Tooth("hub pairs, untampered", SpecHubVerifier(), "hub", _PAIRS),
)

TEETH: tuple[Tooth, ...] = (
    Tooth("residual not subtracted", PlainRule(residual=lambda p_V, q_V: p_V)),
    Tooth("bonus drawn from the row before", PlainRule(bonus_row=lambda num: max(num - 1, 0))),
    Tooth("bonus without the filters", PlainRule(bonus=lambda p_V: p_V.clamp(min=0.01))),
    Tooth("residual not renormalised", PlainRule(normalised=lambda left_V: left_V), "sampled", _BUSHES),
    Tooth("ratio upside down", PlainRule(chance=_swapped)),
    Tooth("accept the argmax only, at temperature 1", PlainRule(chance=_argmax_only)),
    Tooth("ratio lenient by a tenth", PlainRule(chance=lambda p_V, q_V, token: 1.1 * ratio(p_V, q_V, token))),
    Tooth("draft and acceptance share a random number", PlainRule(chance=_shared_uniform)),
    Tooth("target read one position late", PlainRule(row=lambda own: own + 1)),
    Tooth("q rounded to bfloat16", PlainRule(draft_law=lambda q_V: q_V.bfloat16().to(q_V.dtype))),
    Tooth("temperature applied twice to q", PlainRule(draft_law=lambda q_V: q_V**2 / (q_V**2).sum())),
    Tooth("temperature applied twice to p", ColderTarget(PlainRule())),
    Tooth("block acceptance with token-wise residual", _ProductOnly()),
    Tooth("drawn tokens dropped for their own value", RatioVerifier(), stop="drop"),
    Tooth("repeated siblings skipped", PlainRule(order=_without_repeats), shapes=_BUSHES),
    Tooth("siblings sorted again", PlainRule(order=_best_first), "without", _BUSHES),
    Tooth("K-SEQ with rho = 1", _EagerKSeq(), shapes=_PAIRS),
    Tooth("second test of a hub pair forgets the first", _ForgetfulHub(), "hub", _PAIRS),
    Tooth("deterministic proposals declared as draws from q (ratio)", RatioVerifier(), "point", declared="sampled"),
    Tooth("deterministic proposals declared as draws from q (block)", BlockVerifier(), "point", declared="sampled"),
    Tooth("siblings without replacement verified as free draws", RecursiveVerifier(), "without", _BUSHES, "sampled"),
    Tooth("free draws verified as without replacement", RecursiveVerifier(), "sampled", _BUSHES, "without"),
    Tooth("siblings without replacement verified by K-SEQ", KSeqVerifier(), "without", _PAIRS, "sampled"),
    Tooth("free draws verified as a greedy draft", GreedyDraftVerifier(), "sampled", _BUSHES, "top"),
    Tooth("greedy draft verified as without replacement", RecursiveVerifier(), "top", _BUSHES, "without"),
    Tooth("greedy draft verified as a hub pair", SpecHubVerifier(), "top", _PAIRS, "hub"),
    Tooth("hub pair verified as a greedy draft", GreedyDraftVerifier(), "hub", _PAIRS, "top"),
)

if find_spec("scipy") is not None:  # only `transport` solves with it
    from foretoken.verifiers.transport import TransportVerifier

    TEETH += (
        Tooth("coupling solved for another set distribution", TransportVerifier(), "without", _BUSHES, "sampled"),
    )
