"""Foretoken as it is installed alone: no other distribution declares anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken.core import extensions


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the lab, whether it is installed or not."""
    extensions.declared.cache_clear()
    monkeypatch.setattr(extensions, "entry_points", lambda group: [])
    yield
    extensions.declared.cache_clear()
