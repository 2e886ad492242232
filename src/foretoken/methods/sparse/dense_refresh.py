"""Keys and values that sparse verifications left behind, computed again densely every R tokens.

    prompt: dense │ R tokens: sparse │ R tokens: sparse │ …  root
                  └── again, dense ──┘                        as soon as R committed rows are not dense

A row's keys and values follow from what it attended to. Under sparse verification they are approximate, and everything
behind them builds on them. The rows are computed again as a chunk behind a prefix that is dense by then: so after each
refresh the cache is what dense decoding of the same tokens would have left. Tokens that were emitted stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core.protocols import Context
from foretoken.models.cache import KVCache
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import prefill


class DenseRefresh:
    """Our guard against drift; the paper (arXiv:2512.21911) keeps what the sparse forward computed.

    Args:
        target: whose keys and values.
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
        """The committed rows from ``begin`` on; what is before them is dense."""
        slot, end = context.slot, cache.lengths[context.slot]
        cache.rollback(slot, begin)
        prefill(self._target, cache, slot, context.tokens[begin:end])
