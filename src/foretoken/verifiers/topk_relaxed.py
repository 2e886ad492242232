"""Top-k with a margin: a token stands if it is among the target's favourites, and not far after the first."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from foretoken.core.needs import Declared, Knob
from foretoken.options.option import Option
from foretoken.verifiers.accepted_set import SetVerifier
from foretoken.verifiers.lossy import LossyConfig


class TopkRelaxedVerifier(SetVerifier):
    """Accept x if it is among the k most probable tokens and p(x) >= max p - delta; else the next token is a draw of p.

    Paper:   none; relaxed acceptance of TensorRT-LLM, option names as there:
        https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html
    Exact:   no. The emitted distribution is known (:meth:`SetVerifier.law`) and metered;
        tests/unit/verifiers/test_lossy.py.
    Differs: there it is greedy only; here p is the request's distribution, after temperature and filters, and what
        follows a refusal is a draw from it. At temperature 0 the test looks at the distribution at temperature 1. Of
        equals at the edge of the k, torch's topk chooses.
    """

    name = "topk_relaxed"
    declared = Declared(knob=Knob(option="relaxed_delta", values=(0.05, 0.2, 0.8)))

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of relaxed top-k acceptance."""

        relaxed_topk: Annotated[
            int,
            Option(
                "So many of the target's most probable tokens may be accepted.",
                least=1,
                remedy="1 accepts only the argmax",
            ),
        ] = 10
        relaxed_delta: Annotated[
            float,
            Option(
                "How far a token's probability may be below the largest; 1 leaves the bound to relaxed_topk.",
                least=0,
                most=1,
                remedy="higher accepts more, 1 leaves the bound to relaxed_topk",
            ),
        ] = 0.1

    config: Config

    def members(self, p_V: Tensor) -> Tensor:
        top = p_V.topk(min(self.config.relaxed_topk, p_V.shape[0]))
        good = (top.values >= top.values[0] - self.config.relaxed_delta) & (top.values > 0.0)
        return torch.zeros_like(p_V, dtype=torch.bool).index_fill_(0, top.indices[good], True)
