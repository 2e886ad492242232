"""Sample and match: the target samples with noise indexed by (seed, position); what matches stands."""

from foretoken.core.draft import Coupled, Draft, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, gumbel
from foretoken.core.verdict import Verdict, follow


class MatchVerifier(Verifier):
    """A seeded request yields the same tokens whatever was drafted, and if nothing was."""

    name = "match"
    promise = "same stream"
    laws: tuple[type[Law], ...] = (PointMass, Coupled, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Walk the tree along the target's own sample argmax(log p + Gumbel(seed, position)).

        Paper:   ours; the Gumbel coupling of draft and target is arXiv:2408.07978 (a drafter that uses the same noise
            matches more often, and needs to do nothing else).
        Exact:   the emitted token is the target's own sample, so its distribution is p whatever the draft and its
            distribution, and the stream equals that without speculation as far as the logits do. One request is one
            fixed stream: the distribution is that over seeds. Checked by tests/statistical/test_exactness.py.
        Differs: accepts less often than the ratio rule where the drafter draws noise of its own (draft_model:
            tree=coupled draws with this noise).

        Args:
            draft: tree of N nodes; its distribution is not looked at. An empty one is plain sampling, the same code.
            target: N + 1 rows of processed logits, and the position that each row decides.
            rng: only its seed is read.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        """
        if target.greedy:
            return follow(draft.tree, target.best)
        if target.on_gpu:  # one transfer for all rows
            return follow(draft.tree, _sample_rows(target, rng.seed))
        return follow(draft.tree, Samples(target, rng.seed))


class Samples:
    """The target's own sample of each row, argmax(log p + Gumbel(seed, position)): :class:`Choices` of a stream.

    A row is sampled when the walk reaches it: noise over the vocabulary is the whole cost of this rule.
    """

    def __init__(self, target: Laws, seed: int) -> None:
        self._target = target
        self._seed = seed

    def __getitem__(self, row: int, /) -> int:
        found, positions = self._target.support_at(row), (self._target.positions[row],)
        if found is not None and len(found[0]) == 1:
            return int(found[0])
        # where there are filters: noise for the tokens that can win, the same values
        ids_K, logits_V = (None, self._target.logits_at(row)) if found is None else found
        noise_V = gumbel(self._seed, positions, self._target.vocab_size, logits_V.device, ids_K)[0]
        best = int(noise_V.add_(logits_V).argmax())
        return best if ids_K is None else int(ids_K[best])


def _sample_rows(target: Laws, seed: int) -> list[int]:
    noise_MV = gumbel(seed, target.positions, target.vocab_size, target.logits_MV.device)
    return noise_MV.add_(target.logits_MV).argmax(dim=-1).tolist()
