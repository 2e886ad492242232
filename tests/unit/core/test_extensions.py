"""What other distributions declare: found by group and name, imported when it is used, and absent without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from foretoken.core import extensions


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = [EntryPoint("z", "colorsys:rgb_to_hsv", "a group"), EntryPoint("a", "colorsys:hsv_to_rgb", "a group")]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points if group == "a group" else [])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    extensions.declared.cache_clear()
    yield
    extensions.declared.cache_clear()


@pytest.mark.usefixtures("declared")
def test_names_are_known_before_anything_is_imported() -> None:
    assert list(extensions.declared("a group")) == ["a", "z"]
    assert "colorsys" not in sys.modules
    found = extensions.loaded("a group", "a")
    assert found is sys.modules["colorsys"].hsv_to_rgb


@pytest.mark.usefixtures("declared")
def test_an_undeclared_extension_is_none() -> None:
    assert extensions.loaded("a group", "b") is None
    assert extensions.loaded("another", "a") is None
    assert extensions.declared("another") == {}
