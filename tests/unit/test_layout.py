"""A test file is found by the name of the module that it tests, or says in its own name which behaviour it tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = {"tests": "src/foretoken", "lab/tests": "lab/src/foretoken_lab"}
EXCEPTIONS = {"tests/unit/test_layout.py"}  # it tests the tree of tests


def misplaced(tests: Path, package: Path) -> list[Path]:
    """Files under ``unit/`` without a module of the same path, and files under ``behaviour/`` that lie in a folder."""
    unit, behaviour = tests / "unit", tests / "behaviour"
    found = [
        file
        for file in unit.rglob("test_*.py")
        if not (package / file.relative_to(unit).with_name(file.name.removeprefix("test_"))).is_file()
    ]
    return found + [file for file in behaviour.rglob("test_*.py") if file.parent != behaviour]


@pytest.mark.parametrize(("tests", "package"), TREES.items(), ids=TREES)
def test_unit_tests_mirror_modules_and_behaviour_is_flat(tests: str, package: str) -> None:
    assert any((ROOT / tests / "unit").rglob("test_*.py"))
    names = {file.relative_to(ROOT).as_posix() for file in misplaced(ROOT / tests, ROOT / package)}
    assert names - EXCEPTIONS == set()


def test_a_misplaced_file_is_found(tmp_path: Path) -> None:
    placed = ["unit/core/test_tree.py", "behaviour/test_seeds_repeat.py"]
    wrong = ["unit/core/test_seeds.py", "unit/test_tree.py", "behaviour/core/test_tree.py"]
    for name in ["package/core/tree.py", *(f"tests/{each}" for each in [*placed, *wrong])]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = misplaced(tmp_path / "tests", tmp_path / "package")
    assert sorted(found) == sorted(tmp_path / "tests" / name for name in wrong)
