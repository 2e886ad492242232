"""The exact output distribution of a verifier on a tiny vocabulary: every draft, every random decision, no sampling.

A rule is exact if the joint distribution of the first few emitted tokens equals the target's. That distribution is a
finite sum:

    sum over drafts          (their distribution is known: the drafter declares it or, for a biased rule,
      hides) sum over decisions     (a verifier's only randomness is ``bernoulli`` and ``categorical`` of its streams)
        weight of the emitted tokens, continued with the plain target distribution to the wanted length

:class:`ReplayedStreams` answers the verifier's random decisions from a script and records the alternatives; running the
verifier once per script visits every branch. Everything is in float64: verifiers keep the dtype of their input
distributions.

The rule ``match`` does not use these streams (its noise is a function of seed and position), so it cannot be enumerated
here; its distribution is tested over seeds, and its stream by identity.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.draft import Draft, HubPair, Law, PointMass, Sampled, Tabulated, TopThenSampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, mix64
from foretoken.core.siblings import hub_of
from foretoken.core.tree import ROOT, TokenTree
from foretoken.core.verdict import Verdict

Kind = Literal["point", "sampled", "without", "top", "hub"]
Stop = Literal["never", "after", "drop"]
KINDS: tuple[Kind, ...] = ("point", "sampled", "without", "top", "hub")
LAW_OF: dict[Kind, type[Law]] = {
    "point": PointMass,
    "sampled": Sampled,
    "without": WithoutReplacement,
    "top": TopThenSampled,
    "hub": HubPair,
}
STYLES = ("flat", "peaked", "steep", "zeros", "point", "equal")


class ReplayedStreams(Streams):
    """Streams that answer from a script and record the exact weight of every alternative.

    Args:
        script: the branch to take at each decision; decisions beyond it take the first possible branch.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(seed=0)
        self.script = script
        self.taken: list[int] = []
        self.untried: list[tuple[int, ...]] = []
        self.weight = 1.0

    def _choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        number = len(self.taken)
        branch = self.script[number] if number < len(self.script) else possible[0]
        if number >= len(self.script):
            self.untried += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(branch)
        self.weight *= weights[branch]
        return branch

    def bernoulli(self, purpose: str, chances: Sequence[float]) -> list[bool]:
        return [self._choose((chance, 1.0 - chance)) == 0 for chance in (min(max(c, 0.0), 1.0) for c in chances)]

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        weights = p_V.double()
        return self._choose((weights / weights.sum()).tolist())

    def distinct(self, purpose: str, q_V: Tensor, count: int) -> list[int]:
        left_V, found = q_V.double().clone(), []
        for _ in range(count):
            found.append(self.categorical(purpose, left_V))
            left_V[found[-1]] = 0.0
        return found

    def uniform(self, purpose: str, count: int) -> Tensor:
        raise ConfigError("a raw uniform cannot be enumerated: use bernoulli, categorical or distinct")

    def generator(self, purpose: str) -> torch.Generator:
        raise ConfigError("a generator cannot be enumerated: use bernoulli, categorical or distinct")


