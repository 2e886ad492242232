"""The set-up that all tests share; see tests/helpers/session.py."""

import pytest

from helpers.session import (  # noqa: F401  (hooks and a fixture)
    _costs_of_steps_are_measured_once,
    _what_a_file_caches_goes_with_it,
    pytest_collection_finish,
    pytest_collection_modifyitems,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-variants", action="store_true", help="run full products of variants, not pairs of factors")
