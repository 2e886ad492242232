"""The sparse kernel on a GPU, against the gather path there and the definition."""

from __future__ import annotations

import pytest
import torch

from foretoken.forward.kernels import loading
from helpers.interpreted_kernel import CASES

pytest.importorskip("triton", reason="needs the package triton")
pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 means float32 here."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_gather_path_and_the_definition(name: str) -> None:
    case = CASES[name]
    assert loading.kernel("cuda") is not None
    found = case.run("cuda")
    assert found["launches"] == len(case.requests)
    assert found["gather"] < TOLERANCE[case.dtype]
    assert found["definition"] < TOLERANCE[case.dtype]