def verdicts(verifier: Verifier, draft: Draft, target: Laws) -> Iterator[tuple[float, Verdict]]:
    """Yield every verdict of the rule on one draft, with its exact probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        streams = ReplayedStreams(scripts.pop())
        verdict = verifier.verify(draft, target, streams)
        yield streams.weight, verdict
        scripts += streams.untried


class TablePair:
    """A target and a draft model as random tables: a distribution over V tokens for every context, created on first
    use.

    Args:
        vocab_size: V, at most 4 or so.
        seed: fixes every table.
        style: "flat" or "peaked" distributions; "steep": as at a low temperature, one token has almost all mass in half
            of the contexts, so that differences from 1 lose their digits; "zeros": about a third of the entries are
            zero, independently in p and q; "point": p and q are one-hot in half of the contexts; "equal": q = p.
        greedy: p is one-hot everywhere, and the verifier knows it.
        columns: the tokens that the drafter scores: q is 0 at all others, and drafts carry these columns of q.
    """

    def __init__(
        self, vocab_size: int, seed: int, style: str = "flat", *, greedy: bool = False, columns: Columns | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.style = style
        self.greedy = greedy
        self.columns = columns
        self._laws = lru_cache(maxsize=None)(self._make)

    def p(self, context: tuple[int, ...]) -> Tensor:
        """Return the target's distribution after these tokens, float64 [V]."""
        return self._laws("target", context)

    def q(self, context: tuple[int, ...]) -> Tensor:
        """Return the drafter's distribution after these tokens, float64 [V]."""
        q_V = self._laws("target" if self.style == "equal" else "draft", context)
        if self.columns is None:
            return q_V
        q_C = q_V[self.columns.ids_C].clamp_min(1e-12)  # a distribution even if the table is zero there
        return self.columns.spread(q_C / q_C.sum())

    def coin(self, context: tuple[int, ...]) -> bool:
        """Return the stop rule's decision for a context: a fixed coin per context."""
        return bool(torch.rand((), generator=self._generator("coin", context)) < 0.5)

    def guesses(self, context: tuple[int, ...]) -> tuple[int, ...]:
        """Return a deterministic drafter's proposals for a context, first child first: a fixed permutation."""
        order = torch.randperm(self.vocab_size, generator=self._generator("guesses", context))
        return tuple(order.tolist())

    def _generator(self, who: str, context: tuple[int, ...]) -> torch.Generator:
        key = mix64(self.seed ^ mix64(("target", "draft", "guesses", "coin").index(who)))
        for token in context:
            key = mix64(key ^ (token + 1))
        return torch.Generator().manual_seed(key >> 1)

    def _make(self, who: str, context: tuple[int, ...]) -> Tensor:
        rng = self._generator(who, context)
        size = self.vocab_size
        coins = torch.rand(2, generator=rng, dtype=torch.float64)
        if (self.greedy and who == "target") or (self.style == "point" and coins[0] < 0.5):
            law = torch.zeros(size, dtype=torch.float64)
            law[int(torch.randint(size, (1,), generator=rng))] = 1.0
            return law
        sharpness = {"peaked": 4.0, "steep": 40.0 if coins[1] < 0.5 else 2.0}.get(self.style, 1.0)
        law = torch.rand(size, generator=rng, dtype=torch.float64).neg().log1p().neg() ** sharpness
        if self.style == "zeros":
            keep = torch.rand(size, generator=rng) > 0.35
            keep[int(torch.randint(size, (1,), generator=rng))] = True
            law = law * keep
        return law / law.sum()


Shape = tuple[int, ...]
CHAINS: tuple[Shape, ...] = ((), (-1,), (-1, 0), (-1, 0, 1))
TREES: tuple[Shape, ...] = ((-1, -1), (-1, -1, 0), (-1, -1, -1), (-1, -1, 0, 1), (-1, -1, 0, 0))


def random_shapes(seed: int, count: int, max_nodes: int = 5) -> tuple[Shape, ...]:
    """Return the parents of random branching trees of 3 to ``max_nodes`` nodes: each node's parent is any earlier node.

    Args:
        seed: fixes the trees.
        count: number of different trees, which must exist.
        max_nodes: maximum nodes of a tree.
    """
    rng = random.Random(seed)
    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = tuple(rng.randrange(ROOT, node) for node in range(rng.randint(3, max_nodes)))
        if len(set(shape)) < len(shape):  # two children of one parent: not a chain
            found[shape] = None
    return tuple(found)


def drafts(
    pair: TablePair, shape: Shape, kind: Kind, stop: Stop = "never"
) -> Iterator[tuple[float, tuple[int, ...], Shape]]:
    """Yield every draft of this shape with its probability: (weight, tokens, parents).

    Args:
        pair: the models.
        shape: the parents of the tree. Without replacement, a node and its descendants are omitted if q has no tokens
            left for it.
        kind: the true distribution of the tokens; "hub" gives a node at most two children.
        stop: the behaviour of an adaptive draft length. "after": a token that triggers the rule stays, without children
            (exact for every rule here). "drop": such a token is discarded after the draw, so the remaining tokens no
            longer follow q: a bias, unless the draft is a point mass.
    """

    def grow(
        weight: float, tokens: tuple[int, ...], parents: Shape, placed: dict[int, int], node: int
    ) -> Iterator[tuple[float, tuple[int, ...], Shape]]:
        if node == len(shape):
            yield weight, tokens, parents
            return
        if shape[node] not in placed:
            yield from grow(weight, tokens, parents, placed, node + 1)
            return
        parent = placed[shape[node]]
        context = _context(tokens, parents, parent)
        if stop == "after" and context and pair.coin(context):
            yield from grow(weight, tokens, parents, placed, node + 1)
            return
        elders = [tokens[i] for i, other in enumerate(parents) if other == parent]
        law = _next_sibling(pair, kind, context, elders, _num_siblings(pair, kind, context, shape, shape[node]))
        mass = float(law.sum())
        if mass <= 0.0:
            yield from grow(weight, tokens, parents, placed, node + 1)
            return
        for token, share in enumerate((law / mass).tolist()):
            if share > 0.0 and stop == "drop" and pair.coin((*context, token)):
                yield from grow(weight * share, tokens, parents, placed, node + 1)
            elif share > 0.0:
                here = {**placed, node: len(tokens)}
                yield from grow(weight * share, (*tokens, token), (*parents, parent), here, node + 1)

    yield from grow(1.0, (), (), {ROOT: ROOT}, 0)


