"""Prefix reuse: what a finished request has read stays where it is, for the next prompt that begins alike.

    kept slot:    [ system prompt | question 1 | answer 1 ]
    new prompt:   [ system prompt | question 1 | answer 1 | question 2 ]     the slot is taken over; one turn is read
    new prompt:   [ system prompt | question 3 ]                             the common part is copied; the slot stays

A row's keys and values follow from its own past, so that a reused row is the one that would have been computed. A
drafter that reads hidden states is shown those of the reused rows again (shown.py), and no more is reused than is known
of them: prompts are, answers are not.

States of state-space layers cannot be shortened, only gone back to where they were marked. They are after the last
token of what a slot has read, in front of a prompt's last token, and where a prompt turns out to leave another: whoever
comes third with the same beginning has it. A chunk of the prompt ends there, which costs one forward more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.core.protocols import Drafter
from foretoken.engine.features.feature_replay import FeatureReplay
from foretoken.engine.request import CacheKey, Request
from foretoken.forward.cache import KVCache

if TYPE_CHECKING:
    from foretoken.engine.prefix_files import PrefixFiles

log = logging.getLogger(__name__)

_LEAST = 16  # tokens that are worth a look-up


class Prefixes:
    """Slots of finished requests, the least recently used first.

    Args:
        cache: the target's; kept slots are not free in it.
        max_bytes: bounds the cache with kept slots, the hidden states kept for drafters, and marked states, each.
        drafter: its needs limit how much can be reused.
        files: keep on disk what leaves memory; None: it is forgotten.
    Attributes:
        shown: hidden states of the rows that slots begin with; empty if the drafter needs none.
        joined: requests that have inherited rows which their drafter has not seen yet.
    """

    def __init__(self, cache: KVCache, max_bytes: int, drafter: Drafter, files: PrefixFiles | None = None) -> None:
        self.shown = FeatureReplay()
        self.joined: list[Request] = []
        self._cache = cache
        self._max_bytes = max_bytes
        self._drafter = drafter
        wanted = drafter.needs.hidden_layers
        self._last = None if wanted is None else wanted.last  # rows of a prompt's end that are shown, and no others
        self._kept: OrderedDict[int, tuple[list[int], CacheKey]] = OrderedDict()
        self._files = files
        if files is not None and (not cache.can_roll_back or (wanted is not None and wanted.last is None)):
            why = "has states" if not cache.can_roll_back else "is read by a drafter that needs hidden states"
            log.warning("prefixes stay in memory: a cache that %s is not stored on disk", why)
            self._files = None

    @property
    def free_slots(self) -> int:
        """Slots that a request can have: free ones, and those that are only kept."""
        return self._cache.free_slots + len(self._kept)

    def keep(self, request: Request) -> bool:
        """Keep what a request has read; whether it was worth it. Its slot must not be used by it any more."""
        count = min(self._cache.lengths[request.slot], len(request.tokens))
        if not self._cache.reads_as_written:
            count = min(count, request.num_prompt)
        count = self._cache.reachable(request.slot, count)
        if count < _LEAST or request.finish_reason not in ("stop", "length", "cancelled"):
            self.shown.drop(request.slot)
            return False
        self._cache.rollback(request.slot, count)  # a draft may have been committed after the last token
        self._kept[request.slot] = (request.tokens[:count], request.cache_key)
        while self.shown.num_bytes > self._max_bytes and len(self._kept) > 1:
            self._give_up(next(iter(self._kept)))
        return True

    def acquire(self, request: Request, running: Sequence[Request]) -> int:
        """A slot for a request, with as much of its prompt as is cached; ``request.num_cached`` counts it.

        At least one token of the prompt is left to read, since its logits are needed. Nothing is reused if the
        prompt's log-probabilities are requested.
        """
        cache, slot = self._cache, -1
        best, owner, common = self._longest(request, running) if request.prompt_logprobs is None else (0, -1, 0)
        stored = 0
        if self._files is not None and request.prompt_logprobs is None:
            stored, _ = self._files.longest(request.tokens, request.cache_key, self._limit(request))
        if best >= _LEAST and best >= stored:
            kept = self._kept.get(owner)
            if kept is not None and (2 * best >= len(kept[0]) or self.free_slots == 1):
                del self._kept[owner]
                cache.rollback(owner, best)
                slot = owner
                self._inherit(request, owner, slot, best)
            elif self._make_room(but=owner):
                slot = cache.fork(owner)
                cache.rollback(slot, best)
                self._inherit(request, owner, slot, best)
                if kept is not None:
                    self._kept.move_to_end(owner)
        if slot < 0:
            best = 0
            self._make_room()
            slot = cache.acquire()
            self.shown.drop(slot)
            if self._files is not None and request.prompt_logprobs is None:
                best = self._from_disk(self._files, request, slot)
        request.num_cached = best
        if not cache.can_roll_back:
            request.borders = _borders(best, common, self._limit(request))
        return slot

    def read(self, request: Request) -> None:
        """A chunk of a prompt was read, but not its end."""
        if self._cache.lengths[request.slot] in request.borders:
            self._cache.mark(request.slot, self._max_bytes)

    def store(self) -> None:
        """Write all kept slots to disk, if there are files."""
        for slot, (tokens, key) in self._kept.items():
            if self._files is not None:
                self._files.store(tokens, key, self._cache, slot)

    def clear(self) -> None:
        """Give all kept slots back."""
        for slot in [*self._kept]:
            self._give_up(slot)

    def _longest(self, request: Request, running: Sequence[Request]) -> tuple[int, int, int]:
        """The longest common prefix with another request that can be reused, its slot (kept ones first), and the
        length of the longest common prefix at all."""
        best, owner, longest = 0, -1, 0
        limit, lengths = self._limit(request), self._cache.lengths
        known = [(slot, tokens, key) for slot, (tokens, key) in self._kept.items()]
        known += [(other.slot, other.tokens[: lengths[other.slot]], other.cache_key) for other in running]
        for slot, tokens, key in known:
            if key == request.cache_key:
                common = common_prefix(tokens, request.tokens, limit)
                longest = max(longest, common)
                usable = self._cache.reachable(slot, min(common, self._usable(slot)))
                if usable > best:
                    best, owner = usable, slot
        return best, owner, longest

    def _from_disk(self, files: PrefixFiles, request: Request, slot: int) -> int:
        """Put the longest stored beginning of a prompt into an empty slot; how many tokens it has."""
        while True:
            count, name = files.longest(request.tokens, request.cache_key, self._limit(request))
            if count < _LEAST:
                return 0
            if files.load(name, self._cache, slot, count):
                return count  # else the file was damaged, and is gone

    def _limit(self, request: Request) -> int:
        """How much of a prompt can be reused at most: the rest is needed for logits or for the drafter's states."""
        return max(0, request.num_prompt - max(1, self._last or 0))

    def _usable(self, slot: int) -> int:
        """Rows of a slot with the hidden states that the drafter needs."""
        wanted = self._drafter.needs.hidden_layers
        if wanted is None or self._last is not None:
            return self._cache.lengths[slot]
        return self.shown.count(slot, wanted.depths)

    def _inherit(self, request: Request, owner: int, slot: int, count: int) -> None:
        """The request begins with rows of another one."""
        if self._drafter.needs.hidden_layers is not None and self._last is None:
            self.shown.copy(owner, slot, count)
            self.joined.append(request)

    def _give_up(self, slot: int) -> None:
        """A kept slot is free again."""
        tokens, key = self._kept.pop(slot)
        if self._files is not None:
            self._files.store(tokens, key, self._cache, slot)
        self.shown.drop(slot)
        self._cache.release(slot)

    def _make_room(self, but: int = -1) -> bool:
        """Have a free slot, if need be by giving up the one that was used least recently; whether there is one."""
        cache = self._cache
        full = not cache.free_slots or (cache.grows_next and 2 * cache.num_bytes > self._max_bytes)
        if full:
            oldest = next((slot for slot in self._kept if slot != but), None)
            if oldest is not None:
                self._give_up(oldest)
        return bool(cache.free_slots)


def _borders(begin: int, common: int, end: int) -> tuple[int, ...]:
    """Where a prompt that is read from ``begin`` is marked: where it leaves another, and at its end."""
    found = (common,) if common - begin >= _LEAST else ()
    return (*found, end) if end - max((begin, *found)) >= _LEAST else found


def common_prefix(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """How many tokens two sequences begin with alike, at most ``limit``."""
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(place for place in range(limit) if first[place] != second[place])
