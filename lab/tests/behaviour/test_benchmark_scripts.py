"""The imports of the scripts of ``benchmarks/`` exist: the scripts themselves do not run at every change."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(LAB / "benchmarks").glob("*.py"), *(LAB / "src" / "foretoken_lab" / "peers").glob("[a-z]*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_its_imports_exist(script: Path) -> None:
    missing = [
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("foretoken", "foretoken_lab")
        for each in node.names
        if not _is_there(str(node.module), each.name)
    ]
    assert not missing


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_describes_it(script: Path) -> None:
    page = (LAB / "README.md").read_text(encoding="utf-8")
    assert f"`{script.name}`" in page or f"`foretoken_lab.peers.{script.stem}`" in page


def _is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
