"""The cache against a list of rows, and against a model: reject, then continue, is never drafted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from helpers import golden
from helpers.golden import LayerPlan, Session
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model

LAYERS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 3, 4
SLOTS, LENGTH = 5, 40

draws = st.data()
quick = settings(max_examples=60, deadline=None)
# the model is read-only; only its cache is new in each example
modelled = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ------------------------------------------------------------------ bookkeeping, against a list of rows


@dataclass
class Oracle:
    """What each slot should hold: one number per committed row stands for its keys and values."""

    rows: dict[int, list[float]] = field(default_factory=dict)
    next: float = 1.0

    def fresh(self, count: int) -> list[float]:
        found = [self.next + index for index in range(count)]
        self.next += count
        return found


def write(cache: KVCache, slot: int, rows: list[float]) -> None:
    """Put rows after the committed prefix, as attention does."""
    cache.reserve(slot, len(rows))
    begin = cache.lengths[slot]
    for layer in range(LAYERS):
        like = torch.tensor(rows)[None, :, None]
        k_GTD, v_GTD = like.expand(HEADS, -1, WIDTH) + layer, -like.expand(HEADS, -1, VALUE_WIDTH) - layer
        keys, values = cache.buffers(layer, k_GTD, v_GTD)
        keys[slot, :, begin : begin + len(rows)] = k_GTD
        values[slot, :, begin : begin + len(rows)] = v_GTD


def agree(cache: KVCache, oracle: Oracle) -> None:
    for slot, rows in oracle.rows.items():
        assert cache.lengths[slot] == len(rows)
        for layer in range(LAYERS):
            keys, values = cache.keys[layer], cache.values[layer]
            if keys is None or values is None:
                assert not rows
                continue
            expected = torch.tensor(rows)[None, :, None]
            assert torch.equal(keys[slot, :, : len(rows)], expected.expand(HEADS, -1, WIDTH) + layer)
            assert torch.equal(values[slot, :, : len(rows)], -expected.expand(HEADS, -1, VALUE_WIDTH) - layer)


@quick
@given(data=draws)
def test_any_history_keeps_exactly_the_committed_rows(data: st.DataObject) -> None:
    """Slots come and go, drafts are written, kept in part or dropped, prefixes are cut and forked, buffers grow."""
    cache = KVCache(LAYERS, SLOTS, LENGTH)
    cache.capacity = 4  # the first size; small, so that growth happens here
    oracle = Oracle()
    for _ in range(data.draw(st.integers(1, 25))):
        held = sorted(oracle.rows)
        moves = ["acquire"] if cache.free_slots else []
        moves += ["step", "drop", "rollback", "release"] if held else []
        moves += ["fork"] if held and cache.free_slots else []
        move = data.draw(st.sampled_from(moves))
        if move == "acquire":
            slot = cache.acquire()
            assert slot not in oracle.rows
            oracle.rows[slot] = []
            continue
        slot = data.draw(st.sampled_from(held))
        rows = oracle.rows[slot]
        if move in ("step", "drop"):
            count = data.draw(st.integers(0, min(9, LENGTH - len(rows))))
            if count:
                tail = oracle.fresh(count)
                write(cache, slot, tail)
                if move == "step":
                    kept = [row for row in range(count) if data.draw(st.booleans())]
                    cache.commit(slot, kept)
                    rows += [tail[row] for row in kept]
        elif move == "rollback":
            length = data.draw(st.integers(0, len(rows)))
            cache.rollback(slot, length)
            del rows[length:]
        elif move == "fork":
            twin = cache.fork(slot)
            assert twin not in oracle.rows
            oracle.rows[twin] = list(rows)
        else:
            cache.release(slot)
            del oracle.rows[slot]
        agree(cache, oracle)
    agree(cache, oracle)
    assert cache.free_slots == SLOTS - len(oracle.rows)


def test_a_chain_moves_nothing() -> None:
    cache = KVCache(LAYERS, 1, LENGTH)
    slot = cache.acquire()
    write(cache, slot, [1.0, 2.0, 3.0])
    before = [buffer.data_ptr() for buffer in cache.keys if buffer is not None]
    versions = [buffer._version for buffer in cache.keys if buffer is not None]
    cache.commit(slot, [0, 1])
    assert [buffer.data_ptr() for buffer in cache.keys if buffer is not None] == before
    assert [buffer._version for buffer in cache.keys if buffer is not None] == versions


def test_all_slots_taken() -> None:
    cache = KVCache(LAYERS, 2, LENGTH)
    first = cache.acquire()
    cache.acquire()
    with pytest.raises(RuntimeError, match="all 2 cache slots are taken"):
        cache.acquire()
    with pytest.raises(RuntimeError, match="taken"):
        cache.fork(first)
    cache.release(first)
    assert cache.acquire() == first


def test_a_slot_has_a_limit() -> None:
    cache = KVCache(LAYERS, 1, LENGTH)
    slot = cache.acquire()
    write(cache, slot, [1.0] * 30)
    cache.commit(slot, range(30))
    cache.reserve(slot, LENGTH - 30)
    with pytest.raises(ValueError, match=f"needs {LENGTH + 1} rows, the cache holds {LENGTH}"):
        cache.reserve(slot, LENGTH - 29)
    with pytest.raises(ValueError, match="cannot roll slot 0 back to 31"):
        cache.rollback(slot, 31)


def test_growth_announces_itself() -> None:
    """Code that keeps addresses of the buffers checks ``generation``."""
    cache = KVCache(LAYERS, 4, LENGTH)
    cache.capacity = 4
    slot = cache.acquire()
    seen = [cache.generation]
    write(cache, slot, [1.0])
    seen.append(cache.generation)
    cache.reserve(slot, 5)
    seen.append(cache.generation)
    cache.acquire()
    seen.append(cache.generation)
    assert seen == sorted(set(seen))


# ------------------------------------------------------------------ with a model


@pytest.fixture(scope="module", params=["mistral", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Windowed, grouped queries; the first may run fused, the second has soft-capped scores."""
    return load(save_model(request.param, tmp_path_factory.mktemp(request.param)), device="cpu")


