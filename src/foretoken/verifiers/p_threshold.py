"""A threshold on the target's probability: what the target finds probable enough stands, the rest is tested exactly."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from foretoken.core.needs import Declared, Knob
from foretoken.options.option import Option
from foretoken.verifiers.exact_or_member import ExactOrMember
from foretoken.verifiers.lossy import LossyConfig


class PThresholdVerifier(ExactOrMember):
    """Accept x if p(x) >= min_prob, or if the exact test does.

    Paper:   none; the baseline "accept probable tokens" that Judge Decoding, arXiv:2501.19309, is compared with.
    Exact:   no. The emitted distribution is known (:meth:`ExactOrMember.law`) and metered: test_lossy.py.
    Differs: unlike `typical` and `topk_relaxed`, which draw from p where a token is not in their set, a token below the
        threshold is not refused but tested: the rule never accepts less than the exact one. p is the request's
        distribution, after temperature and filters. At temperature 0 x stands if it is the argmax or p(x) >= min_prob
        at temperature
        1.
    """

    name = "p_threshold"
    declared = Declared(knob=Knob(option="min_prob", values=(0.3, 0.1, 0.03)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of the probability threshold."""

        min_prob: Annotated[
            float,
            Option(
                "A token at least this probable is accepted; 0 accepts whatever the target could emit, 1 is exact.",
                least=0,
                most=1,
                remedy="lower accepts more, 1 is exact",
            ),
        ] = 0.1

    config: Config

    def members(self, p_V: Tensor, q_V: Tensor | None) -> Tensor:
        return (p_V >= self.config.min_prob) & (p_V > 0.0)
