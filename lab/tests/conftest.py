"""The set-up that all tests share, and that the lab's entry points are there: its commands are found through them."""

import pytest

from foretoken.core import extensions
from helpers.session import (  # noqa: F401  (hooks and a fixture)
    _costs_of_steps_are_measured_once,
    _what_a_file_caches_goes_with_it,
    pytest_collection_finish,
    pytest_collection_modifyitems,
)

if not extensions.declared(extensions.COMMANDS):
    raise pytest.UsageError("the lab is not installed, so its commands are not found: pip install --no-deps -e ./lab")
