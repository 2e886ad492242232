"""The matrix unit: products have the bits of its definition, for every number of rows.

Where the processor has none, its instructions are computed in C; where it has one, both are tested.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from foretoken.forward.switch import variant_wanted
from foretoken.native import build, selftest, variants
from foretoken.native.packing import TiledLinear, packed_of
from helpers.compiled import compiled

COMPILER = variants.compiler_command()
ABLE = {each.name: each for each in variants.of_this_machine()}

pytestmark = pytest.mark.skipif(
    COMPILER is None or "avx512-bf16" not in ABLE or variant_wanted() is not None,
    reason="this processor lacks AVX-512 with bfloat16, or another kind is asked for, or there is no compiler",
)


def decoder(*options: str) -> ctypes.CDLL:
    assert COMPILER is not None
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), "-O0", "-DMOST_CODED=4", "-shared"]
    return build._loaded(
        compiled(variants.HERE / "decoder.c", COMPILER, [*flags, *ABLE["avx512-bf16"].options, *options])
    )


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    """With it, in software where the processor has none, and what the same processor does without."""
    found = build.library()
    assert found is not None
    with_unit = found if "amx" in ABLE else decoder("-include", "matrix_unit_in_software.h")
    without = decoder() if "amx" in ABLE else found
    return {"amx": with_unit, "avx512-bf16": without}


def defined(x_TK: Tensor, w_OK: Tensor) -> Tensor:
    """Of each 32 inputs the even ones and the odd ones are summed apart, in ascending order, in float32."""
    sums_TO = torch.zeros(len(x_TK), len(w_OK))
    for cut in range(0, x_TK.shape[1], 32):
        halves = torch.zeros(2, len(x_TK), len(w_OK))
        for i in range(cut, min(cut + 32, x_TK.shape[1])):
            halves[i % 2] += x_TK[:, i, None].float() * w_OK[:, i].float()  # exact: one rounding, that of the sum
        sums_TO += halves[0] + halves[1]
    return sums_TO


@pytest.mark.parametrize("inputs", [32, 96, 112, 16])
def test_a_product_has_the_bits_of_its_definition(libraries: dict[str, ctypes.CDLL], inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    w_OK = torch.randn(7 * 16, inputs, generator=generator).bfloat16()
    bias_O = torch.randn(7 * 16, generator=generator).bfloat16()
    x_TK = torch.randn(70, inputs, generator=generator).bfloat16()
    expected = defined(x_TK, w_OK)
    linear, biased = (
        TiledLinear(packed_of([w_OK], torch.bfloat16, libraries["amx"]), 7 * 16, bias, libraries["amx"])
        for bias in (None, bias_O)
    )
    for count in (1, 5, 16, 17, 32, 33, 70):
        assert torch.equal(linear(x_TK[:count]), expected[:count].bfloat16())
        assert torch.equal(biased(x_TK[:count]), (expected[:count] + bias_O.float()).bfloat16())


def test_rows_do_not_depend_on_their_neighbours(libraries: dict[str, ctypes.CDLL]) -> None:
    assert {name: selftest.failure(library) for name, library in libraries.items()} == dict.fromkeys(libraries)


def test_the_kinds_differ_in_bfloat16_and_not_in_codes(libraries: dict[str, ctypes.CDLL]) -> None:
    """So the tests above are of two ways to compute, and a quantised model is the same on both."""
    for dtype, scheme, same in ((torch.bfloat16, None, False), (torch.float32, (8, None), True)):
        layout = selftest._layout(dtype, scheme)
        rows = [
            selftest._rows(selftest.NativeDecoder(layout, library), (40, 222), threads=1, kv_dtype=None)
            for library in libraries.values()
        ]
        assert torch.equal(*rows) == same
