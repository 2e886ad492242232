"""Files are written whole, and a place that cannot be written is known before the work."""

from __future__ import annotations

import os

import pytest

from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable, write_whole


def test_files_are_whole_and_checked_before(tmp_path):
    path = check_writable(tmp_path / "out.json", "--json")
    assert list(tmp_path.iterdir()) == []
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["out.json"]
    assert path.stat().st_mode & 0o200
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable(tmp_path / "no" / "out.json", "--json")
    with pytest.raises(ConfigError, match="this is a folder"):
        check_writable(tmp_path, "--json")
