"""Prefix reuse: what a finished request has read stays where it is, for the next prompt that begins alike.

    kept slot:    [ system prompt | question 1 | answer 1 ]
    new prompt:   [ system prompt | question 1 | answer 1 | question 2 ]     the slot is taken over; one turn is read
    new prompt:   [ system prompt | question 3 ]                             the common part is copied; the slot stays

A row's keys and values follow from its own past, so that a reused row is the one that would have been computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from foretoken.engine.request import Request
from foretoken.models.cache import KVCache

_LEAST = 16  # tokens that are worth a look-up


class Prefixes:
    """Slots of finished requests, the least recently used first.

    Args:
        cache: the target's; kept slots are not free in it.
        max_bytes: the cache is not made larger than this so that slots can be kept.
    """

    def __init__(self, cache: KVCache, max_bytes: int) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, tuple[list[int], str | None]] = OrderedDict()

    @property
    def free_slots(self) -> int:
        """Slots that a request can have: free ones, and those that are only kept."""
        return self._cache.free_slots + len(self._kept)

    def keep(self, request: Request) -> bool:
        """Keep what a request has read; whether it was worth it. Its slot must not be used by it any more."""
        count = min(self._cache.lengths[request.slot], len(request.tokens))
        if count < _LEAST or request.finish_reason not in ("stop", "length", "cancelled"):
            return False
        self._cache.rollback(request.slot, count)  # a draft may have been committed behind the last token
        self._kept[request.slot] = (request.tokens[:count], request.cache_salt)
        return True

    def acquire(self, request: Request, running: Sequence[Request]) -> int:
        """A slot for a request, with as much of its prompt as is known; says so in ``request.num_cached``.

        At least one token of the prompt is left to read, since its logits are needed. Nothing is reused where the
        prompt's log-probabilities are asked for.
        """
        cache, slot = self._cache, -1
        best, owner = self._longest(request, running) if request.prompt_logprobs is None else (0, -1)
        if best >= _LEAST:
            kept = self._kept.get(owner)
            if kept is not None and (2 * best >= len(kept[0]) or self.free_slots == 1):
                del self._kept[owner]
                cache.rollback(owner, best)
                slot = owner
            elif self._make_room(but=owner):
                slot = cache.fork(owner)
                cache.rollback(slot, best)
                if kept is not None:
                    self._kept.move_to_end(owner)
        if slot < 0:
            best = 0
            self._make_room()
            slot = cache.acquire()
        request.num_cached = best
        return slot

    def clear(self) -> None:
        """Give all kept slots back."""
        while self._kept:
            self._cache.release(self._kept.popitem(last=False)[0])

    def _longest(self, request: Request, running: Sequence[Request]) -> tuple[int, int]:
        """The longest common prefix with anybody, and whose slot has it; kept ones first."""
        best, owner = 0, -1
        limit = request.num_prompt - 1
        lengths = self._cache.lengths
        known = [(slot, tokens, salt) for slot, (tokens, salt) in self._kept.items()]
        known += [(other.slot, other.tokens[: lengths[other.slot]], other.cache_salt) for other in running]
        for slot, tokens, salt in known:
            if salt == request.cache_salt and (common := common_prefix(tokens, request.tokens, limit)) > best:
                best, owner = common, slot
        return best, owner

    def _make_room(self, but: int = -1) -> bool:
        """Have a free slot, if need be by giving up the one that was used least recently; whether there is one."""
        cache = self._cache
        full = not cache.free_slots or (cache.grows_next and 2 * cache.num_bytes > self._max_bytes)
        if full:
            oldest = next((slot for slot in self._kept if slot != but), None)
            if oldest is not None:
                del self._kept[oldest]
                cache.release(oldest)
        return bool(cache.free_slots)


def common_prefix(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """How many tokens two sequences begin with alike, at most ``limit``."""
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(place for place in range(limit) if first[place] != second[place])
