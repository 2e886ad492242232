"""Block means after any history against the means of the rows that are there."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.methods.sparse.block_means import BlockMeans
from foretoken.models.cache import KVCache

LAYERS, GROUPS, WIDTH, SIZE = 2, 2, 3, 4
SLOTS, LENGTH = 4, 60


def write(cache: KVCache, slot: int, count: int, generator: torch.Generator) -> None:
    """Random rows behind the committed prefix, as attention writes them."""
    cache.reserve(slot, count)
    begin = cache.lengths[slot]
    for layer in range(LAYERS):
        rows = torch.randn(GROUPS, count, WIDTH, generator=generator)
        keys, values = cache.buffers(layer, rows, rows)
        keys[slot, :, begin : begin + count] = rows
        values[slot, :, begin : begin + count] = rows


def brute_force(cache: KVCache, layer: int, slot: int) -> Tensor:
    keys = cache.keys[layer]
    assert keys is not None
    whole = cache.lengths[slot] // SIZE
    blocks = [keys[slot, :, b * SIZE : (b + 1) * SIZE].mean(dim=1) for b in range(whole)]
    return torch.stack(blocks, dim=1) if blocks else keys.new_zeros(GROUPS, 0, WIDTH)


def assert_agree(cache: KVCache, means: BlockMeans, layer: int, slots: list[int]) -> None:
    found = means.of(layer, slots)
    for slot in slots:
        whole = cache.lengths[slot] // SIZE
        torch.testing.assert_close(found[slot, :, :whole], brute_force(cache, layer, slot), rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history_gives_the_means_of_the_committed_rows(data: st.DataObject) -> None:
    """Chunks, trees kept in part, prefixes cut and grown again, slots given back, taken again and forked."""
    cache = KVCache(LAYERS, SLOTS, LENGTH)
    cache.capacity = 6  # growth happens here
    means = BlockMeans(cache, SIZE)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.acquire()]
    write(cache, slots[0], 5, generator)
    cache.commit(slots[0], range(5))
    for _ in range(data.draw(st.integers(2, 12))):
        move = data.draw(st.sampled_from(["commit", "rollback", "fork", "replace"]))
        slot = data.draw(st.sampled_from(slots))
        room = LENGTH - cache.lengths[slot]
        if move == "commit" and room:
            count = data.draw(st.integers(1, min(room, 17)))
            write(cache, slot, count, generator)
            dropped = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
            cache.commit(slot, sorted({*range(count)} - dropped))
        elif move == "rollback":
            cache.rollback(slot, data.draw(st.integers(0, cache.lengths[slot])))
        elif move == "fork" and cache.free_slots:
            slots.append(cache.fork(slot))
        elif move == "replace":
            cache.release(slot)
            slots[slots.index(slot)] = cache.acquire()
        if data.draw(st.booleans()):  # not always: what is asked for late must be right, too
            assert_agree(cache, means, data.draw(st.integers(0, LAYERS - 1)), slots)
    for layer in range(LAYERS):
        assert_agree(cache, means, layer, slots)


def test_a_block_is_averaged_when_it_is_whole_and_not_again() -> None:
    cache = KVCache(LAYERS, 1, LENGTH)
    slot = cache.acquire()
    generator = torch.Generator().manual_seed(0)
    write(cache, slot, 7, generator)
    cache.commit(slot, range(7))
    means = BlockMeans(cache, SIZE)
    first = means.of(0, [slot])[slot, :, 0].clone()
    keys = cache.keys[0]
    assert keys is not None
    keys[slot, :, :SIZE] += 1  # a committed row never changes; if it did, nobody would look again
    write(cache, slot, 2, generator)
    cache.commit(slot, [0])
    found = means.of(0, [slot])
    assert torch.equal(found[slot, :, 0], first)
    torch.testing.assert_close(found[slot, :, 1], keys[slot, :, SIZE : 2 * SIZE].mean(dim=1))


def test_half_precision_keys_are_summed_in_single_precision() -> None:
    cache = KVCache(1, 1, 64)
    slot = cache.acquire()
    cache.reserve(slot, 64)
    rows = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys, _ = cache.buffers(0, rows, rows)
    keys[slot, :, :64] = rows
    cache.commit(slot, range(64))
    found = BlockMeans(cache, 64).of(0, [slot])[slot, :, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows.double().mean(dim=1).float(), rtol=0, atol=1e-6)


def test_a_cache_does_not_keep_its_followers_alive() -> None:
    cache = KVCache(1, 1, 8)
    means = BlockMeans(cache, 4)
    assert len(cache.followers) == 1
    del means
    assert len(cache.followers) == 0
