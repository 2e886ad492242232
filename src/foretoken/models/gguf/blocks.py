"""How a GGUF file stores a tensor, and how its bytes decode to numbers.

A row is cut into blocks of 32 or 256 elements, each with scales of its own. d and m are float16, sc and mn whole
numbers, and every product below is exact in float32, so that a :class:`QuantisedWeight` holds the very values that
ggml's ``dequantize_row_*`` (ggml-quants.c) gives:

    kind   block  bytes   element                   groups of
    Q4_0      32     18   d (q - 8)                 32
    Q4_1      32     20   d q + m                   32
    Q5_0      32     22   d (q - 16)                32   (8 bits here)
    Q5_1      32     24   d q + m                   32   (8 bits here)
    Q8_0      32     34   d q                       32
    IQ4_NL    32     18   d v[q]                    32   v: a table of 16 whole numbers
    MXFP4     32     17   2^(e - 128) v[q]          32   e: a byte
    Q2_K     256     84   (d sc) q - (m mn)         16   sc, mn of 4 bits
    Q3_K     256    110   (d sc) (q - 4)            16   sc of 6 bits, signed
    Q4_K     256    144   (d sc) q - (m mn)         32   sc, mn of 6 bits
    Q5_K     256    176   (d sc) q - (m mn)         32   sc, mn of 6 bits
    Q6_K     256    210   (d sc) (q - 32)           16   sc of 8 bits
    IQ4_XS   256    136   (d (sc - 32)) v[q]        32   sc of 6 bits

F32, F16 and BF16 are stored as they are. Weights stay in their blocks (:class:`StoredWeight`); where they are decoded,
codes have 4 or 8 bits.

Letters: B blocks, O rows, K elements of a row.
"""

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.stored_weight import TABLES, BlockKind, Parts, StoredWeight
from foretoken.models.gguf.container import Entry, GGUFFile

PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NAMES = {  # ggml's, for messages
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def kind_named(name: str) -> BlockKind:
    """A kind that is read, by ggml's name."""
    return next(each for each in _KINDS.values() if each.name == name)


def check_places(file: GGUFFile) -> None:
    """Every tensor lies right after the one before it, as in every file that ggml reads.

    This detects a wrong kind, shape or offset, which would turn the bytes into other numbers. After a tensor of an
    unsupported kind, which has an unknown size, nothing is checked.

    Raises:
        ModelError: one lies elsewhere, or the file is cut short.
    """
    expected, last = file.begin, "its header"
    for entry in file.entries.values():
        if entry.start != expected:
            raise ModelError(
                f"model '{file.path}' is no whole GGUF file: its tensor {entry.name!r:.60} begins at byte "
                f"{entry.start}, and those before it end at {expected}"
            )
        size = _bytes(entry)
        if size is None:
            return
        file.check_end(entry, size)
        expected += -(-size // file.alignment) * file.alignment
        last = f"its last tensor {entry.name!r:.60}"
    if file.anything_from(expected):
        raise ModelError(
            f"model '{file.path}' is no whole GGUF file: there is something after {last}, which ends at byte {expected}"
        )


def _bytes(entry: Entry) -> int | None:
    """Of a tensor; None: its kind is not read, or cannot have its shape."""
    dtype, kind = PLAIN.get(entry.kind), _KINDS.get(entry.kind)
    if dtype is not None:
        return entry.count * dtype.itemsize
    return None if kind is None or entry.count % kind.elements else entry.count // kind.elements * kind.bytes


def packed_bytes(entry: Entry, dtype: torch.dtype) -> int:
    """Of a tensor, once it is packed; one that is not quantised is in ``dtype``."""
    kind = _KINDS.get(entry.kind)
    return entry.count * dtype.itemsize if kind is None else kind.packed_bytes(entry.count)


def dense(file: GGUFFile, entry: Entry) -> Tensor:
    """A copy of a tensor; float32 if the file has it quantised.

    Raises:
        ModelError: it is of a kind that is not read, or holds values that are not finite, or the file is cut short.
    """
    dtype = PLAIN.get(entry.kind)
    if dtype is None:
        return quantised(file, entry).dense()
    found = file.bytes_of(entry, entry.count * dtype.itemsize).clone().view(dtype).view(entry.shape)
    if not found.isfinite().all():
        raise ModelError(f"model '{file.path}': its tensor '{entry.name}' holds values that are not finite")
    return found


def quantised(file: GGUFFile, entry: Entry) -> StoredWeight:
    """A matrix of blocks, in the mapped file.

    Raises:
        ModelError: it is of a kind that is not read, is no matrix of whole blocks, or holds scales that are not
            finite, or the file is cut short.
    """
    kind = _KINDS.get(entry.kind)
    if kind is None:
        stored = _NAMES.get(entry.kind, f"number {entry.kind}")
        raise ModelError(
            f"model '{file.path}': its tensor '{entry.name}' is of kind {stored}, which is not read: {READ}; "
            "convert the model to one of them (llama-quantize)"
        )
    if len(entry.shape) != 2 or entry.shape[1] % kind.elements:
        raise ModelError(
            f"model '{file.path}': its tensor '{entry.name}' of {_NAMES[entry.kind]} has the shape "
            f"{list(entry.shape)}: a matrix with rows of whole blocks of {kind.elements} is needed"
        )
    outputs, _ = entry.shape
    size = entry.count // kind.elements * kind.bytes
    return StoredWeight(file.bytes_of(entry, size).view(outputs, -1), kind, entry.name)


def _halves(blocks: Tensor, begin: int, count: int = 1) -> Tensor:
    """float16 numbers of every block, as float32 [B, count]."""
    return blocks[:, begin : begin + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2, n]: all low halves, then all high ones."""
    return torch.stack([packed & 15, packed >> 4], dim=-2)


def _q4_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 2:]).to(torch.int8) - 8
    return codes, _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _five(blocks: Tensor, begin: int) -> Tensor:
    """Codes of 5 bits, int8 from 0: four bytes with the fifth bits, bit i that of element i, then the halves."""
    fifth = (blocks[:, begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (_nibbles(blocks[:, begin + 4 :]).flatten(1) | fifth.flatten(1) << 4).to(torch.int8)


def _q5_0(blocks: Tensor) -> Parts:
    return _five(blocks, 2) - 16, _halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return _five(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of a block's eight groups."""
    d, m = _halves(blocks, 0), _halves(blocks, 2)
    # 12 bytes: six bits of sc 0..3, of mn 0..3, then four of sc and mn 4..7; their upper two lie above the others' six
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    sc = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=1)
    mn = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=1)
    return d * sc, -(m * mn)


