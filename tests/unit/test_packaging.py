"""What an ordinary install carries: the clone works because all files are there, a wheel only has what is declared."""

from __future__ import annotations

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
ROOT = Path(__file__).resolve().parents[2]


def test_every_file_beside_the_code_is_declared_as_package_data() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    carried = {
        file
        for package, patterns in declared.items()
        for pattern in patterns
        for file in (ROOT / "src" / package.replace(".", "/")).glob(pattern)
    }
    beside = {
        file
        for file in (ROOT / "src" / "foretoken").rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc", ".md") and "__pycache__" not in file.parts
    }
    assert {file.suffix for file in beside} >= {".c", ".h", ".jsonl", ".safetensors", ".typed"}
    assert beside - carried == set()
