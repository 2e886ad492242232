"""Packed weights in the cache folder: found again as they were, and left alone where they are not to be trusted."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.forward.quantised_weight import rounded
from foretoken.native import kept_tiles as module
from foretoken.native.kept_tiles import KeptTiles, kept_or_made, kept_tiles
from foretoken.native.quantised import CodedTiles, coded_tiles

Packed = Callable[..., list[CodedTiles]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FORETOKEN_KEPT_GB", raising=False)  # tests keep nothing elsewhere
    monkeypatch.setattr(module, "_WORTH", 0.0)
    return tmp_path / "foretoken"


@pytest.fixture
def packed() -> Packed:
    """The weights ``a`` and ``b``, packed by one load; the names of those that were made."""

    def load(key: str = "key", seed: int = 0) -> list[CodedTiles]:
        load.made = []  # type: ignore[attr-defined]

        def make(name: str, size: float) -> CodedTiles:
            load.made.append(name)  # type: ignore[attr-defined]
            weight_OK = size * torch.randn(77, 64, generator=torch.Generator().manual_seed(seed))
            return coded_tiles(rounded(weight_OK, 4, 32, name=name))

        kept = kept_tiles(key)
        assert kept is not None
        with kept.used():
            found = [kept_or_made([name], partial(make, name, size)) for name, size in (("a", 1.0), ("b", 1e-6))]
        kept.write()
        return found

    return load


def test_weights_are_found_as_they_were(folder: Path, packed: Packed) -> None:
    first = packed()
    assert packed.made == ["a", "b"]  # type: ignore[attr-defined]
    second = packed()
    assert packed.made == []  # type: ignore[attr-defined]
    for one, other in zip(first, second, strict=True):
        assert one.form == other.form
        assert torch.equal(one.data, other.data)
        assert other.data.data_ptr() % 64 == 0
    assert os.stat(next(folder.glob("packed-*"))).st_mode & 0o077 == 0


def test_another_checkpoint_build_or_processor_is_packed_by_itself(folder: Path, packed: Packed) -> None:
    packed("first", seed=1)
    found = packed("second", seed=2)
    assert packed.made == ["a", "b"]  # type: ignore[attr-defined]
    assert torch.equal(packed("second")[0].data, found[0].data)
    assert len(list(folder.glob("packed-*"))) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _cut_inside(path: Path) -> None:
    """Tiles are missing, and the index is whole."""
    content = path.read_bytes()
    path.write_bytes(content[4096:])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _changed_index(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)


def _of_another(path: Path) -> None:
    other = KeptTiles(path.parent, "another build", 1e9)
    other.add("a", coded_tiles(rounded(torch.ones(16, 32), 4, 32)), 1.0)
    other.write()
    os.replace(other._path, path)


@pytest.mark.parametrize("damage", [_cut, _cut_inside, _empty, _changed_index, _of_another])
def test_a_damaged_file_is_one_line_and_is_made_again(
    folder: Path, packed: Packed, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = packed()
    damage(next(folder.glob("packed-*")))
    caplog.clear()
    found = packed()
    assert packed.made == ["a", "b"]  # type: ignore[attr-defined]
    assert all(torch.equal(one.data, other.data) for one, other in zip(found, expected, strict=True))
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "are not used, and made again: it is" in line
    packed()
    assert packed.made == []  # type: ignore[attr-defined]


def test_a_file_of_another_user_is_not_read(
    folder: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed()
    own = os.getuid()
    monkeypatch.setattr(module, "own_cache_folder", lambda: folder)
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    packed()
    assert packed.made == ["a", "b"]  # type: ignore[attr-defined]
    assert "it belongs to another user" in caplog.text


def test_a_full_disk_is_one_line(
    folder: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    packed()
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "are not kept" in line
    assert "No space left on device" in line
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("what", ["a file in its place", "a link"])
def test_without_a_folder_of_ones_own_nothing_is_kept(
    tmp_path: Path, folder: Path, packed: Packed, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A folder that cannot be written to counts as none, too."""
    (tmp_path / "elsewhere").mkdir()
    if what == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    packed()
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "there is no cache folder that only this user can write to" in line
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_used_longest_ago_leave_first(folder: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    packed("first")
    (first,) = folder.glob("packed-*")
    os.utime(first, (1, 1))
    packed("second")
    (second,) = set(folder.glob("packed-*")) - {first}
    packed("first")  # it is used again
    os.utime(second, (2, 2))
    monkeypatch.setenv("FORETOKEN_KEPT_GB", str(2.5 * first.stat().st_size / 1e9))
    packed("third")
    assert first.is_file()
    assert not second.exists()


def test_what_takes_no_time_or_more_than_the_bound_is_not_kept(
    folder: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETOKEN_KEPT_GB", "1e-6")
    packed()
    monkeypatch.delenv("FORETOKEN_KEPT_GB")
    monkeypatch.setattr(module, "_WORTH", 3600.0)
    packed()
    assert list(folder.glob("*packed-*")) == []


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_KEPT_GB", "0")
    assert kept_tiles("key") is None
    monkeypatch.setenv("FORETOKEN_KEPT_GB", "much")
    with pytest.raises(ConfigError, match="FORETOKEN_KEPT_GB='much': give the GB"):
        kept_tiles("key")
