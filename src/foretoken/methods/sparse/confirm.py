"""The dense target with a sparse one: it confirms drafts of the sparse target, or refreshes the cache.

The target drafts for itself with sparse attention, and a dense verification confirms:

    inner drafter  ──►  a b c          offered once, after the root
    sparse target  root a b c  ──►  a b x    the target's choice under the sparse plan: x corrects c
                   x  ──►  y   y  ──►  z     … one row at a time, until there are N tokens
    dense target   root a b x y z …  ──►  any lossless rule

After a long prefix a dense step is mostly attention. So N tokens are found by steps that read a part of the prefix,
and confirmed by one that reads all of it. Rows of sparse steps lie in the target's own cache, after the committed
prefix; the dense step writes all of them anew. The output is the dense target's, whatever the sparse steps chose.

Without confirmation a row's keys and values are approximate under sparse verification, and later rows build on
them. :class:`DenseRefresh` computes them again every R tokens, as a chunk after a prefix that is dense by then: so
after each refresh the cache is what dense decoding of the same tokens would have left. Tokens that were emitted stay.

    prompt: dense │ R tokens: sparse │ R tokens: sparse │ …  root
                  └── again, dense ──┘                        as soon as R committed rows are not dense

Letters: M rows of one request, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Coupled, Draft, Law, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Offers
from foretoken.core.protocols import Budget, Context, Drafter, Outcome, Plan
from foretoken.core.randomness import gumbel
from foretoken.core.tree import ROOT, TokenTree
from foretoken.core.verdict import Verdict
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.prefill import prefill


@dataclass(slots=True)
class _Chain:
    """One request's draft while it grows.

    Attributes:
        limit: maximum number of tokens.
        offered: proposed by the inner drafter, not looked at yet.
        tokens: chosen by the sparse target.
        num_read: rows after the prefix that stand: the root, and all chosen tokens but the last.
    """

    context: Context
    limit: int
    offered: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    num_read: int = 0

    def draft(self) -> Draft:
        return Draft(TokenTree(self.tokens), _law(self.context)) if self.tokens else NO_DRAFT


class SparseDraft(Drafter):
    """Drafts with the target under a sparse plan, on top of another drafter.

    Paper:   sparse verification (arXiv:2512.21911) as a drafter; drafting with a sparse cache and verifying with the
             whole one is the plan of TriForce (arXiv:2404.11912) and MagicDec (arXiv:2408.11049).
    Exact:   a draft is a function of the past and of the noise of (seed, position): a point mass, coupled above
             temperature 0. Lossless under every rule that knows that kind.
    Differs: every sparse step chooses its blocks anew. The inner drafter drafts once, at the root; the first path of
             a tree is used.

    Args:
        inner: its proposals save sparse steps.
        target: drafts.
        plan: makes the sparse plan of a step.
        dense_below: prefixes of at most so many rows are drafted for by the inner drafter alone.
        length: tokens of a draft (N).
        inner_length: tokens of an inner draft, at most.
    Raises:
        ConfigError: the inner drafter drafts with the target's first layers itself.
    """

    branches = False
    laws: tuple[type[Law], ...] = (Coupled,)

    def __init__(
        self,
        inner: Drafter,
        target: LanguageModel,
        plan: Callable[[KVCache, PackedBatch], Plan],
        *,
        dense_below: int,
        length: int,
        inner_length: int,
    ) -> None:
        if inner.needs.hidden_layers is not None:
            raise ConfigError(
                f"verification.confirm={length} does not go with method '{inner.name}', which drafts inside of the "
                "target, too: use another, for example suffix"
            )
        self.name = inner.name
        self.offers = Offers(length=length)
        self._inner = inner
        self._inner_length = inner_length
        self._target = target
        self._plan = plan
        self._dense_below = dense_below
        self._cache: KVCache | None = None
        self._offered: dict[int, Draft] = {}

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target."""
        self._cache = cache

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Ask the inner drafter, then choose with the sparse target until every draft is long enough."""
        limits = [min(budget.max_nodes, budget.max_depth) for budget in budgets]
        lengths = [min(limit, self._inner_length) for limit in limits]
        offers = self._inner.propose(contexts, [Budget(length, length) for length in lengths])
        chains = []
        growing = []
        for context, limit, offer in zip(contexts, limits, offers, strict=True):
            self._offered[context.request_id] = offer
            chain = _Chain(context, limit, _first_path(offer.tree))
            chains.append(chain)
            if limit < 1 or len(context.tokens) - 1 <= self._dense_below:
                chain.tokens = list(chain.offered)
                continue
            assert self._cache is not None
            self._cache.reserve(context.slot, 1 + limit)
            growing.append(chain)
        while growing:
            self._step(growing)
            growing = [chain for chain in growing if len(chain.tokens) < chain.limit]
        return [chain.draft() for chain in chains]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report the outcomes of the inner drafter's own proposals."""
        inner = []
        for outcome in outcomes:
            draft = self._offered.pop(outcome.request_id, NO_DRAFT)
            if len(draft):
                path = _path_along(draft.tree, outcome.tokens[:-1])
                tokens = outcome.tokens[: len(path) + 1]
                inner.append(Outcome(outcome.request_id, draft, Verdict(path, tokens[-1]), tokens))
        if inner:
            self._inner.observe(inner)

    def release(self, request_id: int) -> None:
        self._offered.pop(request_id, None)
        self._inner.release(request_id)

    def _step(self, chains: Sequence[_Chain]) -> None:
        """Run one sparse forward: the last chosen token of every chain, and the offered tokens after it."""
        cache = self._cache
        assert cache is not None
        batch = PackedBatch()
        for chain in chains:
            slot = chain.context.slot
            rows = [chain.tokens[-1] if chain.tokens else chain.context.tokens[-1], *chain.offered]
            batch.add_chunk(slot, cache.lengths[slot], rows, wanted=len(rows), tail=chain.num_read, verification=True)
        output = self._target.forward(batch, self._plan(cache, batch))
        for chain, segment in zip(chains, batch.segments, strict=True):
            chosen = _chosen(chain, output, range(segment.start, segment.start + segment.num_rows))
            stood = 0
            while stood < len(chain.offered) and chosen[stood] == chain.offered[stood]:
                stood += 1
            chain.tokens += chosen[: stood + 1]
            del chain.tokens[chain.limit :]
            chain.num_read += 1 + stood
            chain.offered = ()


