"""What a row of the native decoder reads: its own window of its own path, and nothing after itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.native import build
from helpers import native_models
from helpers.golden import BRANCH, PARENTS, Session, paths, reference_rows
from helpers.native_models import error, make, plain, text

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

# a spine of eight, with a twig at every node: drafts reach further after the prefix than a short window is long
DEEP = (-1, 0, 1, 2, 3, 4, 5, 6, -1, 0, 1, 2, 3, 4, 5, 6)


def windowed(window: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setitem(native_models.FAMILIES, "windowed", ("mistral", {"sliding_window": window}))
    return make("windowed", torch.float32)


@pytest.mark.parametrize("prefix", [3, 30])
@pytest.mark.parametrize("window", [1, 5])
def test_a_tree_deeper_than_the_window(window: int, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = windowed(window, monkeypatch)
    session = Session(model)
    slot = session.cache.acquire()
    before = text(prefix)
    session.chunk(slot, before)
    for parents in (DEEP, PARENTS):
        tree = TokenTree(text(len(parents), 2), parents)
        expected = reference_rows(reference, paths(before, 7, tree))
        assert error(session.draft(slot, 7, tree), expected) < 1e-4
        assert error(session.levels(slot, 7, tree), expected) < 1e-4


def test_a_level_may_begin_with_its_deepest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The furthest look back may be that of any row of a level."""
    model, reference = windowed(19, monkeypatch)
    session = Session(model)
    slot = session.cache.acquire()
    before, tokens = text(33), text(4, 2)
    session.chunk(slot, before)
    session.cache.reserve(slot, 4)
    batch = PackedBatch()
    batch.add_chunk(slot, 33, tokens[:2], wanted=0)
    session.forward(batch)
    batch = PackedBatch()
    batch.add_level(slot, 33, tokens[2:], depths=[2, 0], tail=2, tail_depths=[0, 1], ancestors=[[0, 1], []])
    deep, shallow = session.forward(batch)
    assert error(deep, plain(reference, [*before, *tokens[:3]])[-1]) < 1e-4
    assert error(shallow, plain(reference, [*before, tokens[3]])[-1]) < 1e-4


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral, window", "llama, no groups", "gemma2"])
def test_a_damaged_row_does_not_reach_the_rows_before_it(family: str, dtype: torch.dtype | str) -> None:
    """A draft token with a NaN embedding ends the path that it stands on; all other rows keep their bits."""
    model, _ = make(family, dtype)
    bad = 5
    tokens = [token + (token == bad) for token in text(60)]
    whole = Session(model)
    expected = whole.chunk(whole.cache.acquire(), tokens)
    with torch.no_grad():
        model.model.model.embed_tokens.weight[bad] = torch.nan

    for place in (1, 7, 16, 40):  # in a chain
        session = Session(model)
        spoilt = [*tokens[:place], bad, *tokens[place + 1 :]]
        rows = session.chunk(session.cache.acquire(), spoilt)
        assert torch.equal(rows[:place], expected[:place])
        assert rows[place].isnan().all()

    session = Session(model)  # in a tree, and in one that grows level by level
    slot = session.cache.acquire()
    session.chunk(slot, tokens[:30])
    for spoilt_node in (1, 3, 4):
        clean = TokenTree([6 + node for node in range(len(PARENTS))], PARENTS)
        spoilt_tree = TokenTree([bad if i == spoilt_node else each for i, each in enumerate(clean.tokens)], PARENTS)
        for read in (session.draft, session.levels):
            healthy, damaged = read(slot, 7, clean), read(slot, 7, spoilt_tree)
            for node in range(-1, len(clean)):
                hit = node >= 0 and spoilt_node in clean.path_to(node)
                assert damaged[node + 1].isnan().all() if hit else torch.equal(damaged[node + 1], healthy[node + 1])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "stablelm, parallel, heads normed", "mixtral", "llama, no groups"]
)
def test_unread_rows_change_nothing(family: str, dtype: torch.dtype | str) -> None:
    """Rows left out after the last layer's attention change nothing: no other rows, taps or cache."""
    model, _ = make(family, dtype)
    layers = model.num_layers
    prompt, tree = text(70), TokenTree(text(len(PARENTS), 2), PARENTS)
    few = [0, 13, 14, 69, 72, 75]  # of a prompt's rows, and of a tree's after it

    def read(wanted: list[int], taps: tuple[int, ...], tap_rows: list[int]) -> list[Any]:
        session = Session(model)
        first, second = session.cache.acquire(), session.cache.acquire()
        session.chunk(second, prompt[:5], wanted=0)
        batch = PackedBatch()
        batch.add_chunk(first, 0, prompt, wanted=0)
        batch.add_tree(second, 5, prompt[5], tree)
        batch.wanted[:] = wanted
        for segment in batch.segments:
            session.cache.reserve(segment.slot, segment.tail + segment.num_rows)
        plan = DensePlan(session.cache, batch)
        output = model.forward(batch, plan, span=Span(0, layers, taps=taps, tap_rows=tap_rows))
        session.cache.commit(first, range(70))
        session.cache.commit(second, [0, *(node + 1 for node in BRANCH)])
        kept = [
            part for layer in range(layers) for slot in (first, second) for part in session.cache.committed(layer, slot)
        ]
        return [output.logits_MV.clone(), {depth: each.clone() for depth, each in output.hidden.items()}, kept]

    everything = list(range(71 + len(tree)))
    logits, hidden, kept = read(everything, (1, layers), everything)
    for wanted, taps, tap_rows in (
        (few, (), []),
        ([], (), []),
        ([70], (1,), everything),
        (few, (1, layers), [14, 15, 72]),
        ([], (layers,), [2, 69]),
    ):
        some = read(wanted, taps, tap_rows)
        assert torch.equal(some[0], logits[wanted])
        assert all(torch.equal(some[1][depth], hidden[depth][tap_rows]) for depth in taps)
        assert all(map(torch.equal, some[2], kept))


