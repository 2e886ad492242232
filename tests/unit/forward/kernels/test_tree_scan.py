"""The Triton kernel of the tree scan, interpreted on the CPU, against the recurrence in float64."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from helpers.interpreted import compile_for_a_gpu, found_by

CLOSE = 5e-6

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton (extra 'dev', Linux)"
)


@lru_cache(maxsize=1)
def errors() -> dict[str, Any]:
    return found_by("interpreted_tree_scan")


def test_a_row_is_its_own_path() -> None:
    """Trees and chains, one tile and several, sizes that are no powers of two, heads that share k and q."""
    found = errors()["sound"]
    assert len(found) == 6
    for name, case in found.items():
        assert case["launches"] == 1, name
        assert case["error"] < CLOSE, name
        assert case["from_the_page"] < 2 * CLOSE, name  # helpers/stree_page.py


def test_planted_bugs_are_noticed() -> None:
    found = errors()["bugs"]
    assert len(found) == 4
    assert all(error > 1e-3 for error in found.values()), found


def test_sums_without_their_low_half_lose_digits() -> None:
    assert errors()["rounded"] > 10 * CLOSE


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foretoken.forward.kernels import tree_scan

kernel = tree_scan._scan
constants = {"N": 128, "P": 64, "ROWS": 32, "WIDTH_N": 128, "WIDTH_P": 32}
kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(["state", "k", "q", "u", "high", "low", "out"], "*fp32")
kinds |= {"seen": "*i8", **dict.fromkeys(constants, "constexpr")}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
built = triton.compile(ASTSource(kernel, kinds, values), target=GPUTarget("cuda", 80, 32))
assert built.metadata.shared < 99 * 1024, built.metadata.shared
"""


def test_the_kernel_compiles_for_a_gpu_on_a_machine_without_one(tmp_path: Path) -> None:
    compile_for_a_gpu(COMPILED, tmp_path)
