"""Exact verification against a mixture of target and draft: the text is partly the draft's, by a known share."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.needs import Declared, Knob
from foretoken.core.randomness import Streams
from foretoken.options.option import Option
from foretoken.verifiers.lossy import LossyConfig, LossyVerifier, exactly
from foretoken.verifiers.walk import Pick, Siblings


class MixtureVerifier(LossyVerifier):
    """Verify as `recursive` does, but against m = (1 - lam) p + lam q: that is the emitted distribution, lam TV(p, q)
    from p.

    Paper:   Narasimhan et al. 2024, arXiv:2405.19261, which verifies against a mixture of both distributions; there the
        weight is a deferral rule's, here it is one number.
    Exact:   no; exact for m. tests/unit/verifiers/test_lossy.py.
    Differs: q enters m without the tokens that the target cannot emit (p = 0: filtered or forbidden), normalised again,
        so that filters and bans hold. A point mass has q = 1 at the token; of several siblings, at the eldest. Where
        nothing is drafted m = p. At temperature 0 the rule is the argmax of the mixture: x stands if
        (1 - lam) p(x) + lam >= (1 - lam) max p, with p at temperature 1 and q = 1 at x.
    """

    name = "mixture"
    declared = Declared(knob=Knob(option="lam", values=(0.1, 0.2, 0.4)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of verification against a mixture."""

        lam: Annotated[
            float,
            Option(
                "The draft's share of the mixture; 0 is exact, 1 accepts every draft that the target could emit.",
                least=0,
                most=1,
                remedy="0 is the target's distribution, 1 the draft's",
            ),
        ] = 0.1

    config: Config

    def law(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings) -> Tensor:
        """(1 - lam) p + lam q, q restricted to what p can emit; p itself where that is nothing."""
        if q_V is None:
            q_V = torch.zeros_like(p_V)
            q_V[tokens[0]] = 1.0
        q_V = torch.where(p_V > 0.0, q_V, torch.zeros_like(q_V))
        mass = q_V.sum()
        if not mass > 0.0:
            return p_V
        return (1.0 - self.config.lam) * p_V + (self.config.lam / mass) * q_V

    def decide(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
        return exactly(self.law(p_V, q_V, tokens), q_V, tokens, rng)

    def stands(self, p_V: Tensor, q_V: Tensor | None, token: int) -> bool:
        share = 1.0 - self.config.lam
        return share * float(p_V[token]) + self.config.lam >= share * float(p_V.max())
