"""A model that does not fit is refused before its weights are read, in one line; unknown memory refuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.errors import ModelError
from foretoken.models import load as loading
from foretoken.models import memory
from foretoken.models.checkpoint_files import CheckpointFiles


def system_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: str, *, group: dict[str, str] | None = None
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {free}\n", encoding="ascii")
    for name, text in (group or {}).items():
        (tmp_path / name).write_text(text, encoding="ascii")
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)


def test_the_smaller_of_system_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 5\ninactive_file 20\nactive_file 30\n"
    for free, most, expected in (
        ("1 kB", "2000", 1024),
        ("4 kB", "2000", 1950),
        ("4 kB", "max", 4096),
        ("x", "max", None),
    ):
        group = {"memory.max": most, "memory.current": "100", "memory.stat": stat}
        system_of(tmp_path, monkeypatch, free, group=group)
        assert memory.free_memory() == expected


def test_a_system_that_does_not_say_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "absent")
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "absent")
    memory.check_fits("m", 10**18)


@pytest.mark.parametrize("dtype", ["auto", "int8", None])
def test_a_model_beyond_memory_is_refused_before_its_weights_are_read(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As served, rounded, or as the library computes it (None)."""
    system_of(tmp_path, monkeypatch, "64 kB")
    monkeypatch.setattr(CheckpointFiles, "weights", lambda *given, **options: pytest.fail("weights are read"))
    with pytest.raises(
        ModelError, match=r"^model 'zoo:base' takes 0\.\d GB of memory, and 0\.0 GB are free: end other"
    ):
        loading.load_as_is("zoo:base") if dtype is None else loading.load("zoo:base", dtype=dtype)


@pytest.mark.parametrize(
    ("free", "size", "length", "expected"),
    [
        ("1000000 kB", 1000, 2000, 32),
        ("100000 kB", 1000, 2000, 25),  # half of it, by 2 MB
        ("100000 kB", 1000, 131072, 6),  # 8,192 tokens are expected
        ("10 kB", 1000, 2000, 1),
    ],
)
def test_seats_follow_memory(
    free: str, size: int, length: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_of(tmp_path, monkeypatch, free)
    assert memory.seats(size, length) == expected


def test_seats_where_the_system_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "none")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory.seats(1000, 2000) == 32
