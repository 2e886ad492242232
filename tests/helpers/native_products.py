"""Products with quantised weights: of the decoder itself, and of native_products.c compiled for other processors."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.forward.switch import native_wanted
from foretoken.native import build, variants
from foretoken.native.packing import TiledLinear
from foretoken.native.quantised import CodedTiles
from helpers.compiled import compiled

COMPILER = variants.compiler_command()
DRIVER = Path(__file__).with_name("native_products.c")
THIS = "this processor"  # the library that users run; nothing more is compiled for it
# options, what the processor must have, and how many registers a vector of 16 floats takes
OTHERS = {
    "AVX-512 without VNNI": (["-march=x86-64-v4"], ("avx512f", "avx512bw", "avx512dq", "avx512vl"), 1),
    "AVX2": (["-march=x86-64-v3"], ("avx2", "fma", "f16c"), 2),
    "portable": (["-march=x86-64"] if platform.machine() == "x86_64" else [], (), 4),
}
# the wide kind without integer dot products is rare, and takes a quarter of a minute to compile
KINDS = (
    THIS,
    pytest.param("AVX-512 without VNNI", marks=pytest.mark.full_product),
    *(each for each in OTHERS if each != "AVX-512 without VNNI"),
)


def library_of(kind: str) -> ctypes.CDLL:
    """The library of one of ``KINDS``; the test is skipped where this machine cannot have it."""
    if kind == THIS:
        found = build.library()
        if found is None:
            # one that fails its self-test is not used, and no reason to skip these tests
            assert COMPILER is None or not native_wanted(), "the native decoder cannot be used"
            pytest.skip("no native decoder on this machine")
        return found
    options, needed, parts = OTHERS[kind]
    if COMPILER is None:
        pytest.skip("no C compiler on this machine")
    if any(f" {each} " not in f" {variants.processor()} " for each in needed):
        pytest.skip(f"this processor lacks one of {', '.join(needed)}")
    # not optimised, and with fewer rows at a time: a quarter of the compiler's time
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), *options, "-O0", "-DMOST_CODED=4", "-shared"]
    found = ctypes.CDLL(str(compiled(DRIVER, COMPILER, flags)))
    found.product.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    found.product.restype = None
    assert found.parts() == parts
    return found


def native(library: ctypes.CDLL, packed: CodedTiles, x_TK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The product of a library: float32 [T, 16 tiles]."""
    if library is build.library():
        found: Tensor = TiledLinear(packed, 16 * len(packed), bias_O, library)(x_TK)
        return found
    out = torch.empty(len(x_TK), 16 * len(packed))
    bias = None if bias_O is None else bias_O.data_ptr()
    matrix = packed.described()
    library.product(
        ctypes.addressof(matrix), x_TK.data_ptr(), x_TK.shape[1], len(x_TK), len(packed), bias, out.data_ptr()
    )
    return out
