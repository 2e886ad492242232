"""PEARL's test of a block's first token: it is decided like a drafted node, which has no row of its own."""

from collections.abc import Callable
from dataclasses import replace

from foretoken.core.draft import Draft, PointMass
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict


def finish(
    decide: Callable[..., list[tuple[int | None, int]]], verdict: Verdict, guess: Draft, target: Laws, rng: Streams
) -> Verdict:
    """Decide the guess as the only child of the last node; its token, or the one emitted instead, is the extra token.

    Paper:   PEARL, arXiv:2408.11850, the test of the first token of a block that is still being written; the rule is
             that of arXiv:2211.17192, Algorithm 1, where the recipe's rule is no other.
    Exact:   yes, if the rule is, and the token was drawn from q. Checked by tests/statistical/test_ahead.py.
    Differs: the decision takes a fresh uniform of the request's accept stream. The released code seeds a uniform by
             position and so uses one twice, in the tests before and after a block's border: a bias.

    Args:
        decide: the rule at a node, :meth:`foretoken.verifiers.walk.NodeRule.decide`.
        verdict: accepts every node of a chain.
        guess: a draft of one node.
        target: the distributions of the step.
    Returns:
        the verdict with this token; at temperature 0 the same, where the rule's own choice decides.
    """
    if target.greedy:
        return verdict
    law, p_1V = guess.law, target.p_at(len(verdict.path))[None]
    q_1V = None if isinstance(law, PointMass) else law.q_at(0)[None]
    ((_, extra),) = decide(type(law), p_1V, q_1V, [guess.tree.tokens], [rng])
    return replace(verdict, extra=extra)
