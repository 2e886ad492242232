"""The tree scan's kernel on a GPU, against the recurrence in float64."""

from __future__ import annotations

import pytest

from foretoken.forward.kernels import loading

pytest.importorskip("triton", reason="needs the package triton")
pytestmark = pytest.mark.gpu


def test_a_row_is_its_own_path() -> None:
    from helpers.interpreted_tree_scan import CASES

    kernel = loading.kernel("cuda", "tree_scan")
    for name, case in CASES.items():
        found = case.run(kernel, "cuda")
        assert found["launches"] == 1, name
        assert found["error"] < 5e-6, name
