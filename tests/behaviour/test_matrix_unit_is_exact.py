"""The matrix unit, where there is one: products have the bits of its definition, for every number of rows."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from torch import Tensor

from foretoken.forward.switch import variant_wanted
from foretoken.native import build, selftest, variants
from foretoken.native.packing import TiledLinear, packed_of

COMPILER = variants.compiler_command()
ABLE = {each.name: each for each in variants.of_this_machine()}

pytestmark = pytest.mark.skipif(
    COMPILER is None or "amx" not in ABLE or variant_wanted() is not None,
    reason="no matrix unit on this machine, or another kind is asked for, or there is no compiler",
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """With it, and what the same processor does without."""
    assert COMPILER is not None
    with_unit = build.library()
    assert with_unit is not None
    target = tmp_path_factory.mktemp("kinds") / "decoder.so"
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), "-O1", "-DMOST_CODED=4"]
    source = variants.HERE / "decoder.c"
    command = [*COMPILER, *flags, *ABLE["avx512-bf16"].options, "-shared", str(source), "-lm", "-o", str(target)]
    subprocess.run(command, capture_output=True, check=True)
    return {"amx": with_unit, "avx512-bf16": build._loaded(target)}


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


def test_without_it_the_promise_is_kept_too(libraries: dict[str, ctypes.CDLL]) -> None:
    """With it, the self-test of the library that is used has said so."""
    assert selftest.failure(libraries["avx512-bf16"]) is None


def test_the_kinds_differ_in_bfloat16_and_not_in_codes(libraries: dict[str, ctypes.CDLL]) -> None:
    """So the tests above are of two ways to compute, and a quantised model is the same on both."""
    for dtype, scheme, same in ((torch.bfloat16, None, False), (torch.float32, (8, None), True)):
        layout = selftest._layout(dtype, scheme)
        rows = [
            selftest._rows(selftest.NativeDecoder(layout, library), (40, 222), threads=1, coded=False)
            for library in libraries.values()
        ]
        assert torch.equal(*rows) == same