def _num_siblings(pair: TablePair, kind: Kind, context: tuple[int, ...], shape: Shape, parent: int) -> int:
    """Return the number of children of the node: that of the shape, limited by q's tokens if none may repeat."""
    wanted = shape.count(parent)
    if kind == "hub":
        wanted = min(wanted, 2)
    if kind in ("point", "sampled"):
        return wanted
    return min(wanted, int((pair.q(context) > 0.0).sum()))


def _next_sibling(pair: TablePair, kind: Kind, context: tuple[int, ...], elders: Sequence[int], count: int) -> Tensor:
    """Return the distribution of the next child after its earlier siblings as weights, float64 [V]; zero if there is
    none.
    """
    law = pair.q(context).clone()
    only = torch.zeros_like(law)
    if kind == "point":
        # with more children than tokens the guesses repeat, which a verifier must handle
        only[pair.guesses(context)[len(elders) % pair.vocab_size]] = 1.0
        return only
    if len(elders) == count:
        return only
    if kind == "top" and len(elders) < count - 1:
        only[int(law.topk(count - 1).indices[len(elders)])] = 1.0
        return only
    if kind == "hub" and elders and elders[0] != hub_of(law):
        only[hub_of(law)] = 1.0
        return only
    if kind != "sampled":
        law[list(elders)] = 0.0
    return law