@pytest.fixture(params=["fused", "layers", "codes"])
def session(request: pytest.FixtureRequest, model: LanguageModel) -> Callable[[], Session]:
    if request.param == "codes" and build.library() is None:
        pytest.skip("no C compiler on this machine to write codes")

    def made() -> Session:
        session = Session(model, plan=LayerPlan if request.param == "layers" else DensePlan)
        if request.param == "codes":
            assert model.native_decoder is not None
            session.cache = KVCache(model.num_layers, 4, model.max_length, kv_dtype=torch.uint8)
        return session

    return made


def draw_tokens(data: st.DataObject, count: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=count, max_size=count))


def draw_tree(data: st.DataObject, most: int = 7) -> TokenTree:
    size = data.draw(st.integers(0, most))
    return TokenTree(draw_tokens(data, size), [data.draw(st.integers(-1, node - 1)) for node in range(size)])


def committed(session: Session, slot: int) -> list[Tensor]:
    length = session.cache.lengths[slot]
    return [
        buffer[slot, :, :length].clone()
        for buffer in (*session.cache.keys, *session.cache.values)
        if buffer is not None
    ]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.covering(1)
@modelled
@given(data=draws)
def test_reject_then_continue_is_never_drafted(session: Callable[[], Session], data: st.DataObject) -> None:
    """Bit for bit: the same requests with and without refused drafts between their steps, ragged and forked.

    A history is a list of packed forwards that commit, the same for both; between them only one of the two drafts.
    """
    drafted, plain = session(), session()
    for each in (drafted, plain):
        each.cache.capacity = 8  # so that a draft may make the buffers grow where plain decoding would not
    texts: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 2))):
        slot = drafted.cache.acquire()
        assert plain.cache.acquire() == slot
        texts[slot] = []
    for _ in range(data.draw(st.integers(1, 4))):
        # refused: the whole tail of several slots, written in one ragged forward
        batch = PackedBatch()
        for slot in texts:
            if data.draw(st.booleans()):
                root, tree = data.draw(st.integers(0, VOCAB_SIZE - 1)), draw_tree(data)
                batch.add_tree(slot, drafted.cache.lengths[slot], root, tree)
        if len(batch):
            drafted.forward(batch)
        if drafted.cache.free_slots > 1 and data.draw(st.booleans()):
            source = data.draw(st.sampled_from(sorted(texts)))
            twin = drafted.cache.fork(source)
            assert plain.cache.fork(source) == twin
            texts[twin] = list(texts[source])
        # kept: a chunk, or a tree of which a path stands
        moves: list[tuple[int, list[int], TokenTree, list[int]]] = []
        for slot in texts:
            root, tree = draw_tokens(data, 1), draw_tree(data, 4)
            path = tree.path_to(data.draw(st.integers(-1, len(tree) - 1)))
            moves.append((slot, root, tree, path))
        found = []
        for each in (drafted, plain):
            batch = PackedBatch()
            for slot, root, tree, _ in moves:
                batch.add_tree(slot, each.cache.lengths[slot], root[0], tree)
            found.append(each.forward(batch))
            for slot, _, _, path in moves:
                each.cache.commit(slot, [0, *(node + 1 for node in path)])
        assert torch.equal(found[0], found[1])
        for slot, root, tree, path in moves:
            texts[slot] += root + [tree.tokens[node] for node in path]
    for slot in texts:
        assert same_bits(committed(drafted, slot), committed(plain, slot))
        assert drafted.cache.lengths[slot] == len(texts[slot])


