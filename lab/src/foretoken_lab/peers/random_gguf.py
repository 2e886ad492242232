"""A GGUF file of a shape, its weights random blocks: to measure loading and speed at sizes that take long to download.

    python -m foretoken_lab.peers.random_gguf 7b Q4_K_M random-7b.gguf

It is written tensor by tensor. Blocks are random bits but for their float16 numbers, which are as large as a trained
model's; the texts mean nothing. A mixed kind has the kinds of tensors that llama.cpp's quantiser gives them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from foretoken import zoo
from foretoken.core.errors import ConfigError, ForetokenError, nearest
from foretoken.core.files import check_writable
from foretoken.models.gguf.blocks import kind_named
from foretoken_lab.models.shapes import SHAPES, Shape, config_of
from foretoken_lab.peers.gguf import add_metadata

KINDS = {  # of matrices, of every other layer's value and down projection, and of the head
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "Q4_1": ("Q4_1", "Q4_1", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q2_K": ("Q2_K", "Q3_K", "Q6_K"),
    "Q3_K_M": ("Q3_K", "Q5_K", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
}
_LARGER = ("attn_v.weight", "ffn_down.weight")  # of a mixed kind, in every other layer
_AT_ONCE = 1 << 26  # bytes that are drawn at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="one of " + ", ".join(SHAPES))
    parser.add_argument("kind", help="one of " + ", ".join(KINDS))
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    for value, known in ((options.shape, SHAPES), (options.kind, KINDS)):
        if value not in known:
            raise ConfigError(f"unknown '{value}': {nearest(value, known)}")
    check_writable(options.out, "out")
    print(f"{write(options.shape, options.kind, options.out) / 1e9:.2f} GB in {options.out}")


def write(name: str, kind: str, path: Path) -> int:
    """Write the file; returns its bytes."""
    import gguf
    from transformers import AutoTokenizer

    shape, plain = SHAPES[name], gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(str(path), "llama", use_temp_file=False)
    config, tokenizer = config_of(name, "float32", positions=8192), AutoTokenizer.from_pretrained(zoo.path("base"))
    add_metadata(writer, config, tokenizer, gguf)
    tensors = [(each, size, *_stored(each, size, kind)) for each, size in _sizes(shape)]
    for each, size, stored, num_bytes in tensors:
        raw = plain if stored is None else getattr(gguf.GGMLQuantizationType, stored)
        dimensions = size if stored is None else (size[0], num_bytes // size[0])
        writer.add_tensor_info(each, dimensions, np.dtype(np.float32 if stored is None else np.uint8), num_bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for _, size, stored, _num_bytes in tensors:
        if stored is None:
            writer.write_tensor_data(np.ones(size, np.float32))
        else:
            writer.write_tensor_data(_random(generator, size, stored))
    writer.close()
    return path.stat().st_size


def _sizes(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Each tensor's name and its shape, in the order of the file."""
    width, inner, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (shape.vocabulary, width))]
    for layer in range(shape.layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (inner, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, inner),
            "ffn_norm": (width,),
            "ffn_gate": (shape.mlp, width),
            "ffn_up": (shape.mlp, width),
            "ffn_down": (width, shape.mlp),
        }
        found += [(f"blk.{layer}.{part}.weight", size) for part, size in parts.items()]
    found.append(("output_norm.weight", (width,)))
    return found if shape.tied else [*found, ("output.weight", (shape.vocabulary, width))]


def _stored(name: str, size: tuple[int, ...], kind: str) -> tuple[str | None, int]:
    """Of which blocks a tensor is, None for float32, and its bytes."""
    if len(size) == 1:
        return None, 4 * size[0]
    most, larger, head = KINDS[kind]
    stored = most
    if name in ("token_embd.weight", "output.weight"):
        stored = head
    elif name.endswith(_LARGER) and int(name.split(".")[1]) % 2:
        stored = larger
    block = kind_named(stored)
    if size[1] % block.elements:
        raise ConfigError(f"{kind}: the rows of '{name}' have {size[1]} elements, no whole blocks of {block.elements}")
    return stored, size[0] * size[1] // block.elements * block.bytes


def _random(generator: np.random.Generator, size: tuple[int, ...], stored: str) -> Any:
    """uint8 [rows, bytes of a row]"""
    block = kind_named(stored)
    per_row = size[1] // block.elements
    data: Any = np.empty((size[0] * per_row, block.bytes), np.uint8)
    each = max(1, _AT_ONCE // block.bytes)
    largest = 2.0 ** (block.bits - 1) * (1 if block.elements == 32 else 32)  # a code, times a scale's whole number
    for begin in range(0, len(data), each):
        part = data[begin : begin + each]
        part[:] = np.frombuffer(generator.bytes(part.size), np.uint8).reshape(part.shape)
        for place in block.halves:
            halves = (0.02 / largest * generator.standard_normal(len(part))).astype(np.float16)
            part[:, place : place + 2] = halves[:, None].view(np.uint8)
    return data.reshape(size[0], -1)


if __name__ == "__main__":
    try:
        main()
    except ForetokenError as error:
        print(f"random_gguf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
