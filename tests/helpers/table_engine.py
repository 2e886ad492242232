"""A stub engine for the parts of a certificate: tokens of a distribution over six tokens, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from foretoken.certify.on_models import Generate
from foretoken.options.sampling import SamplingParams


def engine(salt: int = 0, tilt: float = 0.0) -> Generate:
    """Tokens of a distribution over six tokens that depends on temperature; ``tilt`` moves mass to token 0 after the
    first.
    """

    def generate(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        outputs = []
        for each in params:
            rng = random.Random(f"{salt} {each.seed}")
            law = [0.4 ** (i / max(each.temperature, 0.05)) for i in range(6)]
            tokens = rng.choices(range(6), law)
            for _ in range(each.max_tokens - 1):
                tokens.append(0 if rng.random() < tilt else rng.choices(range(6), law)[0])
            outputs.append(tokens)
        return outputs

    return generate
