"""The ratio rule with a tolerance: the target's probabilities count (1 + tolerance) times."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.distortion import emitted
from foretoken.core.needs import Declared, Knob
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual, residual_without
from foretoken.options.option import Option
from foretoken.verifiers.lossy import LossyConfig, LossyVerifier
from foretoken.verifiers.walk import Pick, Siblings


class ToleranceVerifier(LossyVerifier):
    """Accept x with chance min(1, (1 + tolerance) p(x) / q(x)); after a refusal draw from the positive part of p - q.

    Paper:   lenience, Leviathan et al. 2023, arXiv:2211.17192, appendix A.5; their l is 1 / (1 + tolerance).
    Exact:   no. Emitted distribution and distortion, with t the tolerance (tests/unit/verifiers/test_lossy.py):
        e = min(q, (1 + t) p) + (1 - sum min(q, (1 + t) p)) (p - q)+ / sum (p - q)+
        TV(e, p) = sum min((q - p)+, t p), at most t and at most TV(p, q)
        and e <= (1 + t) p everywhere.
    Differs: a factor, not an added constant (p / q + t), which would let tokens stand that the target cannot emit. A
        point mass has q = 1 at the proposed token, and the residual is p without it. At temperature 0 x stands if
        (1 + t) p(x) >= max p at temperature 1. Chains only.
    """

    name = "tolerance"
    declared = Declared(knob=Knob(option="tolerance", values=(0.3, 1.0, 5.0)))
    trees = False

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of the tolerant ratio rule."""

        tolerance: Annotated[
            float,
            Option(
                "How much more probable than under the target a token may become, as a share; 0 is exact.",
                least=0,
                most=1e6,
                remedy="0 is exact, 1 doubles p",
            ),
        ] = 0.1

    config: Config

    def law(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings) -> Tensor:
        factor = 1.0 + self.config.tolerance
        if q_V is None:
            stands_V = torch.zeros_like(p_V)
            stands_V[tokens[0]] = (factor * p_V[tokens[0]]).clamp(max=1.0)
            rest_V = residual_without(p_V, tokens)
        else:
            stands_V = torch.minimum(q_V, factor * p_V)
            rest_V = residual(p_V, q_V)
        return emitted(stands_V, rest_V / rest_V.sum())

    def decide(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
        (token,) = tokens
        q = 1.0 if q_V is None else float(q_V[token])
        if rng.bernoulli("accept", ((1.0 + self.config.tolerance) * ratio(float(p_V[token]), q),))[0]:
            return 0, token
        left_V = residual_without(p_V, tokens) if q_V is None else residual(p_V, q_V)
        return None, rng.categorical("residual", left_V)

    def stands(self, p_V: Tensor, q_V: Tensor | None, token: int) -> bool:
        return (1.0 + self.config.tolerance) * float(p_V[token]) >= float(p_V.max())