def _first_path(tree: TokenTree) -> tuple[int, ...]:
    """The tokens from the root to the first leaf."""
    tokens, node = [], ROOT
    while children := tree.children.get(node):
        node = children[0]
        tokens.append(tree.tokens[node])
    return tuple(tokens)


def _path_along(tree: TokenTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """The nodes that carry these tokens, as far as there are some."""
    path, node = [], ROOT
    for token in tokens:
        found = next((child for child in tree.children.get(node, ()) if tree.tokens[child] == token), None)
        if found is None:
            break
        path.append(node := found)
    return tuple(path)


def _law(context: Context) -> PointMass:
    return PointMass() if context.params.greedy else Coupled()


def _chosen(chain: _Chain, output: Output, rows: range) -> list[int]:
    """The target's choice after each row, with the noise that its sample of that position will be drawn with."""
    context = chain.context
    if context.laws.trivial:
        return list(output.best[rows.start : rows.stop])
    count = len(chain.tokens)
    path = TokenTree([*chain.tokens, *chain.offered])
    logits_MV: Tensor = context.laws.process(
        output.logits_MV[rows.start : rows.stop], path, range(count - 1, count - 1 + len(rows))
    )
    if not context.params.greedy:
        start = len(context.tokens) + count
        positions = range(start, start + len(rows))
        logits_MV = logits_MV + gumbel(context.streams.seed, positions, logits_MV.shape[-1], logits_MV.device)
    return logits_MV.argmax(dim=-1).tolist()


class DenseRefresh:
    """Our guard against drift; the paper (arXiv:2512.21911) keeps what the sparse forward computed.

    Args:
        target: the model of the cache.
        every: R, rows that may be approximate before they are computed again.
    """

    def __init__(self, target: LanguageModel, every: int) -> None:
        self.every = every
        self._target = target
        self._dense: dict[int, tuple[int, int]] = {}  # slot -> its request, and how many rows are dense

    def __call__(self, cache: KVCache, decoding: Sequence[Context]) -> None:
        """Bring up to date whoever is due; called before a step with the requests that decode."""
        for context in decoding:
            slot, length = context.slot, cache.lengths[context.slot]
            request, dense = self._dense.get(slot, (-1, 0))
            if request != context.request_id:
                dense = length  # its first step: all of this was a prompt
            if length - dense >= self.every:
                self._again(cache, context, dense)
                dense = length
            self._dense[slot] = context.request_id, dense

    def _again(self, cache: KVCache, context: Context, begin: int) -> None:
        """Recompute the committed rows from ``begin`` on; earlier rows are dense."""
        slot, end = context.slot, cache.lengths[context.slot]
        cache.rollback(slot, begin)
        prefill(self._target, cache, slot, context.tokens[begin:end])