def _context(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The exact outcome of one step.

    Attributes:
        joint: float64 [V] * length, the distribution of the first emitted tokens.
        accepted: expected number of accepted draft tokens.
    """

    joint: Tensor
    accepted: float


def step_law(
    verifier: Verifier,
    pair: TablePair,
    shape: Shape,
    kind: Kind,
    *,
    length: int = 3,
    declared: Kind | None = None,
    stop: Stop = "never",
) -> StepLaw:
    """The joint distribution of the first ``length`` tokens: one speculative step, then plain target sampling.

    Args:
        verifier: the rule.
        pair: target and draft tables.
        shape: parents of the draft tree.
        kind: the distribution of the draft.
        length: number of tokens in the joint distribution.
        declared: the distribution that the draft declares to the verifier; None: the true one.
        stop: the drafter's stop rule, see :func:`drafts`.
    """
    size = pair.vocab_size
    mass: dict[tuple[int, ...], float] = defaultdict(float)  # of what the step emits
    accepted = 0.0
    for weight, draft, target in cases(pair, shape, kind, declared=declared, stop=stop):
        for chance, verdict in verdicts(verifier, draft, target):
            emitted = (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra)[:length]
            accepted += weight * chance * len(verdict.path)
            mass[emitted] += weight * chance
    joint = torch.zeros((size,) * length, dtype=torch.float64)
    for emitted, share in mass.items():
        joint[emitted] += share * continuation(pair.p, emitted, length, size)
    return StepLaw(joint, accepted)


def cases(
    pair: TablePair,
    shape: Shape,
    kind: Kind,
    *,
    declared: Kind | None = None,
    stop: Stop = "never",
    dtype: torch.dtype = torch.float64,
) -> Iterator[tuple[float, Draft, Laws]]:
    """Yield every draft as a verifier gets it, after its probability and before the target's distributions.

    Args:
        pair, shape, kind, stop: see :func:`drafts`.
        declared: the distribution that the draft declares to the verifier; None: the true one.
        dtype: of both distributions.
    """
    for weight, tokens, parents in drafts(pair, shape, kind, stop):
        contexts = [_context(tokens, parents, node) for node in range(ROOT, len(tokens))]
        logits = torch.stack([pair.p(context) for context in contexts]).log().to(dtype)
        target = Laws(logits, greedy=pair.greedy, positions=[len(context) for context in contexts])
        yield weight, Draft(TokenTree(tokens, parents), _law(pair, tokens, parents, declared or kind, dtype)), target


def _law(pair: TablePair, tokens: Sequence[int], parents: Sequence[int], declared: Kind, dtype: torch.dtype) -> Law:
    if declared == "point" or not tokens:
        return PointMass()
    expanded = list(dict.fromkeys(parents))
    q_KV = torch.stack([pair.q(_context(tokens, parents, parent)) for parent in expanded]).to(dtype)
    rows = tuple(expanded.index(parent) for parent in parents)
    if pair.columns is not None:
        q_KV = q_KV[:, pair.columns.ids_C]
    return cast(type[Tabulated], LAW_OF[declared])(q_KV, rows, pair.columns)


def continuation(
    p: Callable[[tuple[int, ...]], Tensor], prefix: tuple[int, ...], length: int, vocab_size: int
) -> Tensor:
    """Return the distribution of plain sampling after these tokens, float64 [V] * (length - len(prefix))."""
    if len(prefix) >= length:
        return torch.ones((), dtype=torch.float64)
    law = p(prefix)
    rest = [continuation(p, (*prefix, token), length, vocab_size) for token in range(vocab_size)]
    return torch.stack([share * below for share, below in zip(law, rest, strict=True)])


def target_law(pair: TablePair, length: int = 3) -> Tensor:
    """Return the joint distribution of plain sampling, float64 [V] * length."""
    return continuation(pair.p, (), length, pair.vocab_size)


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of a batch of enumerations, and its place."""

    error: float
    num_cases: int
    case: str


def worst_error(
    verifier: Verifier,
    *,
    num_pairs: int = 2,
    kinds: Sequence[Kind] | None = None,
    shapes: Sequence[Shape] | None = None,
    greedy: bool = False,
    declared: Kind | None = None,
    stop: Stop = "never",
    styles: Sequence[str] = STYLES,
    seed: int = 0,
) -> Worst:
    """Enumerate a rule over every distribution it declares, chains and trees, and every style of random tables.

    Args:
        verifier: the rule.
        num_pairs: random model pairs per distribution, shape and style.
        kinds: distributions of the draft; None means all that the rule declares.
        shapes: parents of the draft trees; None means all that the rule can verify.
        greedy: one-hot targets (temperature 0).
        declared: the distribution that the draft declares to the verifier, if not the true one.
        stop: the drafter's stop rule.
        styles: kinds of random tables, see :class:`TablePair`.
        seed: fixes the tables.

    Returns:
        The largest absolute difference to the target's joint distribution of the first tokens (two for wide trees).
    """
    kinds = kinds or [kind for kind in KINDS if LAW_OF[kind] in verifier.laws]
    if shapes is None:
        shapes = (*CHAINS, *TREES) if verifier.trees else CHAINS
    error, case, count = 0.0, "", 0
    for number, (kind, shape) in enumerate(itertools.product(kinds, shapes)):
        for style, trial in itertools.product(styles, range(num_pairs)):
            size = _vocab_size(kind, shape)
            pair = TablePair(size, mix64(seed ^ mix64(1000 * number + trial)), style, greedy=greedy)
            length = 2 if len(shape) > 3 else 3
            joint = step_law(verifier, pair, shape, kind, length=length, declared=declared, stop=stop).joint
            found = float((joint - target_law(pair, length)).abs().max())
            count += 1
            if found >= error:
                error, case = found, f"{kind}, parents {list(shape)}, {style}, V={size}"
    return Worst(error, count, case)


def _vocab_size(kind: Kind, shape: Shape) -> int:
    """Return the largest vocabulary with few enough drafts; siblings alone get one token more than they can cover."""
    if kind == "point" or len(shape) <= 2 or shape == (ROOT,) * 3:
        return 4
    return 3 if len(shape) <= 4 else 2
