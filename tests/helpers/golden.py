"""Scenarios that compare our packed forward with the library's plain one, row by row.

Each scenario yields ``(ours [M, V], sequences)``: the logits of M rows, and for each row its sequence up
to its own token. The reference computes every sequence from its first token on, without cache, chunks or trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core.protocols import Plan
from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel

Rows = tuple[Tensor, list[list[int]]]

#   root ─┬─ 0 ─┬─ 2 ─┬─ 4 ── 6 ── 8
#         │     │     └─ 5
#         │     └─ 3 ── 7
#         └─ 1
PARENTS = (-1, -1, 0, 0, 2, 2, 4, 3, 6)
BRANCH = (0, 3, 7)  # leaves the first branch, so that committing it moves rows


class LayerPlan(DensePlan):
    """Dense attention that every layer of the library calls, also where a native decoder could do it in one piece."""

    def __init__(self, cache: KVCache, batch: PackedBatch) -> None:
        super().__init__(cache, batch)
        self.native = None


class Session:
    """A model with a cache, and the few moves that a step makes."""

    def __init__(
        self, model: LanguageModel, max_slots: int = 4, plan: Callable[[KVCache, PackedBatch], Plan] = DensePlan
    ) -> None:
        self.model = model
        self.cache = model.new_cache(max_slots)
        self.plan = plan

    def forward(self, batch: PackedBatch) -> Tensor:
        for segment in batch.segments:
            self.cache.reserve(segment.slot, segment.tail + segment.num_rows)
        return self.model.forward(batch, self.plan(self.cache, batch)).logits_MV.clone()

    def chunk(self, slot: int, tokens: Sequence[int], wanted: int | None = None) -> Tensor:
        """Read and commit consecutive tokens; logits of the last ``wanted`` rows (default: all)."""
        batch = PackedBatch()
        count = len(tokens) if wanted is None else wanted
        batch.add_chunk(slot, self.cache.lengths[slot], tokens, wanted=count)
        logits = self.forward(batch)
        self.cache.commit(slot, range(len(tokens)))
        return logits

    def draft(self, slot: int, root: int, tree: TokenTree) -> Tensor:
        """Read a root and its draft without committing."""
        batch = PackedBatch()
        batch.add_tree(slot, self.cache.lengths[slot], root, tree)
        return self.forward(batch)

    def levels(self, slot: int, root: int, tree: TokenTree) -> Tensor:
        """Read the same rows level by level, as a draft model does; logits in the order of ``draft``."""
        prefix = self.cache.lengths[slot]
        self.cache.reserve(slot, 1 + len(tree))
        row_of = {-1: 0}
        depth_of = {-1: 0}
        found: dict[int, Tensor] = {}
        batch = PackedBatch()
        batch.add_chunk(slot, prefix, [root], wanted=1)
        found[-1] = self.forward(batch)[0]
        for depth in range(1, max(tree.depths) + 1):
            nodes = [node for node in range(len(tree)) if tree.depths[node] == depth]
            batch = PackedBatch()
            batch.add_level(
                slot,
                prefix,
                [tree.tokens[node] for node in nodes],
                depths=[depth] * len(nodes),
                tail=len(row_of),
                tail_depths=list(depth_of.values()),
                ancestors=[[0, *(row_of[above] for above in tree.path_to(node)[:-1])] for node in nodes],
            )
            logits = self.forward(batch)
            for node, row in zip(nodes, logits, strict=True):
                row_of[node] = len(row_of)
                depth_of[node] = depth
                found[node] = row
        return torch.stack([found[node] for node in range(-1, len(tree))])


def tokens_of(seed: int, count: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def random_tree(seed: int, vocab_size: int, parents: Sequence[int] = PARENTS) -> TokenTree:
    return TokenTree(tokens_of(seed, len(parents), vocab_size), parents)


def prefixes(tokens: Sequence[int], start: int = 0) -> list[list[int]]:
    return [list(tokens[: end + 1]) for end in range(start, len(tokens))]


def paths(before: Sequence[int], root: int, tree: TokenTree) -> list[list[int]]:
    """The sequence that each row of ``draft`` stands for."""
    return [[*before, root, *(tree.tokens[above] for above in tree.path_to(node))] for node in range(-1, len(tree))]


def prefill_in_one_chunk(session: Session, vocab: int) -> Iterator[Rows]:
    prompt = tokens_of(1, 19, vocab)
    yield session.chunk(session.cache.acquire(), prompt), prefixes(prompt)


def prefill_in_ragged_chunks(session: Session, vocab: int) -> Iterator[Rows]:
    prompt = tokens_of(2, 21, vocab)
    slot = session.cache.acquire()
    begin = 0
    for count in (1, 4, 2, 7, 1, 6):
        rows = session.chunk(slot, prompt[begin : begin + count])
        yield rows, prefixes(prompt[: begin + count], begin)
        begin += count


def prefill_of_many_rows(session: Session, vocab: int) -> Iterator[Rows]:
    """More rows than are folded into one product, after a prefix."""
    prompt = tokens_of(34, 95, vocab)
    slot = session.cache.acquire()
    session.chunk(slot, prompt[:9], wanted=1)
    yield session.chunk(slot, prompt[9:]), prefixes(prompt, 9)


def chain(session: Session, vocab: int) -> Iterator[Rows]:
    prompt = tokens_of(3, 13, vocab)
    slot = session.cache.acquire()
    yield session.chunk(slot, prompt, wanted=1), [prompt]
    root, tree = 7, TokenTree(tokens_of(4, 6, vocab))
    yield session.draft(slot, root, tree), paths(prompt, root, tree)


def tree(session: Session, vocab: int) -> Iterator[Rows]:
    """Prefixes shorter and longer than the windows, so that a window ends in the prefix, or in the tree."""
    for length in (0, 2, 11):
        prompt = tokens_of(5 + length, length, vocab)
        slot = session.cache.acquire()
        if prompt:
            session.chunk(slot, prompt, wanted=1)
        root, draft = 9, random_tree(6, vocab)
        yield session.draft(slot, root, draft), paths(prompt, root, draft)


def levels(session: Session, vocab: int) -> Iterator[Rows]:
    prompt = tokens_of(7, 12, vocab)
    slot = session.cache.acquire()
    session.chunk(slot, prompt, wanted=1)
    root, draft = 9, random_tree(8, vocab)
    yield session.levels(slot, root, draft), paths(prompt, root, draft)


def after_commit(session: Session, vocab: int) -> Iterator[Rows]:
    """Twice: draft a tree, keep a branch that leaves the first one, go on after it."""
    slot = session.cache.acquire()
    text = tokens_of(9, 8, vocab)
    session.chunk(slot, text, wanted=1)
    for round_ in range(2):
        root, draft = 11 + round_, random_tree(10 + round_, vocab)
        yield session.draft(slot, root, draft), paths(text, root, draft)
        session.cache.commit(slot, [0, *(node + 1 for node in BRANCH)])
        text = [*text, root, *(draft.tokens[node] for node in BRANCH)]
        more = tokens_of(20 + round_, 3, vocab)
        yield session.chunk(slot, more), prefixes(text + more, len(text))
        text = text + more


def after_rollback(session: Session, vocab: int) -> Iterator[Rows]:
    """A draft refused whole; then the committed prefix itself cut back."""
    slot = session.cache.acquire()
    text = tokens_of(30, 10, vocab)
    session.chunk(slot, text, wanted=1)
    session.draft(slot, 13, random_tree(31, vocab))
    session.cache.commit(slot, [0])
    text.append(13)
    more = tokens_of(32, 2, vocab)
    yield session.chunk(slot, more), prefixes(text + more, len(text))
    session.cache.rollback(slot, 7)
    text = text[:7]
    more = tokens_of(33, 4, vocab)
    yield session.chunk(slot, more), prefixes(text + more, len(text))


def ragged_batch(session: Session, vocab: int) -> Iterator[Rows]:
    """Four requests in one forward: a chunk in the middle of a prompt, a chain, a tree, and plain decoding."""
    cache = session.cache
    texts = [tokens_of(40 + index, count, vocab) for index, count in enumerate((6, 9, 12, 3))]
    slots = [cache.acquire() for _ in texts]
    batch = PackedBatch()
    for slot, text in zip(slots, texts, strict=True):
        batch.add_chunk(slot, 0, text, wanted=1)
    yield session.forward(batch), [list(text) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        cache.commit(slot, range(len(text)))
    more, line, draft = tokens_of(50, 5, vocab), TokenTree(tokens_of(51, 4, vocab)), random_tree(52, vocab)
    batch = PackedBatch()
    batch.add_chunk(slots[0], 6, more, wanted=2)
    batch.add_tree(slots[1], 9, 15, line)
    batch.add_tree(slots[2], 12, 16, draft)
    batch.add_tree(slots[3], 3, 17, TokenTree(()))
    sequences = (
        prefixes(texts[0] + more, 9) + paths(texts[1], 15, line) + paths(texts[2], 16, draft) + [[*texts[3], 17]]
    )
    yield session.forward(batch), sequences
    cache.commit(slots[0], range(5))
    cache.commit(slots[1], [0, 1, 2])
    cache.commit(slots[2], [0, *(node + 1 for node in BRANCH)])
    cache.commit(slots[3], [0])
    kept = [
        texts[0] + more,
        [*texts[1], 15, *line.tokens[:2]],
        [*texts[2], 16, *(draft.tokens[node] for node in BRANCH)],
        [*texts[3], 17],
    ]
    batch = PackedBatch()
    for slot, text in zip(reversed(slots), reversed(kept), strict=True):
        batch.add_tree(slot, len(text), 18, TokenTree(()))
    yield session.forward(batch), [[*text, 18] for text in reversed(kept)]


SCENARIOS: dict[str, Callable[[Session, int], Iterator[Rows]]] = {
    scenario.__name__: scenario
    for scenario in (
        prefill_in_one_chunk,
        prefill_in_ragged_chunks,
        prefill_of_many_rows,
        chain,
        tree,
        levels,
        after_commit,
        after_rollback,
        ragged_batch,
    )
}


def reference_rows(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The library's logits after each sequence: full forwards from the first token on, no cache, no tree.

    A sequence that begins another one is read there. Padding on the right is invisible to causal rows.
    """
    whole: list[Sequence[int]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if not any(each[: len(sequence)] == sequence for each in whole):
            whole.append(sequence)
    width = max(map(len, whole))
    ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in whole], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits
    rows = [next(i for i, each in enumerate(whole) if each[: len(sequence)] == sequence) for sequence in sequences]
    return torch.stack([logits[row, len(sequence) - 1] for row, sequence in zip(rows, sequences, strict=True)])


def worst(session: Session, reference: Any, scenario: str, vocab: int) -> float:
    """Largest difference of a scenario, in units of the reference's logit spread."""
    errors = []
    for ours, sequences in SCENARIOS[scenario](session, vocab):
        assert ours.shape[0] == len(sequences)
        expected = reference_rows(reference, sequences).float()
        errors.append(float((ours.float() - expected).abs().max() / expected.std()))
    assert errors
    return max(errors)
