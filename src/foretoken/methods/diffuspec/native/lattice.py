"""A native decoder over blocks of masks: one native call reads the context rows and fills all slots.

Letters: T rows to read, A requests, k slots, F width of a row's states, W width, L layers, G key/value heads.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.native import checks, structs, team
from foretoken.native.call import Ranked
from foretoken.native.declared import Header, function
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Layout, Projection
from foretoken.native.packing import described

_HEADER = Header(Path(__file__).with_name("lattice.h"))


class _Filler(ctypes.Structure):
    _fields_ = _HEADER.fields("Filler", structs.Matrix)


class _Fill(ctypes.Structure):
    _fields_ = _HEADER.fields("Fill", structs.Call)


@dataclass(frozen=True, slots=True)
class Filling:
    """Weights outside the layers.

    Attributes:
        embedding_VW: token embedding.
        context: product from a row's normed states to keys, then values, of all layers.
        enter: product from a root's embedding and the normed states before the root to the input of every slot.
        masks_kW: added to that input, a row for each slot.
        key_gains_Ld: gains of the key norms; None: no key norms.
        depths: number of depths in a row of states, concatenated.
    """

    embedding_VW: Tensor
    context: Projection
    enter: Projection
    masks_kW: Tensor
    key_gains_Ld: Tensor | None
    depths: int


class Block(NamedTuple):
    """One request's block.

    Attributes:
        slot: of the cache; holds the request's committed rows up to the first row to read.
        root: the token before the block.
        read: number of the request's rows among the states, in the order of the blocks.
        last_1F: the normed states of the row before the root; None: the last row to read.
        wanted: number of leading slots to score.
    """

    slot: int
    root: int
    read: int
    last_1F: Tensor | None
    wanted: int


class LatticeDecoder(NativeDecoder):
    """The layers of a block network.

    Args:
        layout: layout of the layers, without an embedding, and of the LM head.
        filling: weights outside the layers.
        library: compiled decoder.c.
    """

    def __init__(self, layout: Layout, filling: Filling, library: ctypes.CDLL) -> None:
        super().__init__(layout, library)
        slots, width = filling.masks_kW.shape
        states = filling.context.weight_OK.shape[1]
        columns = 2 * layout.num_blocks * layout.kv_heads * layout.head_dim
        if (
            width != layout.width
            or filling.enter.weight_OK.shape[1] != width + states
            or filling.enter.outputs != width
        ):
            raise ValueError(
                f"a block of width {width} with {states} states does not fit layers of width {layout.width}"
            )
        if filling.context.outputs != columns or states % filling.depths or (states // filling.depths) % 16:
            raise ValueError(
                f"a context of {filling.context.outputs} columns from {filling.depths} depths does not fit"
            )
        self._slots, self._states = slots, states
        embedding_VW = filling.embedding_VW.detach().to(self._dtype).contiguous()
        self._roots = len(embedding_VW)
        context, enter = self._packed(filling.context), self._packed(filling.enter)
        self._keep.append(embedding_VW)
        self._filler = _Filler(
            context=described(context),
            enter=described(enter),
            embedding=embedding_VW.data_ptr(),
            masks=self._floats(filling.masks_kW),
            key_gains=None if filling.key_gains_Ld is None else self._floats(filling.key_gains_Ld),
            depths=filling.depths,
            target_width=states // filling.depths,
            slots=slots,
        )

    def fill(
        self, cache: KVCache, states_TF: Tensor, blocks: Sequence[Block], *, top: int
    ) -> tuple[Ranked, list[Tensor]]:
        """Read rows, commit them, and fill the blocks after them.

        Args:
            cache: of the context rows.
            states_TF: float32, states of the rows to read, block by block.
            blocks: one for each request.
            top: number of tokens to rank at each requested slot.
        Returns:
            the requested slots, block by block, and for each block the normed states before its root, [1, F].
        Raises:
            InputError: a root is not in the embedding.
            ValueError: an argument does not fit this decoder; see checks.py.
            MemoryError: out of memory.
        """
        read, k = sum(block.read for block in blocks), self._slots
        if states_TF.shape != (read, self._states) or states_TF.dtype != torch.float32:
            raise ValueError(f"{list(states_TF.shape)} states of {states_TF.dtype} for {read} rows of {self._states}")
        odd = next((block.root for block in blocks if not 0 <= block.root < self._roots), None)
        if odd is not None:
            raise InputError(f"token {odd} is not in the model's embedding, which has {self._roots} entries")
        batch, slot, position = PackedBatch(), array("q"), array("q")
        wanted: list[int] = []
        for block in blocks:
            begin = cache.lengths[block.slot]
            cache.reserve(block.slot, block.read + k)
            slot.extend([block.slot] * block.read)
            position.extend(range(begin, begin + block.read))
            wanted += range(len(batch), len(batch) + min(block.wanted, k))
            cache.commit(block.slot, range(block.read))
            batch.add_block(block.slot, begin + block.read, [block.root] * k, first=1)
        batch.wanted = wanted
        width, model = self._model.width, self._model
        columns = 2 * model.num_layers * model.kv_heads * model.head_dim
        fused_TF = torch.empty(read, self._states)
        rows = (
            len(blocks) * (1 + k) * width
            + read * columns
            + max(read * self._states, len(blocks) * (width + self._states))
        )
        room = torch.empty(rows)
        entered = room.data_ptr()
        entering = entered + 4 * len(blocks) * width
        product = entering + 4 * len(blocks) * k * width
        span = Span(0, model.num_layers, torch.empty(len(batch), width))
        checks.check(self.sizes, batch, NativePlan(cache), span)
        checks.check_head(self.head.packed, self.head.packed, self.head.vocab_size, top)
        own = team.current()
        call = self._open(batch, cache, span, model, top=top, threads=own.threads)
        lasts, end = [], 0
        for block in blocks:
            end += block.read
            lasts.append(fused_TF[end - 1 : end] if block.last_1F is None else block.last_1F)
        pointers = (structs.P * len(blocks))(*(each.data_ptr() for each in lasts))
        states_TF = states_TF.contiguous()
        roots = array("i", [block.root for block in blocks])
        fill = _Fill(
            call=ctypes.pointer(call.native),
            rows=read,
            requests=len(blocks),
            states=states_TF.data_ptr(),
            slot=slot.buffer_info()[0],
            position=position.buffer_info()[0],
            roots=roots.buffer_info()[0],
            lasts=ctypes.addressof(pointers),
            fused=fused_TF.data_ptr(),
            product=product,
            entered=entered,
            entering=entering,
            elements=product + 4 * read * columns,
        )
        handle = own.handle(self.library)  # keeps the object alive during the call
        run = function(self.library, "foretoken_fill", *[structs.P] * 4)
        if run(handle.address, ctypes.addressof(model), ctypes.addressof(self._filler), ctypes.addressof(fill)):
            raise MemoryError(f"there is no memory for {len(blocks)} blocks after {read} rows")
        return call.ranked(self.head.vocab_size, {}), [each.clone() for each in lasts]
