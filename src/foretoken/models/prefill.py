"""Reading known tokens into a cache outside of the engine's step, a few hundred rows at a time.

tokens   t0 t1 … t511 │ t512 … t1023 │ t1024 …      one forward each, committed before the next
"""

from collections.abc import Callable, Iterator, Sequence

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel

CHUNK_ROWS = 512  # rows of one forward


def chunks(
    cache: KVCache,
    slot: int,
    tokens: Sequence[int],
    *,
    rows: int = CHUNK_ROWS,
    wanted: Callable[[int, int], int] = lambda begin, end: 1,
) -> Iterator[tuple[int, int, PackedBatch]]:
    """Batches that read tokens after a slot's rows; requesting the next batch commits the one before.

    Args:
        rows: of a batch at most.
        wanted: how many last rows of ``tokens[begin:end]`` are scored.
    Yields:
        begin and end of a chunk in ``tokens``, and the batch to run a forward on.
    """
    for begin in range(0, len(tokens), rows):
        end = min(begin + rows, len(tokens))
        cache.reserve(slot, end - begin)
        batch = PackedBatch()
        batch.add_chunk(slot, cache.lengths[slot], tokens[begin:end], wanted=wanted(begin, end))
        yield begin, end, batch
        cache.commit(slot, range(end - begin))


def prefill(model: LanguageModel, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
    """Read tokens densely after the slot's rows, and commit them."""
    for _, _, batch in chunks(cache, slot, tokens):
        model.forward(batch, DensePlan(cache, batch))
