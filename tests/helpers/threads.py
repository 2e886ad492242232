"""A fixture for modules with tiny products: importing it is using it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken.core import threads


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small are slower on two threads, much slower where other processes share the cores."""
    with threads.one_thread():
        yield
