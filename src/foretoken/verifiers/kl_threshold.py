"""A threshold on the divergence of the two distributions: where draft and target think alike, a mismatch may stand."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.distortion import divergence
from foretoken.core.draft import GreedyLaws, Law, Sampled
from foretoken.core.needs import Declared, Knob, Needs
from foretoken.options.option import Option
from foretoken.verifiers.exact_or_member import ExactOrMember
from foretoken.verifiers.lossy import LossyConfig


class KlThresholdVerifier(ExactOrMember):
    """Accept x if KL(p, q) <= max_kl and the target is not sure of another token, or if the exact test does.

    Paper:   "Revisiting Judge Decoding from First Principles via Training-Free Distributional Divergence",
        arXiv:2601.04766: linear judges mostly learn the divergence of the two distributions again, so look at that. The
        exact test alone counts where the target's favourite has more than 0.9.
    Exact:   no. The emitted distribution is known (:meth:`ExactOrMember.law`) and metered: test_lossy.py.
    Differs: KL(p, q) = sum p log(p / q), p the target; the sources at hand do not say which way round it is there. Both
        distributions are the request's, after temperature and filters: where a filter leaves p a token that q lacks, KL
        is infinite and the test is exact. At temperature 0 the distributions at temperature 1 are compared, and the
        draft must carry its own (``GreedyLaws``). Point masses have no q to compare. Chains only.
    """

    name = "kl_threshold"
    laws: tuple[type[Law], ...] = (Sampled,)
    needs = Needs(evidence=GreedyLaws)  # at temperature 0
    declared = Declared(knob=Knob(option="max_kl", values=(0.1, 0.3, 1.0)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of the divergence threshold."""

        max_kl: Annotated[
            float,
            Option(
                "A token is accepted untested where KL(p, q) is at most this, in nats.",
                least=0,
                most=1e6,
                remedy="0 is exact, more accepts more",
            ),
        ] = 0.3
        max_confidence: Annotated[
            float,
            Option(
                "The exact test alone counts where the target's most probable token has more than this; 1: nowhere.",
                least=0,
                most=1,
                remedy="1 compares the distributions everywhere, 0 nowhere",
            ),
        ] = 0.9

    config: Config

    def members(self, p_V: Tensor, q_V: Tensor | None) -> Tensor:
        if q_V is None:
            raise ValueError(f"verifier '{self.name}' was given a draft without its distribution: use another verifier")
        alike = float(p_V.max()) <= self.config.max_confidence and divergence(p_V, q_V) <= self.config.max_kl
        return p_V > 0.0 if alike else torch.zeros_like(p_V, dtype=torch.bool)
