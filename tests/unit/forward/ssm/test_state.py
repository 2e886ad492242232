"""The cache of states keeps its contract: whatever is drafted, committed, forked and taken back, it is the text that
counts.

Every sequence of operations is compared with reading the same text once from its start, without a cache.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.dense import DensePlan
from foretoken.forward.ssm.layout import Mixer, Projected, alone
from foretoken.forward.ssm.state import LONG, HybridCache, StateCache, parents_of

H, G, N, P, W, VOCAB = 4, 2, 5, 3, 4, 11
LAYERS = 2
CLOSE = 1e-10


def mixer_of(layer: int, *, delta: bool = False) -> Mixer:
    generator = torch.Generator().manual_seed(layer)
    channels = 2 * G * N + H * P

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def never(*_: object) -> object:
        raise AssertionError("projections are the module's")

    return Mixer(
        layer=layer,
        module=torch.nn.Identity(),
        delta=delta,
        heads=H,
        groups=G,
        state_size=N,
        head_width=P,
        conv_CW=normal(channels, W),
        conv_bias_C=normal(channels),
        rate_H=-normal(H).exp(),
        step_bias_H=normal(H),
        skip_H=None if delta else normal(H),
        limits=(0.0, float("inf")),
        project=never,
        finish=never,
    )


class Model:
    """Mixers alone, each fed by its own table; the outputs of the layers are compared."""

    def __init__(self, *, delta: bool = False, scanned: bool = False, slots: int = 4) -> None:
        self.mixers = [mixer_of(layer, delta=delta) for layer in range(LAYERS)]
        self.tables = [self._table(mixer) for mixer in self.mixers]
        self.scanned = scanned
        self.cache = HybridCache(LAYERS, slots, 512, StateCache(self.mixers, torch.float64, torch.device("cpu")))

    def _table(self, mixer: Mixer) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + mixer.layer)
        raw = torch.randn(VOCAB, mixer.channels, generator=generator, dtype=torch.float64)
        return raw, torch.randn(VOCAB, H * (2 if mixer.delta else 1), generator=generator, dtype=torch.float64)

    def projected(self, layer: int, tokens: list[int]) -> Projected:
        raw, steps = self.tables[layer]
        return Projected(torch.empty(0), raw[tokens], steps[tokens])

    def forward(self, batch: PackedBatch, *, first: int = 0, last: int = LAYERS) -> torch.Tensor:
        for segment in batch.segments:
            self.cache.reserve(segment.slot, segment.tail + segment.num_rows)
        plan = DensePlan(self.cache, batch)
        plan.scanned = self.scanned
        return torch.stack([plan.mix(self.mixers[n], self.projected(n, batch.tokens)) for n in range(first, last)])

    def read(self, slot: int, tokens: list[int]) -> torch.Tensor:
        batch = PackedBatch()
        batch.add_chunk(slot, self.cache.lengths[slot], tokens, wanted=0)
        found = self.forward(batch)
        self.cache.commit(slot, range(len(tokens)))
        return found

    def draft(self, slot: int, root: int, tree: TokenTree, **span: int) -> torch.Tensor:
        batch = PackedBatch()
        batch.add_tree(slot, self.cache.lengths[slot], root, tree)
        return self.forward(batch, **span)

    def expected(self, text: list[int]) -> torch.Tensor:
        """What the last token of a text gives, [L, H, P]."""
        found = []
        for layer, mixer in enumerate(self.mixers):
            each = self.projected(layer, text)
            found.append(alone(mixer, each.raw_TC, mixer.gates(each.steps_TH, ["prompt"] * len(text)))[-1])
        return torch.stack(found)


def tree_of(seed: int, count: int) -> TokenTree:
    rng = random.Random(seed)
    return TokenTree([rng.randrange(VOCAB) for _ in range(count)], [rng.randrange(-1, row) for row in range(count)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("scanned", [False, True], ids=["walk", "scan"])
@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
@pytest.mark.parametrize("seed", range(2))
def test_any_history_is_the_text(seed: int, delta: bool, scanned: bool) -> None:
    """Chunks, trees, commits of any path, forks, rollbacks into pending rows and to marks, slots used again."""
    rng = random.Random(seed)
    model = Model(delta=delta, scanned=scanned)
    cache = model.cache
    texts: dict[int, list[int]] = {}
    compared = marked = 0
    for step in range(150):
        action = rng.choice(["open", "read", *["draft"] * 3, "fork", *["mark"] * 2, *["back"] * 2, "close"])
        if action == "open" and cache.free_slots:
            texts[cache.acquire()] = []
        if not texts:
            continue
        slot = rng.choice(list(texts))
        text = texts[slot]
        if action == "read":
            more = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, LONG, LONG + 1, 40]))]
            found = model.read(slot, more)
            for row in (0, len(more) - 1):
                assert (found[:, row] - model.expected([*text, *more[: row + 1]])).abs().max() < CLOSE
            text += more
            compared += 1
        elif action == "draft":
            root, tree = rng.randrange(VOCAB), tree_of(1000 * seed + step, rng.randrange(0, 9))
            found = model.draft(slot, root, tree)
            for node in {-1, *rng.sample(range(len(tree)), min(3, len(tree)))}:
                path = [] if node < 0 else [tree.tokens[each] for each in tree.path_to(node)]
                assert (found[:, node + 1] - model.expected([*text, root, *path])).abs().max() < CLOSE
            node = rng.randrange(-1, len(tree))
            path = [] if node < 0 else tree.path_to(node)
            cache.commit(slot, [0, *(each + 1 for each in path)])
            text += [root, *(tree.tokens[each] for each in path)]
            compared += 1
        elif action == "fork" and cache.free_slots:
            texts[cache.fork(slot)] = list(text)
        elif action == "mark":
            cache.mark(slot, 2**30)
        elif action == "back":
            length = cache.reachable(slot, rng.randrange(len(text) + 1))
            marked += 0 < length < cache.states.floor(slot)
            cache.rollback(slot, length)
            del text[length:]
        elif action == "close":
            cache.release(slot)
            del texts[slot]
        assert all(cache.lengths[each] == len(texts[each]) for each in texts)
    assert compared > 7
    assert marked


def test_a_refused_draft_leaves_nothing() -> None:
    """Rejected rows with inputs of a million: base, convolution and later rows are bit for bit those of others."""
    drafted, plain = Model(), Model()
    for model in (drafted, plain):
        model.cache.acquire()
        model.read(0, [1, 2, 3, 4, 5])
        raw, _ = model.tables[0]
        raw[10] = 1e6
    drafted.draft(0, 6, TokenTree([10, 7, 10, 10], [-1, -1, 0, 1]))
    drafted.cache.commit(0, [0, 2])
    plain.draft(0, 6, TokenTree([1, 7, 2, 3], [-1, -1, 0, 1]))
    plain.cache.commit(0, [0, 2])
    assert torch.equal(drafted.draft(0, 8, TokenTree(())), plain.draft(0, 8, TokenTree(())))
    for name in ("base_LSHNP", "conv_LSWC"):
        assert torch.equal(getattr(drafted.cache.states, name)[:, 0], getattr(plain.cache.states, name)[:, 0])


@pytest.mark.parametrize("length", range(1, W + 3))
def test_the_convolution_crosses_the_border(length: int) -> None:
    """Prompts of one token and more, then chains as deep: taps reach from the draft into the prompt."""
    model = Model()
    slot, text = model.cache.acquire(), list(range(length))
    model.read(slot, text)
    line = TokenTree([(3 * each) % VOCAB for each in range(W + 1)])
    found = model.draft(slot, 9, line)
    for row in range(len(line) + 1):
        assert (found[:, row] - model.expected([*text, 9, *line.tokens[:row]])).abs().max() < CLOSE


def test_grouping_into_chunks_changes_nothing() -> None:
    text = [(5 * each) % VOCAB for each in range(130)]
    found = []
    for size in (1, 7, 64, 130):
        model = Model()
        model.cache.acquire()
        found.append(torch.cat([model.read(0, text[start : start + size]) for start in range(0, 130, size)], dim=1))
    assert all((each - found[0]).abs().max() < CLOSE for each in found[1:])


@pytest.mark.parametrize("chunk", [3, LONG + 9])
def test_a_forward_that_failed_between_layers_is_repeated(chunk: int) -> None:
    """The first layer has absorbed the pending rows and written its own; the others have not."""
    model, calm = Model(), Model()
    for each in (model, calm):
        each.cache.acquire()
        each.read(0, [1, 2, 3])
        each.draft(0, 4, TokenTree([5, 6]))
        each.cache.commit(0, [0, 1])
    more = [(2 + each) % VOCAB for each in range(chunk)]
    batch = PackedBatch()
    batch.add_chunk(0, 5, more, wanted=0)
    model.forward(batch, last=1)
    assert (model.read(0, more) - calm.read(0, more)).abs().max() < CLOSE
    assert (model.draft(0, 1, TokenTree([2])) - calm.draft(0, 1, TokenTree([2]))).abs().max() < CLOSE


def test_layers_may_come_in_two_forwards() -> None:
    """A drafter inside the target reads a draft through the first layers by levels, the engine through the rest."""
    model = Model()
    model.cache.acquire()
    model.read(0, [1, 2, 3])
    batch = PackedBatch()
    batch.add_chunk(0, 3, [4, 5], wanted=0, verification=True)
    low = model.forward(batch, last=1)
    batch = PackedBatch()
    batch.add_chunk(0, 3, [6], wanted=0, tail=2, verification=True)
    low = torch.cat([low, model.forward(batch, last=1)], dim=1)
    high = model.draft(0, 4, TokenTree([5, 6]), first=1)
    for row in range(3):
        expected = model.expected([1, 2, 3, *[4, 5, 6][: row + 1]])
        assert (torch.cat([low, high])[:, row] - expected).abs().max() < CLOSE
    model.cache.commit(0, [0, 1, 2])
    assert (model.read(0, [7])[:, 0] - model.expected([1, 2, 3, 4, 5, 6, 7])).abs().max() < CLOSE


def test_a_state_is_not_shortened() -> None:
    model = Model()
    model.cache.acquire()
    model.read(0, [1, 2, 3, 4])
    model.read(0, [5])  # absorbs the four before it
    assert not model.cache.can_roll_back
    assert [model.cache.reachable(0, length) for length in (5, 4, 3, 0)] == [5, 4, 0, 0]
    with pytest.raises(ValueError, match=r"cannot go back to 3 tokens.*roll it back to 0 and read the text again"):
        model.cache.rollback(0, 3)
    model.cache.rollback(0, 4)
    assert (model.read(0, [9])[:, 0] - model.expected([1, 2, 3, 4, 9])).abs().max() < CLOSE


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
@pytest.mark.parametrize("count", [3, LONG + 3])
def test_a_mark_can_be_gone_back_to(count: int, delta: bool) -> None:
    """From the marked slot, and from a fork of it, whatever either has read since; into pending rows."""
    model = Model(delta=delta)
    slot, text = model.cache.acquire(), [(3 * each) % VOCAB for each in range(count)]
    model.read(slot, text)
    model.draft(slot, 4, TokenTree([5, 6]))
    model.cache.commit(slot, [0, 1])
    text += [4, 5]
    model.cache.mark(slot, 2**30)
    twin = model.cache.fork(slot)
    for each, token in ((slot, 7), (twin, 8)):
        for _ in range(5):
            model.read(each, [token])
    reached = [model.cache.reachable(twin, count + more) for more in (7, 5, 2, 0, -1)]
    assert reached == [count + 7, count + 2, count + 2, count, 0]
    for each in (twin, slot):
        model.cache.rollback(each, count + 2)
        assert (model.read(each, [9])[:, 0] - model.expected([*text, 9])).abs().max() < CLOSE
    assert model.cache.reachable(slot, count + 2) == count + 2  # it stays
    with pytest.raises(ValueError, match="mark or fork"):
        model.cache.rollback(slot, 1)
    model.cache.rollback(slot, count + 1)
    assert (model.read(slot, [9])[:, 0] - model.expected([*text[:-1], 9])).abs().max() < CLOSE


def test_marks_are_bounded_and_go_with_their_slots() -> None:
    """The one that was used least recently goes first, and forks share theirs."""
    model = Model()
    cache, slot = model.cache, model.cache.acquire()
    twin = cache.acquire()
    bare = cache.num_bytes
    model.read(slot, [1] * (LONG + 1))
    cache.mark(slot, 2**30)
    cache.mark(slot, 2**30)  # once is enough
    size = cache.num_bytes - bare
    cache.release(twin)
    twin = cache.fork(slot)
    assert cache.num_bytes - bare == size
    for _ in range(3):
        model.read(slot, [2] * (LONG + 1))
        cache.mark(slot, 3 * size)
        model.read(twin, [5] * (LONG + 1))
        cache.rollback(twin, LONG + 1)
        assert cache.num_bytes - bare <= 3 * size
    ends = [(LONG + 1) * each for each in range(5)]
    assert [cache.reachable(slot, end) for end in ends] == [0, ends[1], ends[1], ends[3], ends[4]]
    cache.release(slot)
    assert cache.num_bytes - bare == size
    cache.rollback(twin, 0)
    assert cache.num_bytes == bare


def test_a_mark_ends_with_the_text_it_was_made_of() -> None:
    """Rows read anew after a rollback differ from those of an old mark at that length."""
    model = Model()
    slot = model.cache.acquire()
    model.read(slot, [1] * (LONG + 1))
    model.cache.mark(slot, 2**30)
    model.read(slot, [2] * (LONG + 1))
    model.cache.mark(slot, 2**30)
    model.cache.rollback(slot, LONG + 1)
    model.read(slot, [3] * (3 * LONG))
    assert model.cache.reachable(slot, 2 * (LONG + 1)) == LONG + 1


def test_a_slot_begins_empty() -> None:
    model = Model()
    slot = model.cache.acquire()
    model.read(slot, [10] * 30)
    model.cache.release(slot)
    assert model.cache.acquire() == slot
    assert (model.read(slot, [4])[:, 0] - model.expected([4])).abs().max() < CLOSE


def test_a_long_chunk_is_committed_whole() -> None:
    model = Model()
    model.cache.acquire()
    batch = PackedBatch()
    batch.add_chunk(0, 0, [1] * (LONG + 1), wanted=0)
    model.forward(batch)
    with pytest.raises(RuntimeError, match="committed whole"):
        model.cache.commit(0, range(3))


def test_parents_of_a_level() -> None:
    """root 0, its children 1 and 2 in the tail; now a child of 2 and a child of 1."""
    seen = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]], dtype=torch.bool)
    segment = Segment(0, 6, 0, 2, 3, seen, (0, 1, 1, 2, 2))
    assert parents_of(segment, 6) == [-1, 0, 0, 2, 1]
    unseen = replace(segment, seen=torch.tensor([[1, 0, 1, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool))
    assert parents_of(unseen, 6) == [-1, -2, 0, 2, 2]


def test_a_tree_is_held_by_its_inputs() -> None:
    """64 nodes and their root, 24 layers of 24 heads of 64, 128 states: a state a node would be 1.2 GB."""
    one = replace(
        mixer_of(0),
        heads=24,
        head_width=64,
        groups=1,
        state_size=128,
        conv_CW=torch.zeros(24 * 64 + 256, W),
        conv_bias_C=None,
    )
    mixers = [replace(one, layer=layer) for layer in range(24)]
    for dtype, limit in ((torch.bfloat16, 6), (torch.float32, 12)):
        states = StateCache(mixers, dtype, torch.device("cpu"))
        before = states.num_bytes
        states.prepare(Segment(0, 0, 0, 65, 0, torch.zeros(65, 65, dtype=torch.bool), (0,) * 65, True))
        assert 0 < states.num_bytes - before <= limit * 2**20
        row = sum(each[:, 0, 0].nbytes for each in (states.raw_LSRC, states.gates_LSR2H))  # of a tail, in all layers
        assert row * 65 <= states.num_bytes - before
