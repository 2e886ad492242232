"""Typical acceptance: a token stands if it is likely enough for how uncertain the target is."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.needs import Declared, Knob
from foretoken.options.option import Option
from foretoken.verifiers.accepted_set import SetVerifier
from foretoken.verifiers.lossy import LossyConfig


class TypicalVerifier(SetVerifier):
    """Accept x if p(x) > min(epsilon, delta exp(-H(p))); after a refusal the next token is a draw of p.

    Paper:   Cai et al. 2024, arXiv:2401.10774, section 2.3.1 (epsilon 0.09, delta 0.3 are the released code's).
    Exact:   no. The emitted distribution is known (:meth:`SetVerifier.law`) and metered;
        tests/unit/verifiers/test_lossy.py.
    Differs: Medusa decodes the first token of every step greedily and accepts it without a test, which at temperatures
        above 0 is a further bias; ours is a draw from p (the argmax at temperature 0), so a step of no draft is plain
        decoding. Medusa takes the longest path of accepted tokens; ours walks down, at every node to the first
        child that stands, so that the emitted distribution depends on nothing below the node. p is the request's
        distribution, after temperature and filters. At temperature 0 the test looks at the distribution at temperature
        1, and the argmax stands.
    """

    name = "typical"
    declared = Declared(knob=Knob(option="epsilon", values=(0.3, 0.1, 0.02)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of typical acceptance."""

        epsilon: Annotated[
            float,
            Option(
                "A token more probable than this is always accepted.",
                least=0,
                most=1,
                remedy="lower accepts more, 1 leaves the bound to delta",
            ),
        ] = 0.09
        delta: Annotated[
            float,
            Option(
                "Share of exp(-entropy) that is enough; the lower of this bound and epsilon counts.",
                least=0,
                most=1,
                remedy="lower accepts more, 1 leaves the bound to epsilon",
            ),
        ] = 0.3

    config: Config

    def members(self, p_V: Tensor) -> Tensor:
        entropy = torch.special.entr(p_V).sum()
        return p_V > (self.config.delta * torch.exp(-entropy)).clamp(max=self.config.epsilon)
