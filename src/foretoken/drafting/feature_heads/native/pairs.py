"""The native decoder of draft networks over pairs: a feature, and the token after it (chain.h).

    stacked         the feature enters, the token's part is added to queries, keys and values of the first layer
    concatenated    a product of the feature, plus the token's part, enters

Several passes of a chain are one native call: a row's best token, or one drawn, and the row's own output are the pair
that its next pass reads (chains.py). All levels of a tree are one native call (tree.h), which returns the tree.

Letters: T packed rows, M wanted rows, W width, O columns of a token's part, V tokens.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.native.chains import Entry, OpenChain, Pass, Prefetch
from foretoken.drafting.feature_heads.native.checks import Extent, check_chain, check_pairing, check_trees
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.native import checks, structs, team
from foretoken.native.declared import Header, function
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Head, Layout, Projection
from foretoken.native.packing import described

_HEADER = Header(Path(__file__).with_name("tree.h"))
_PIECE = 1024  # tokens of the table that are computed at once


class Growth(ctypes.Structure):
    """One tree."""

    _fields_ = _HEADER.fields("Growth")


class Trees(ctypes.Structure):
    """Trees over pairs."""

    _fields_ = _HEADER.fields("Trees", structs.Call, Growth)


@dataclass(frozen=True, slots=True)
class Pairing:
    """How pairs enter the first layer; see description.py.

    Attributes:
        embedding_VW: of the tokens.
        token: from an embedding to its part, without a bias.
        token_norm_W: gain of a norm before it, or None.
        feature: product of the feature, to which the part is added; None: the feature enters, the part is added later.
        feature_norm_W: gain of a norm of a feature that enters without a product, or None.
        recycled_norm_W: gain of the norm between a row's output and the next feature, or None.
        final_norm: False if the LM head reads a row's output as it is.
        table_bytes: of a table of all parts, at most; beyond it every part is computed when it is needed.
    """

    embedding_VW: Tensor
    token: Projection
    token_norm_W: Tensor | None = None
    feature: Projection | None = None
    feature_norm_W: Tensor | None = None
    recycled_norm_W: Tensor | None = None
    final_norm: bool = True
    table_bytes: int = 0


class GrownTree(NamedTuple):
    """The best nodes of a tree, parents first, in the order in which they were met.

    Attributes:
        tokens, parents: of each; -1: it hangs on the root.
        shares: the probability that it is accepted if its parent is.
        damaged: whether a logit is NaN.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    shares: Sequence[float]
    damaged: bool