@pytest.mark.covering(1)
@modelled
@given(data=draws)
def test_a_committed_path_is_the_chain_of_its_tokens(session: Callable[[], Session], data: st.DataObject) -> None:
    """The rows that stay are the very rows of the draft; to rounding they are those of the text read in one go."""
    tree_first, straight = session(), session()
    slot = tree_first.cache.acquire()
    straight.cache.acquire()
    text = draw_tokens(data, data.draw(st.integers(1, 9)))
    for each in (tree_first, straight):
        each.chunk(slot, text)
    root, tree = data.draw(st.integers(0, VOCAB_SIZE - 1)), draw_tree(data)
    path = tree.path_to(data.draw(st.integers(-1, len(tree) - 1)))
    rows = [0, *(node + 1 for node in path)]
    tree_first.draft(slot, root, tree)
    begin = len(text)
    before = [
        buffer[slot, :, begin : begin + 1 + len(tree)].clone()
        for buffer in (*tree_first.cache.keys, *tree_first.cache.values)
        if buffer is not None
    ]
    tree_first.cache.commit(slot, rows)
    after = [rows_GLD[:, begin:] for rows_GLD in committed(tree_first, slot)]
    assert same_bits([each[:, rows] for each in before], after)
    straight.chunk(slot, [root, *(tree.tokens[node] for node in path)])
    for ours, theirs in zip(committed(tree_first, slot), committed(straight, slot), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    more = draw_tokens(data, 3)
    a, b = tree_first.chunk(slot, more), straight.chunk(slot, more)
    assert (a - b).abs().max() / b.std() < 3e-5


@pytest.mark.covering(1)
@modelled
@given(data=draws)
def test_forks_are_independent(session: Callable[[], Session], data: st.DataObject) -> None:
    """Changes of one, committed or not, are invisible to the other."""
    one = session()
    slot = one.cache.acquire()
    one.chunk(slot, draw_tokens(data, data.draw(st.integers(1, 9))))
    twin = one.cache.fork(slot)
    assert same_bits(committed(one, slot), committed(one, twin))
    kept = committed(one, slot)
    more = draw_tokens(data, 4)
    first = one.chunk(twin, more)
    one.draft(twin, 3, draw_tree(data))
    assert same_bits(kept, committed(one, slot))
    assert torch.equal(one.chunk(slot, more), first)


def test_a_request_does_not_feel_its_neighbours(session: Callable[[], Session]) -> None:
    """Cached rows of a slot stay the same bits whoever runs next to it, and whatever is drafted there."""
    one = session()
    slots = [one.cache.acquire() for _ in range(3)]
    for slot in slots:
        one.chunk(slot, golden.tokens_of(slot, 6 + slot, VOCAB_SIZE))
    kept = committed(one, slots[1])
    batch = PackedBatch()
    for slot in (slots[0], slots[2]):
        batch.add_tree(slot, one.cache.lengths[slot], 4, golden.random_tree(slot, VOCAB_SIZE))
    one.forward(batch)
    one.cache.commit(slots[0], [0, 2])
    one.cache.rollback(slots[2], 1)
    one.cache.release(slots[2])
    assert same_bits(kept, committed(one, slots[1]))
