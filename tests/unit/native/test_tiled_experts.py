"""Rows that share an expert read its weights once: the bytes that products of a mixture are given are counted."""

from __future__ import annotations

import ctypes

import pytest
import torch

from foretoken.native import variants
from helpers.compiled import compiled
from helpers.native_products import DRIVER

EXPERTS = 16
BYTES = 16 * 16 * 64 + 4 * 16 * 128  # of one expert: gate and other factor in 16 tiles, the way back in 4


@pytest.fixture(scope="module")
def mixture() -> ctypes.CDLL:
    compiler = variants.compiler_command()
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), "-march=native", "-O0", "-DMOST_CODED=4", "-shared"]
    found = ctypes.CDLL(str(compiled(DRIVER.with_name("native_mixture.c"), compiler, flags)))
    found.bytes_of_mixture.argtypes = [ctypes.c_void_p] + [ctypes.c_int64] * 3
    found.bytes_of_mixture.restype = ctypes.c_int64
    return found


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_an_expert_is_read_once_however_many_rows_chose_it(
    mixture: ctypes.CDLL, rows: int, chosen: int, threads: int
) -> None:
    scores_RE = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows + chosen))
    distinct = len(scores_RE.topk(chosen).indices.unique())
    assert distinct < rows * chosen or rows < 8
    assert mixture.bytes_of_mixture(scores_RE.data_ptr(), rows, chosen, threads) == distinct * BYTES