class PairDecoder(NativeDecoder):
    """A decoder over pairs.

    Args:
        layout: without an embedding.
        pairing: how pairs enter its first layer.
        library: compiled decoder.c.
    """

    def __init__(self, layout: Layout, pairing: Pairing, library: ctypes.CDLL) -> None:
        super().__init__(layout, library)
        self._columns, self._final_norm = pairing.token.outputs, pairing.final_norm
        embedding_VW = pairing.embedding_VW.detach().to(self._dtype).contiguous()
        token = self._packed(pairing.token)
        self._keep += [embedding_VW, token]
        self._entry = Entry(
            embedding=embedding_VW.data_ptr(),
            token=described(token),
            num_tokens=len(embedding_VW),
            columns=self._columns,
        )
        for name, gain in (
            ("token_norm", pairing.token_norm_W),
            ("before", pairing.feature_norm_W),
            ("behind", pairing.recycled_norm_W),
        ):
            if gain is not None:
                setattr(self._entry, name, self._floats(gain))
        if pairing.feature is not None:
            feature = self._packed(pairing.feature)
            self._keep.append(feature)
            self._entry.feature = described(feature)
            if pairing.feature.bias_O is not None:
                self._entry.bias = self._floats(pairing.feature.bias_O)
        check_pairing(self.sizes, self._model.qkv_stride, pairing.token, pairing.feature)
        if len(embedding_VW) * self._columns * 4 <= pairing.table_bytes:
            table_VO = torch.cat([self._parts(ids) for ids in torch.arange(len(embedding_VW)).split(_PIECE)])
            self._keep.append(table_VO)
            self._entry.table = table_VO.data_ptr()

    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        features_TW: Tensor,
        *,
        top: int,
        head: Head | None = None,
        ids_C: Tensor | None = None,
        prefetch: Sequence[Prefetch] = (),
    ) -> list[Pass]:
        """Read pairs; with ``prefetch`` the passes of a chain that are likely to be needed, in one native call.

        Args:
            batch: their tokens; the rows are written into the cache.
            features_TW: on the CPU.
            top: how many tokens of each wanted row to rank; with ``prefetch`` 1 at least.
            head: read in place of its own one, of the same width and dtype.
            ids_C: int32, the token of each of the head's columns; None: column i is token i.
            prefetch: one for each segment; its last row is the wanted one, and its slot is reserved for all passes.
        Returns:
            the first pass and those that were made after it; there may be fewer than were planned.
        Raises:
            InputError: a token is not in the embedding.
            ValueError: something does not fit this decoder; see checks.py.
            MemoryError: there is no memory for the first pass.
        """
        own_head, depth = self.head if head is None else head, self._model.num_layers
        span = Span(0, depth, features_TW, taps=(depth,), tap_rows=batch.wanted, final_norm=self._final_norm)
        checks.check(self.sizes, batch, NativePlan(cache), span)
        checks.check_head(self.head.packed, own_head.packed, own_head.vocab_size, top)
        check_chain(self.sizes, batch, cache, self._entry.num_tokens, own_head.vocab_size, ids_C, prefetch, top)
        rows, width = len(batch.tokens), self._model.width
        count = max((each.most for each in prefetch), default=1)
        model = self._model if head is None else self._with_head(head)
        own = team.current()
        call = self._open(batch, cache, span, model, top=top, threads=own.threads, forwards=count)
        scratch = torch.empty(rows * (2 * width + self._columns))
        chain = OpenChain(call, len(batch.wanted), count, prefetch, ids_C, model.logits_stride)
        chain.native.features = call.native.entering
        chain.native.entering = scratch.data_ptr()
        chain.native.elements = scratch.data_ptr() + 4 * rows * width
        chain.native.parts = scratch.data_ptr() + 8 * rows * width
        chain.run(self.library, own, model, self._entry)
        return chain.passes(own_head.vocab_size, call.tapped[0])

    def trees(
        self,
        batch: PackedBatch,
        cache: KVCache,
        features_TW: Tensor,
        *,
        extents: Sequence[Extent],
        width: int,
        top: int,
        head: Head | None = None,
        ids_C: Tensor | None = None,
    ) -> list[GrownTree]:
        """Read pairs, and grow a tree after the last one of every segment: EAGLE-2's, all levels in one native call.

        Args:
            batch, cache, features_TW, head, ids_C: as for :meth:`passes`.
            extents: one for each segment; its last row is the wanted one, and its slot is reserved for ``width`` rows
                of each level.
            width: nodes of a level that are expanded.
            top: children that a node gets, at most ``width``.
        Returns:
            a tree for each segment: the one that drafting/reranked_tree.py records and reranks level by level.
        Raises:
            InputError: a token is not in the embedding.
            ValueError: something does not fit this decoder; see checks.py.
            MemoryError: there is no memory for it.
        """
        own_head, depth = self.head if head is None else head, self._model.num_layers
        span = Span(0, depth, features_TW, taps=(depth,), tap_rows=batch.wanted, final_norm=self._final_norm)
        checks.check(self.sizes, batch, NativePlan(cache), span)
        checks.check_head(self.head.packed, own_head.packed, own_head.vocab_size, top)
        check_chain(self.sizes, batch, cache, self._entry.num_tokens, own_head.vocab_size, ids_C, (), top)
        check_trees(self.sizes, batch, cache, extents, width, top)
        model = self._model if head is None else self._with_head(head)
        own = team.current()
        forwards = max(
            width, *(each.deepest for each in extents)
        )  # results of a level, and positions beyond the batch's
        call = self._open(batch, cache, span, model, top=top, threads=own.threads, forwards=forwards)
        rows = max(len(batch.tokens), width * len(extents))
        scratch = torch.empty(rows * (3 * model.width + self._columns))
        place = scratch.data_ptr()
        growths, results = (Growth * len(extents))(), []
        for growth, extent in zip(growths, extents, strict=True):
            growth.most, growth.deepest, growth.least = extent
            nodes = (
                array("i", bytes(4 * extent.most)),
                array("i", bytes(4 * extent.most)),
                array("f", bytes(4 * extent.most)),
            )
            growth.tokens, growth.parents, growth.shares = (each.buffer_info()[0] for each in nodes)
            results.append(nodes)
        trees = Trees(
            first=ctypes.pointer(call.native),
            features=call.native.entering,
            entering=place,
            gathered=place + 4 * rows * model.width,
            elements=place + 8 * rows * model.width,
            parts=place + 12 * rows * model.width,
            ids=None if ids_C is None else ids_C.data_ptr(),
            width=width,
            drafts=growths,
        )
        handle = own.handle(self.library)  # held while the call runs
        grow = function(self.library, "foretoken_trees", *[structs.P] * 4)
        if grow(handle.address, ctypes.addressof(model), ctypes.addressof(self._entry), ctypes.addressof(trees)):
            raise MemoryError(f"there is no memory for {len(extents)} trees")
        return [
            GrownTree(tokens[: growth.count], parents[: growth.count], shares[: growth.count], bool(growth.odd))
            for growth, (tokens, parents, shares) in zip(growths, results, strict=True)
        ]

    def _parts(self, ids_T: Tensor) -> Tensor:
        """[T, O] of tokens."""
        ids, width = ids_T.to(torch.int32), self._model.width
        scratch, parts_TO = torch.empty(2 * len(ids) * width), torch.empty(len(ids), self._columns)
        own = team.current()
        handle = own.handle(self.library)
        parts = function(
            self.library, "foretoken_token_parts", *[structs.P] * 4, *[ctypes.c_int64] * 2, *[structs.P] * 3
        )
        if parts(
            handle.address,
            ctypes.addressof(self._model),
            ctypes.addressof(self._entry),
            ids.data_ptr(),
            len(ids),
            own.threads,
            scratch.data_ptr(),
            scratch.data_ptr() + 4 * len(ids) * width,
            parts_TO.data_ptr(),
        ):
            raise MemoryError("there is no memory for a table of tokens")
        return parts_TO
