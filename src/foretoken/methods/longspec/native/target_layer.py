"""A native decoder with a layer of cross-attention that reads the keys and values of another decoder's layer, in place.

    own layers         as in any decoder: their rows are written into this decoder's own cache
    cross-attention    projects queries only; every row of a segment attends to a number of committed rows in one slot
                       of the other decoder's cache, and to no others

Committed rows never change, so the other decoder may run at the same time. Whole tiles of its cache are read in place;
the keys after the last whole tile are copied to memory of this forward. All passes of a chain are one native call
(drafting/feature_heads/native/chains.py).
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.native.chains import Entry, OpenChain, Pass, Prefetch
from foretoken.drafting.feature_heads.native.checks import check_chain
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.native import checks, structs, team
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Head, Layout


class TargetPrefix(NamedTuple):
    """The rows of the other decoder's cache that a segment attends to.

    Attributes:
        slot: of its cache.
        length: number of committed rows, from the first.
    """

    slot: int
    length: int


class CrossAttentionDecoder(NativeDecoder):
    """A decoder with one layer that reads another decoder's keys.

    Args:
        layout: with an embedding; its head width equals the owner's, and it reads the owner's first groups.
        owner: the other decoder, with the same library.
        layer: of the owner.
    """

    def __init__(self, layout: Layout, owner: NativeDecoder, layer: int) -> None:
        super().__init__(layout, owner.library)
        check_owner(self.sizes, owner.sizes, layer)
        self._owner, self._layer = owner, layer
        self._entry = Entry(num_tokens=self.sizes.embedded)

    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        prefixes: Sequence[TargetPrefix],
        of: KVCache,
        *,
        top: int,
        head: Head | None = None,
        ids_C: Tensor | None = None,
        prefetch: Sequence[Prefetch] = (),
    ) -> list[Pass]:
        """Read tokens; with ``prefetch`` run all planned passes of a chain in one native call.

        Args:
            batch: the rows, which are written into ``cache``; a row's position need not be its index in the cache.
            prefixes: of each segment.
            of: the owner's cache.
            top: number of tokens of each requested row to rank; at least 1 with ``prefetch``.
            head: replaces the decoder's own head, of the same width and dtype.
            ids_C: int32, token ids of the head's columns; None: column i is token i.
            prefetch: of each segment; its last row must be the requested one, and the cache must have capacity for all
                passes.
        Raises:
            InputError: a token is not in the embedding.
            ValueError: an argument does not fit this decoder; see checks.py.
            MemoryError: there is no memory for the first pass.
        """
        own_head = self.head if head is None else head
        span = Span(0, self._model.num_layers)
        checks.check(self.sizes, batch, NativePlan(cache), span)
        checks.check_head(self.head.packed, own_head.packed, own_head.vocab_size, top)
        check_chain(self.sizes, batch, cache, self.sizes.embedded, own_head.vocab_size, ids_C, prefetch, top)
        check_prefixes(prefixes, of, len(batch.segments))
        count = max((each.most for each in prefetch), default=1)
        model = self._model if head is None else self._with_head(head)
        own = team.current()
        call = self._open(batch, cache, span, model, top=top, threads=own.threads, forwards=count)
        for native, prefix in zip(call.segments, prefixes, strict=True):
            native.far_slot, native.far = prefix
        addresses = self._owner.cache_addresses(of)  # held while the call runs
        external_kv = structs.ExternalKV(
            groups=self._owner.sizes.kv_heads,
            capacity=of.capacity,
            bf16=int(of.kv_dtype == torch.bfloat16),
            keys=addresses.keys[self._layer],
            values=addresses.values[self._layer],
            tiled=addresses.tiled[self._layer],
            known=addresses.known[self._layer],
        )
        call.native.external_kv = ctypes.pointer(external_kv)
        chain = OpenChain(call, len(batch.wanted), count, prefetch, ids_C, model.logits_stride)
        chain.run(self.library, own, model, self._entry)
        return chain.passes(own_head.vocab_size, torch.empty(count * len(batch.wanted), 0))


def check_owner(sizes: checks.Sizes, owner: checks.Sizes, layer: int) -> None:
    """Check that one decoder can read the keys of another one's layer.

    Raises:
        ValueError: head width or dtype differ, or the layer does not exist.
    """
    checks.check_within("layer", layer, 0, owner.num_layers - 1)
    checks.check_within("kv_heads", sizes.kv_heads, 1, owner.kv_heads)
    if (sizes.head_dim, sizes.dtype) != (owner.head_dim, owner.dtype):
        raise ValueError(
            f"head_dim={sizes.head_dim}, {sizes.dtype}: the decoder that owns the keys has {owner.head_dim}, "
            f"{owner.dtype}"
        )


def check_prefixes(prefixes: Sequence[tuple[int, int]], of: KVCache, num_segments: int) -> None:
    """Check the slot and length of another decoder's cache for each segment.

    Raises:
        ValueError: the slot has fewer committed rows, or the cache stores codes.
    """
    if len(prefixes) != num_segments or of.coded:
        raise ValueError(f"{len(prefixes)} of {num_segments} segments have a prefix of a cache, coded: {of.coded}")
    for slot, length in prefixes:
        checks.check_within("prefix.slot", slot, 0, of.num_slots - 1)
        checks.check_within("prefix.length", length, 0, of.lengths[slot])
