"""The Triton kernel of sparse attention, interpreted on the CPU, against the gather path and the definition."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from helpers.interpreted import compile_for_a_gpu, found_by
from helpers.interpreted_kernel import BUGS, CASES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton (extra 'dev', Linux)"
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


MORE = [name for name in CASES if name.startswith("drawn") and int(name.split()[1]) > 2]  # the first have all rules


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, Any]:
    return found_by(
        "interpreted_kernel", *(name for name in CASES if name not in MORE or request.config.getoption("all_variants"))
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full_product if name in MORE else ()) for name in CASES]
)
def test_the_kernel_equals_the_gather_path_and_the_definition(name: str, differences: dict[str, Any]) -> None:
    found, case = differences["sound"][name], CASES[name]
    assert found["launches"] == len(case.requests)
    assert found["gather"] < TOLERANCE[case.dtype]
    assert found["definition"] < TOLERANCE[case.dtype]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, differences: dict[str, Any]) -> None:
    assert differences["without a bug"]["definition"] < TOLERANCE["float32"]
    assert differences["bugs"][bug]["definition"] > 100 * TOLERANCE["float32"]


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foretoken.forward.kernels import block_attention as sparse_kernel

def compiled(kernel, pointers, constants):
    kinds = {**dict.fromkeys(kernel.arg_names, "i32"), "scale": "fp32", **pointers}
    kinds = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 80, 32)
    return triton.compile(ASTSource(kernel, kinds, values), target=target, options={"num_stages": 2})

pointers = {"blocks": "*i32", "starts": "*i32", "seen": "*i8", "part": "*fp32", "sums": "*fp32"}
constants = {"D": 128, "DV": 128, "SIZE": 64, "ROWS": 64, "COLUMNS": 64, "WIDTH": 128, "WIDTH_V": 128}
strides = {"q_d": 1, "k_d": 1, "v_d": 1}
built = compiled(sparse_kernel._attend_part, pointers | dict.fromkeys("qkv", "*bf16"), constants | strides)
assert "mma.sync" in built.asm["ptx"], "no tensor cores"
assert built.metadata.shared < 99 * 1024, built.metadata.shared
pointers = {"part": "*fp32", "sums": "*fp32", "out": "*bf16"}
compiled(sparse_kernel._merge, pointers, {"PARTS": 32, "DV": 128, "WIDTH_V": 128})
"""


def test_the_kernels_compile_for_a_gpu_on_a_machine_without_one(tmp_path: Path) -> None:
    """Compute capability 8.0, down to machine code: what the interpreter takes, the compiler may refuse."""
    compile_for_a_gpu(COMPILED, tmp_path)
