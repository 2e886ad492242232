"""Block verification: decide on a chain as a whole, never shorter in expectation than token by token."""

from torch import Tensor

from foretoken.core.distortion import Spent
from foretoken.core.draft import Draft, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.residual import excess, ratio, residual_at, residual_without
from foretoken.core.verdict import Verdict, follow
from foretoken.verifiers import guessed
from foretoken.verifiers.recursive import RecursiveVerifier


class BlockVerifier(Verifier):
    """Keep the longest prefix that passes its own test, whether or not shorter ones pass theirs."""

    name = "block"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept the longest prefix that passes its test (chance h_i), then draw from the rest, (w_i p_i - q_i)+.

        With r_i = p(x_i)/q(x_i) at draft token i = 1..N and distributions after i tokens written p_i, q_i:

            w_0 = 1,  w_i = min(w_{i-1} r_i, 1)                              (the paper's p_i)
            s_i = sum_x (w_i p_i(x) - q_i(x))+
            h_i = s_i / (s_i + 1 - w_i)  for i < N,  h_N = w_N
            tau = max{i : u_i < h_i} or 0;  extra ~ p_N if tau = N, else ~ (w_tau p_tau - q_tau)+

        Why it is exact: P(tau >= i | x_1..x_i) = w_i, by induction from the end. It holds at i = N. Before, token x
        gets min(w_i p_i(x), q_i(x)) from longer prefixes, w_i - s_i in all; h_i makes up the missing s_i, and its
        draw gives (w_i p_i - q_i)+: together w_i p_i(x). So a drafter may stop wherever its *kept* tokens decide
        it to, but must not drop a token for its own value.

        Paper:   Sun et al. 2024, arXiv:2403.10444, Algorithm 2.
        Exact:   yes, whenever the tokens were sampled from q. Checked by tests/statistical/test_exactness.py, which
            also checks that its expected accepted length is never below that of the ratio rule.
        Differs: h_i <= w_i, so u_i < h_i is decided in two steps, first with chance w_i, then with h_i / w_i, the
            second from the last position backwards and only as far as needed: a chain that stands whole sums nothing
            over the vocabulary. A point mass has q(x) = 1 at the proposed token; then s_i = w_i (1 - p_i(x_{i+1}))
            in closed form (and the rule keeps as many tokens as the ratio rule in expectation, the optimum there).
            At temperature 0 the rule is the walk along the argmax. h_i = 0 where s_i = 0 (w_i = 1 and p_i = q_i make
            it 0/0 in the paper; a longer prefix is then accepted surely).

        Args:
            draft: chain of N tokens; q_KV float32 (already processed) or point mass.
            target: N + 1 rows; row i is the distribution after i tokens.
            rng: N decisions of purpose accept, at most N more, then one draw of purpose residual or bonus.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        Raises:
            ValueError: the tree branches.
        """
        tree, law = draft.tree, draft.law
        if target.greedy:
            return follow(tree, target.best)
        if not tree.is_chain:
            raise ValueError("the block rule verifies chains: use 'recursive' or 'match' for a branching tree")
        num = len(tree)
        if num == 0:
            return Verdict((), rng.categorical("bonus", target.p_at(0)))
        weights = [1.0]
        p_NV: list[Tensor] = []
        p_N: list[float] = []
        for node, token in enumerate(tree.tokens):
            if weights[-1] == 0.0:  # no longer prefix can stand: its rows are not processed
                weights += [0.0] * (num - node)
                break
            p_NV.append(target.p_at(node))
            p_N.append(float(p_NV[node][token]))
            q = 1.0 if isinstance(law, PointMass) else law.chance(node, token)
            weights.append(min(weights[-1] * ratio(p_N[node], q), 1.0))

        hopeful = rng.bernoulli("accept", weights[1:])
        if hopeful[-1]:
            return Verdict(tuple(range(num)), rng.categorical("bonus", target.p_at(num)))
        for tau in range(num - 1, 0, -1):
            if not hopeful[tau - 1]:
                continue
            weight = weights[tau]
            left_V: Tensor | None = None
            if isinstance(law, PointMass):
                mass = weight * max(1.0 - p_N[tau], 0.0)
            else:
                left_V = excess(p_NV[tau] * weight, law, tau)
                mass = float(left_V.sum())
            if mass <= 0.0 or not rng.bernoulli("accept", (mass / (mass + (1.0 - weight)) / weight,))[0]:
                continue
            if left_V is None:
                left_V = residual_without(p_NV[tau], tree.tokens[tau : tau + 1])
            return Verdict(tuple(range(tau)), rng.categorical("residual", left_V))
        if isinstance(law, PointMass):
            left_V = residual_without(p_NV[0], tree.tokens[:1])
        else:
            left_V = residual_at(p_NV[0], law, 0)
        return Verdict((), rng.categorical("residual", left_V))

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """One more test of the ratio rule; see verifiers/guessed.py."""
        return guessed.finish(RecursiveVerifier.decide, verdict, guess, target, rng)
