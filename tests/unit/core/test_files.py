"""Files are written whole, and a place that cannot be written is known before the work."""

from __future__ import annotations

import os
import stat
import tempfile

import pytest

from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.core.files import check_readable, check_writable, own_cache_folder, write_whole


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


def test_what_cannot_be_read_is_known_before(tmp_path):
    (tmp_path / "file").write_text("a")
    os.symlink("circle", tmp_path / "circle")
    check_readable(tmp_path / "file", "--corpus")
    for name, says in (
        ("none", "--corpus .*none: no such file"),
        ("file/none", "no such file"),
        ("", "this is a folder, name a file"),
        ("circle", r"cannot be read \(Too many levels"),
        ("x" * 300, r"cannot be read \(File name too long"),
        ("a\0b", r"cannot be read \(.*embedded null"),
    ):
        with pytest.raises(InputError, match=says):
            check_readable(tmp_path / name, "--corpus")


def test_a_file_is_as_open_as_others_and_holds_bytes_or_text(tmp_path):
    before = os.umask(0)
    try:
        write_whole(tmp_path / "open", "")
        os.umask(0o027)
        write_whole(tmp_path / "bytes", b"\x00\xff")
        write_whole(tmp_path / "text", "naïve 東京")
    finally:
        os.umask(before)
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert (tmp_path / "text").read_text(encoding="utf-8") == "naïve 東京"
    assert stat.S_IMODE((tmp_path / "text").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o666
    assert os.umask(before) == before


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(ForetokenError, match="cannot be written"):
        write_whole(tmp_path / "no" / "out.json", "one")
    write_whole(tmp_path / "out.json", "one")
    monkeypatch.setattr(os, "replace", lambda *given: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(ForetokenError, match="disk full"):
        write_whole(tmp_path / "out.json", "two")
    assert os.listdir(tmp_path) == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "one"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path, monkeypatch):
    """A device such as /dev/null would else be replaced by a file, if the folder is writable; here it is not."""
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **given: (_ for _ in ()).throw(OSError(13, "denied")))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert check_writable(pipe, "--out") == pipe
        write_whole(pipe, "naïve")
        assert os.read(reader, 100) == "naïve".encode()
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_cache_is_a_folder_private_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "caches" / "foretoken").mkdir(parents=True)
    folder = own_cache_folder()
    assert folder == tmp_path / "caches" / "foretoken"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = own_cache_folder()
    assert folder == tmp_path / "home" / ".cache" / "foretoken"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("obstacle", ["a link", "a file", "somebody else's"])
def test_a_cache_that_is_not_ours_alone_is_not_used(tmp_path, monkeypatch, obstacle):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if obstacle == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "foretoken").symlink_to(tmp_path / "elsewhere")
    elif obstacle == "a file":
        (tmp_path / "foretoken").write_text("")
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert own_cache_folder() is None