def _nibbles_k(packed: Tensor) -> Tensor:
    """[B, 128] -> [B, 8, 32]: of 32 bytes, the low halves are a group, and the high ones the next."""
    return _nibbles(packed.view(-1, 4, 32)).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Parts:
    return _nibbles_k(blocks[:, 16:]), *_scales_k(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    return (_nibbles_k(blocks[:, 48:]) | _bits_k(blocks[:, 16:48]) << 4).to(torch.int8), *_scales_k(blocks)


def _pairs_k(packed: Tensor) -> Tensor:
    """[B, 64] -> [B, 2, 128]: of 32 bytes, bits 2 g and 2 g + 1 are group g of 128 elements."""
    return ((packed.view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3).flatten(2)


def _bits_k(packed: Tensor) -> Tensor:
    """[B, 32] -> [B, 8, 32]: bit g of a byte is that of group g."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1


def _q2_k(blocks: Tensor) -> Parts:
    sc, mn = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _pairs_k(blocks[:, 16:80]), _halves(blocks, 80) * sc, -(_halves(blocks, 82) * mn)


def _q3_k(blocks: Tensor) -> Parts:
    four = _nibbles(blocks[:, 96:104]).flatten(1)
    two = (blocks[:, None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    sc = (four | two.flatten(1) << 4).to(torch.int8) - 32
    third = _bits_k(blocks[:, :32]).view(-1, 2, 128)
    codes = (_pairs_k(blocks[:, 32:96]) | third << 2).to(torch.int8) - 4
    return codes, _halves(blocks, 108) * sc, None


def _q6_k(blocks: Tensor) -> Parts:
    four = _nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(2)  # two halves of 128 elements
    codes = (four | _pairs_k(blocks[:, 128:192]) << 4).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return codes, _halves(blocks, 208) * scales, None


def _iq4_nl(blocks: Tensor) -> Parts:
    return TABLES["iq4"][_nibbles(blocks[:, 2:]).int()], _halves(blocks, 0), None


def _mxfp4(blocks: Tensor) -> Parts:
    return TABLES["fp4"][_nibbles(blocks[:, 1:]).int()], torch.exp2(blocks[:, :1].double() - 128).float(), None


def _iq4_xs(blocks: Tensor) -> Parts:
    two = (blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3
    four = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1)
    sc = (four.flatten(1) | two.flatten(1) << 4).to(torch.int8) - 32
    return TABLES["iq4"][_nibbles(blocks[:, 8:].view(-1, 8, 16)).int()], _halves(blocks, 0) * sc, None


_KINDS = {
    2: BlockKind("Q4_0", 32, 18, 4, 32, True, (0,), _q4_0),
    3: BlockKind("Q4_1", 32, 20, 4, 32, False, (0, 2), _q4_1),
    6: BlockKind("Q5_0", 32, 22, 8, 32, True, (0,), _q5_0),
    7: BlockKind("Q5_1", 32, 24, 8, 32, True, (0, 2), _q5_1),
    8: BlockKind("Q8_0", 32, 34, 8, 32, True, (0,), _q8_0),
    20: BlockKind("IQ4_NL", 32, 18, 8, 32, True, (0,), _iq4_nl, "iq4"),
    39: BlockKind("MXFP4", 32, 17, 8, 32, True, (), _mxfp4, "fp4"),
    10: BlockKind("Q2_K", 256, 84, 4, 16, False, (80, 82), _q2_k),
    11: BlockKind("Q3_K", 256, 110, 4, 16, True, (108,), _q3_k),
    12: BlockKind("Q4_K", 256, 144, 4, 32, False, (0, 2), _q4_k),
    13: BlockKind("Q5_K", 256, 176, 8, 32, True, (0, 2), _q5_k),
    14: BlockKind("Q6_K", 256, 210, 8, 16, True, (208,), _q6_k),
    23: BlockKind("IQ4_XS", 256, 136, 8, 32, True, (0,), _iq4_xs, "iq4"),
}
READ = ", ".join([*(_NAMES[number] for number in _KINDS), "F32, F16 and BF16 are"])