TILE = 256  # columns that attention takes at a time (native/types.h)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 6, "head_dim": 48}),
        ("mistral", {"sliding_window": 259}),
        ("mistral", {"sliding_window": 20}),
    ],
    ids=["groups", "odd width", "window", "short window"],
)
def test_rows_on_the_edge_of_a_tile(
    kind: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows are the measure of chunks and of trees that begin in one tile and end in the next, bit for bit."""
    monkeypatch.setitem(native_models.FAMILIES, "long", (kind, {**options, "max_position_embeddings": 320}))
    model, reference = make("long", dtype)
    tokens = text(TILE + 30)
    one = Session(model)
    slot = one.cache.acquire()
    single = torch.cat([one.chunk(slot, [token]) for token in tokens])
    if dtype == torch.float32:
        assert error(single, plain(reference, tokens)) < 1e-4
    for edges in ([0, 286], [0, 250, 257, 286], [0, 13, 255, 286]):
        other = Session(model)
        slot = other.cache.acquire()
        chunked = torch.cat([other.chunk(slot, tokens[a:b]) for a, b in itertools.pairwise(edges)])
        assert torch.equal(chunked, single)
    session = Session(model)
    slot = session.cache.acquire()
    for prefix in (253, 254, 256):
        session.chunk(slot, tokens[session.cache.lengths[slot] : prefix])
        # the text itself is the spine of the tree, and a twig hangs on every node of it
        spine = tokens[prefix + 1 : prefix + 9]
        tree = TokenTree([*spine, *(3 + (token + 1) % 90 for token in spine)], DEEP)
        for rows in (session.draft(slot, tokens[prefix], tree), session.levels(slot, tokens[prefix], tree)):
            assert torch.equal(rows[:9], single[prefix : prefix + 9])
        twig = session.draft(slot, tokens[prefix], tree)[-1]
        path = [tokens[prefix], *spine[:7], tree.tokens[-1]]
        assert torch.equal(torch.cat([session.chunk(slot, [token]) for token in path])[-1], twig)
        session.cache.rollback(slot, prefix)
