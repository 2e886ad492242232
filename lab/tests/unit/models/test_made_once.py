"""A folder of the cache is made once, and whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from foretoken_lab.models.made_once import folder_made_once


def test_a_folder_is_made_once_and_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[Path] = []

    def write(folder: Path) -> None:
        made.append(folder)
        assert list(folder.iterdir()) == []
        assert not (tmp_path / "foretoken" / "sub" / "it").exists()
        (folder / "one").write_text("1")
        if len(made) == 1:
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        folder_made_once("sub/it", write)
    assert list((tmp_path / "foretoken" / "sub").iterdir()) == []
    for _ in range(2):
        place = folder_made_once("sub/it", write)
        assert place == tmp_path / "foretoken" / "sub" / "it"
        assert (place / "one").read_text() == "1"
        assert os.listdir(place.parent) == ["it"]
    assert len(made) == 2
    assert made[1].name == "it"


def test_a_folder_that_another_process_made_in_the_meantime_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def slower(folder: Path) -> None:
        other = tmp_path / "foretoken" / "it"
        other.mkdir()
        (other / "theirs").write_text("")

    assert os.listdir(folder_made_once("it", slower)) == ["theirs"]
    assert os.listdir(tmp_path / "foretoken") == ["it"]

    def in_the_way(folder: Path) -> None:
        (tmp_path / "foretoken" / "that").write_text("a file")

    with pytest.raises(OSError):  # noqa: PT011  what the system says of it
        folder_made_once("that", in_the_way)


def test_without_a_cache_of_the_user_the_folder_is_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "foretoken").write_text("in the way")
    place = folder_made_once("it", lambda folder: (folder / "one").write_text("1"))
    assert tmp_path not in place.parents
    assert place.parent.name.startswith("foretoken-")
    shutil.rmtree(place.parent)
