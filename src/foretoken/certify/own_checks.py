"""Checks beyond the enumeration of a rule: its decisions for a batch, and the sampler inside `match`.

* A rule with a batched implementation must return the same verdicts as for single requests: then the enumeration of
  single requests covers the batch, too.
* `match` samples the target itself, and so does plain decoding. Its tokens are compared, also over filtered rows, with
  an independent sampler in this file: the winner of the exponential race over p.

This module also has biased variants of the recipe's own rules: each check must fail for the biased variant.
"""

import torch
from torch import Tensor

from foretoken.certify.enumeration import CHAINS, LAW_OF, TREES, TablePair, cases
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, exponential
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict

_SIZE = 4  # vocabulary size of the tables
_VOCAB = 12  # vocabulary size of the sampler's rows
_POSITION = 9
NUM_SEEDS = 2000  # number of seeds for the sampler


def batch_differences(rule: Verifier, num_seeds: int = 6) -> int:
    """Count requests with different verdicts in a batch and alone, for the same seeds; 0 without batching."""
    if not rule.offers.batches:
        return 0
    found: list[tuple[Draft, Laws]] = []
    for kind, law in LAW_OF.items():
        if law in rule.laws:
            for shape in (*CHAINS[1:], *(TREES[:2] if rule.trees else ())):
                pair = TablePair(_SIZE, len(found), "peaked")
                found += [each[1:] for each in cases(pair, shape, kind, dtype=torch.float32)]
    differences = 0
    for kind_of_law in {type(draft.law) for draft, _ in found}:
        group = [case for case in found if isinstance(case[0].law, kind_of_law)] * num_seeds
        seeds = range(len(group))
        alone = [rule.verify(draft, target, Streams(s)) for s, (draft, target) in zip(seeds, group, strict=True)]
        abreast = rule.verify_batch([d for d, _ in group], [t for _, t in group], [Streams(s) for s in seeds])
        differences += sum(one != other for one, other in zip(alone, abreast, strict=True))
    return differences


def sampler_differences(rule: Verifier, num_seeds: int = NUM_SEEDS) -> int:
    """Count seeds for which the first token under `match` differs from the race over p here; full and filtered rows."""
    generator = torch.Generator().manual_seed(0)
    differences = 0
    for seed in range(num_seeds):
        logits_V = torch.randn(_VOCAB, generator=generator) * 1.5
        if seed % 2:  # as after a filter
            logits_V[torch.randperm(_VOCAB, generator=generator)[: _VOCAB // 2]] = -torch.inf
        target = Laws(logits_V[None], greedy=False, positions=[_POSITION + seed % 5])
        noise_V = exponential(seed, target.positions, _VOCAB)[0].double()
        expected = int((noise_V / torch.softmax(logits_V.double(), -1)).argmin())
        differences += rule.verify(Draft(TokenTree(())), target, Streams(seed)).extra != expected
    return differences


class ColderTarget(Verifier):
    """A rule that receives the target at half the temperature.

    Args:
        rule: the recipe's rule.
    """

    def __init__(self, rule: Verifier) -> None:
        self.name, self.promise, self.laws, self.trees = rule.name, rule.promise, rule.laws, rule.trees
        self._rule = rule

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Return the rule's verdict under p squared."""
        return self._rule.verify(draft, _laws(2.0 * target.logits_MV, target), rng)


class LenientTarget(ColderTarget):
    """A rule that overestimates the first drafted token's probability by a tenth."""

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Return the rule's verdict with the first drafted token's logit raised by log 1.1."""
        logits_MV = target.logits_MV.clone()
        if len(draft):
            logits_MV[0, draft.tree.tokens[0]] += 0.0953
        return self._rule.verify(draft, _laws(logits_MV, target), rng)


def _laws(logits_MV: Tensor, target: Laws) -> Laws:
    p_MV = torch.softmax(logits_MV, -1)  # the modified input must still be a distribution
    return Laws(p_MV.log(), greedy=target.greedy, positions=target.positions)
