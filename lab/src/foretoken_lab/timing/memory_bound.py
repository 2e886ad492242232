"""A model of the speed of speculative decoding where reading weights takes all of the time."""

from __future__ import annotations


def memory_bound_speedup(tokens_per_step: float, cost: float, passes: float) -> float:
    """MBSU, tokens per step / (cost * passes + 1): a model of time, not a measurement.

    Paper:   VocabTrim, arXiv:2506.22694, with the block efficiency and cost of arXiv:2403.00858. Keys, values and calls
             cost nothing in it, and one more row of the verification neither.
    Differs: the papers count all of a drafter's parameters; fewer are read for a token (embeddings are look-ups).

    Args:
        tokens_per_step: accepted ones and the extra one.
        cost: weights that the drafter reads in a pass over those that the target reads.
        passes: of the drafter in a step, one after the other.
    """
    return tokens_per_step / (cost * passes + 1.0)
