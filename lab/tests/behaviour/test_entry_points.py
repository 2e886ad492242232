"""What the lab declares is what foretoken looks for, and each name is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core import extensions
from foretoken.core.extensions import COMMANDS, CORPORA, FEATURES, MIXTURES, MODELS, QUESTIONS, REPORTS, SUITES

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
GROUPS = PROJECT["entry-points"]


def test_its_groups_are_those_that_foretoken_looks_for() -> None:
    assert set(GROUPS) == {COMMANDS, MODELS, SUITES, REPORTS, QUESTIONS, FEATURES, CORPORA, MIXTURES}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_declared_entry_points_are_installed(group: str, name: str) -> None:
    assert extensions.declared(group)[name].value == GROUPS[group][name], "install the lab again: pip install ./lab"
    assert extensions.loaded(group, name) is not None
