"""The rule for temperature 0: a node stands if it is the target's argmax."""

from foretoken.core.draft import Coupled, Draft, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict, follow


class GreedyVerifier(Verifier):
    """Accept while a child equals the target's argmax."""

    name = "greedy"
    promise = "same text"
    laws: tuple[type[Law], ...] = (PointMass, Coupled, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Walk the tree from the root along the target's argmax; the first argmax that no child carries is extra.

        Paper:   Stern et al. 2018, arXiv:1811.03115, section 3 (the exact rule); on trees as in arXiv:2305.09781.
        Exact:   yes, token for token, whatever the draft and its distribution. Checked by
            tests/statistical/test_exactness.py.
        Differs: nothing. Ties are those of ``target.best``, the same as in plain decoding.

        Args:
            draft: tree of N nodes; its distribution is not looked at.
            target: N + 1 rows with ``greedy`` set; only ``best`` is read, no tensor is touched.
            rng: not used.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        Raises:
            ValueError: the target is not greedy; taking its argmax would not be its distribution.
        """
        if not target.greedy:
            raise ValueError("the greedy rule verifies temperature 0 only: use a verifier of the sampled distribution")
        return follow(draft.tree, target.best)
