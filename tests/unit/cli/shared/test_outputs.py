"""Files that commands write: what cannot be written is known before the work, and links stay links."""

from __future__ import annotations

import json
import math
import sys

import pytest

from foretoken.cli.shared.outputs import check_outputs, check_pictures, write_json, write_text
from foretoken.core.errors import ConfigError


def test_two_options_may_not_name_one_place(tmp_path):
    place = tmp_path / "a.json"
    check_outputs({"--out": place, "--csv": None, "--report": tmp_path / "b.html"})
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(ConfigError, match="--out and --csv both name"):
        check_outputs({"--out": place, "--csv": tmp_path / "link"})
    with pytest.raises(ConfigError, match="there is no folder"):
        check_outputs({"--out": tmp_path / "no" / "a.json"})
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_link_is_written_through(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a.json")
    write_json(tmp_path / "link", {"value": math.nan})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "there" / "a.json").read_text()) == {"value": None}
    write_text(tmp_path / "link", "two")
    assert (tmp_path / "there" / "a.json").read_text() == "two"
    assert capsys.readouterr().err.splitlines() == [f"wrote {tmp_path / 'link'}"] * 2


def test_pictures_need_what_draws_them(monkeypatch):
    check_pictures("--report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--report needs matplotlib: pip install 'foretoken\[report\]'"):
        check_pictures("--report")
