"""SPRINTER's verifier head: a logistic unit on a draft model's last hidden state, perhaps also on its distribution q.

    tokens ── embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── h ── the draft's head ── q ── draw y
                                                                        └── sigmoid(w.x + b) = v

:meth:`SprinterHead.forward` computes v, the estimated probability that the target accepts y, for a whole text. The
drafter computes it token by token for a batch of requests, and training collects its inputs; tests compare both with
it. The input x of the head is one of:

    pre    h alone, the state that produced the q of y: the head does not depend on y (as published)
    drawn  that h, log q(y), the entropy of q, and the difference between its two largest probabilities
    post   h alone, after the draft has read y

Paper: arXiv:2502.04557, and the released code. Differs: the published head is ``pre``. q(y) alone predicts acceptance
better than that head, which does not read q(y), so ``drawn`` is the default of training.

Letters: T tokens, M rows, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafting.logistic import LogisticConfig, LogisticHead

FEATURES = ("pre", "drawn", "post")
FACTS = ("log_q", "entropy", "margin")
_LEAST_LOG = -20.0  # log q of a token is at least this


def facts_of(q_MV: Tensor, token_M: Tensor) -> Tensor:
    """Describe tokens by the distributions of their samples: float32 [M, 3], in the order of :data:`FACTS`.

    Args:
        q_MV: distributions, float32.
        token_M: int64, sampled from them.
    """
    log_q_M = q_MV.gather(1, token_M[:, None])[:, 0].log().clamp(min=_LEAST_LOG)
    largest_M2 = q_MV.topk(2).values
    entropy_M = torch.special.entr(q_MV).sum(dim=-1)
    return torch.stack([log_q_M, entropy_M, largest_M2[:, 0] - largest_M2[:, 1]], dim=-1).float()


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LogisticConfig):
    """The input of a head, and its pair of models.

    Attributes:
        feature: one of :data:`FEATURES`, see above.
        width: of the draft's hidden states.
    """

    feature: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature not in FEATURES:
            raise ValueError(f"feature={self.feature!r}")
        for name in ("draft", "draft_fingerprint"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None")

    @property
    def saw_token(self) -> bool:
        """Whether v depends on the token itself, not only on the text before it."""
        return self.feature != "pre"

    @property
    def num_inputs(self) -> int:
        return self.width + (len(FACTS) if self.feature == "drawn" else 0)


class SprinterHead(LogisticHead):
    """Estimates whether the target accepts a draft token, from the draft model's states."""

    algorithm = "sprinter"
    title = "SPRINTER head"
    flag = "--set head=DIR"
    Config = HeadConfig

    def forward(self, h_TD: Tensor, q_TV: Tensor, tokens_T: Tensor) -> Tensor:
        """Return v = sigmoid(w.x + b) of the tokens y = x_1 .. x_{T-1} of one text, float32 [T - 1].

        Args:
            h_TD: last hidden states of the draft model, after its final norm; row t has read x_0 .. x_t.
            q_TV: its distributions; row t is the distribution of x_{t+1}.
            tokens_T: int64, the text.
        """
        before_TD, after_TD, y_T, q_TV = h_TD[:-1], h_TD[1:], tokens_T[1:], q_TV[:-1]
        if self.config.feature == "pre":
            x = before_TD
        elif self.config.feature == "post":
            x = after_TD
        else:
            log_q_T = torch.log(q_TV[range(len(y_T)), y_T]).clamp(min=_LEAST_LOG)
            entropy_T = -(q_TV * torch.log(q_TV.clamp(min=1e-30))).sum(-1)
            top_TV = q_TV.sort(-1, descending=True).values
            x = torch.cat([before_TD, torch.stack([log_q_T, entropy_T, top_TV[:, 0] - top_TV[:, 1]], -1)], -1)
        return torch.sigmoid(x @ self.unit.weight_D + self.unit.bias)

    def judge_all(self, hidden_MD: Tensor, q_MV: Tensor) -> Tensor:
        """Return v of every possible token, float32 [M, V], for a head that reads ``drawn``.

        Args:
            hidden_MD: the states that produced the distributions.
            q_MV: the distributions, float32. Only log q(y) differs from token to token.
        """
        best_M = q_MV.argmax(dim=-1)
        x_MD = torch.cat([hidden_MD.float(), facts_of(q_MV, best_M)], dim=-1).double()
        weight_D = self.unit.weight_D.double().to(x_MD.device)
        of_log_q = hidden_MD.shape[-1] + FACTS.index("log_q")
        x_MD[:, of_log_q] = 0.0
        log_q_MV = q_MV.log().clamp(min=_LEAST_LOG).double()
        return torch.sigmoid((x_MD @ weight_D + self.unit.bias)[:, None] + weight_D[of_log_q] * log_q_MV).float()
