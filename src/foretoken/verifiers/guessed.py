"""PEARL's test of a block's first token, for rules of drawn chains: one more node, without a row of its own."""

from foretoken.core.draft import Draft, PointMass
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual_at, residual_without


def finish(guess: Draft, target: Laws, row: int, rng: Streams) -> int | None:
    """Accept the token with probability min(1, p/q), else draw from the positive part of p - q: a draw from p.

    Paper:   PEARL, arXiv:2408.11850, the test of the first token of a block that is still being written; the rule is
             that of arXiv:2211.17192, Algorithm 1.
    Exact:   yes, if the token was drawn from q. Checked by tests/statistical/test_ahead.py.
    Differs: the decision takes a fresh uniform of the request's accept stream. The released code seeds a uniform by
             position and so uses one twice, in the tests before and after a block's border: a bias.

    Args:
        guess: a draft of one node.
        target: row ``row`` is the distribution of the emitted token.
    Returns:
        the emitted token; None at temperature 0, where the rule's own choice decides.
    """
    if target.greedy:
        return None
    (token,), law, p_V = guess.tree.tokens, guess.law, target.p_at(row)
    chance = float(p_V[token])
    if isinstance(law, PointMass):
        left_V = residual_without(p_V, (token,))
    else:
        chance = ratio(chance, law.chance(0, token))
        left_V = residual_at(p_V, law, 0)
    return token if rng.bernoulli("accept", (chance,))[0] else rng.categorical("residual", left_V)
