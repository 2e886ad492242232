"""Judge Decoding's head: a logistic unit on the target's last hidden state, which estimates whether a token is correct.

    … d_i ── layers[0] ─ … ─ layers[L-1] ── final norm ── e_i ── the target's head ── p of the token after d_i
                                                           └── sigmoid(w.e_i + b) = P(d_i is fine)

:meth:`JudgeHead.forward` computes it for a whole text. The verifier computes it for the rows of a verification, and
training collects its inputs from trees of labelled tokens; tests compare both with it.

Paper: arXiv:2501.19309, section 4. D + 1 numbers are trained, the target is frozen. ``e_i`` is the state *of* the
token, after the target has read it; SPRINTER's head reads the state that predicted the token.
Differs: the paper does not specify whether the state is normed; a head's ``normed`` does.

Letters: T tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafting.logistic import LogisticConfig, LogisticHead


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(LogisticConfig):
    """Input and threshold of a judge, and its target.

    Attributes:
        width: of the target's hidden states.
        threshold: the judge accepts a token above this probability; chosen by training. 1: it accepts no token.
        normed: the input is the state after the final norm, as for the LM head; False: before the norm.
    """

    from_zero = ("threshold",)

    threshold: float
    normed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold > 1:
            raise ValueError(f"threshold={self.threshold!r} is no probability")


class JudgeHead(LogisticHead):
    """Estimates P(token is fine) from the target's state of the token."""

    algorithm = "judge"
    title = "judge"
    flag = "--set head=DIR"
    Config = JudgeConfig

    def forward(self, e_TD: Tensor) -> Tensor:
        """Return P(x_t is fine) = sigmoid(w.e_t + b) of every token of a text, float32 [T] (section 4).

        Args:
            e_TD: last hidden states of the target; row t has read x_0 .. x_t, and judges x_t.
        """
        return torch.sigmoid(e_TD @ self.unit.weight_D + self.unit.bias)
