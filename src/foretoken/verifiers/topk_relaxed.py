"""Top-k with a margin: a token stands if it is among the target's favourites, and not far behind the first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Knob
from foretoken.verifiers.accepted_set import SetVerifier
from foretoken.verifiers.lossy import LossyConfig


class TopkRelaxedVerifier(SetVerifier):
    """Accept x if it is among the k most probable tokens and p(x) >= max p - delta; else the next token is a draw of p.

    Paper:   none; relaxed acceptance of TensorRT-LLM, option names as there:
        https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html
    Exact:   no. The emitted law is known (:meth:`SetVerifier.law`) and metered; tests/unit/verifiers/test_lossy.py.
    Differs: there it is greedy only; here p is the request's law, after temperature and filters, and what follows a
        refusal is a draw from it. At temperature 0 the test looks at the law at temperature 1. Of equals at the edge of
        the k, torch's topk chooses.
    """

    name = "topk_relaxed"
    declared = Declared(knob=Knob(option="relaxed_delta", values=(0.05, 0.2, 0.8)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of relaxed top-k acceptance.

        Attributes:
            relaxed_topk: so many of the target's most probable tokens may stand.
            relaxed_delta: how far a token's probability may be below the largest; in [0, 1]. 1 leaves it to the k.
            max_distortion: budget: mean total variation per token at most, of every prefix of a request's output; None:
                no bound, 0: exact.
        """

        relaxed_topk: int = 10
        relaxed_delta: float = 0.1

        def __post_init__(self) -> None:
            super().__post_init__()
            count = self.relaxed_topk
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"relaxed_topk={count!r} must be an integer, at least 1: 1 accepts only the argmax")
            self.check_share("relaxed_delta", "higher accepts more, 1 leaves the bound to relaxed_topk")

    config: Config

    def members(self, p_V: Tensor) -> Tensor:
        top = p_V.topk(min(self.config.relaxed_topk, p_V.shape[0]))
        good = (top.values >= top.values[0] - self.config.relaxed_delta) & (top.values > 0.0)
        return torch.zeros_like(p_V, dtype=torch.bool).index_fill_(0, top.indices[good], True)
