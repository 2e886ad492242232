"""Broken machines: each gives its line and its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.core import threads
from foretoken.doctor import machine
from foretoken.doctor.finding import Finding
from foretoken.native import build, variants


def line(findings: list[Finding], check: str) -> Finding:
    return next(each for each in findings if each.check == check)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of four cores; the result is its file of quotas."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    return tmp_path / "cpu.max"


def test_threads_match_the_cores_that_a_container_grants(four_cores: Path) -> None:
    assert line(machine.check(4), "threads").status == "ok"
    one = line(machine.check(1), "threads")
    assert (one.status, one.found) == ("warn", "1 of 4 cores compute")
    assert "--threads 4" in one.remedy
    four_cores.write_text("200000 100000\n")
    assert line(machine.check(2), "threads").status == "ok"
    assert "--threads 2" in line(machine.check(4), "threads").remedy
    four_cores.write_text("100000 100000\n")
    assert "one core" in line(machine.check(1), "threads").remedy


def test_a_machine_without_a_compiler_fails_where_nothing_is_compiled_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "own_cache_folder", lambda: tmp_path)  # an empty one
    monkeypatch.setattr(variants, "PREBUILT", tmp_path)
    monkeypatch.delenv("FORETOKEN_NATIVE", raising=False)
    ready = line(machine.check(1), "native decoder")
    assert ready.status == "ok"
    assert "compiles it at the first load" in ready.found
    monkeypatch.setenv("CC", "no-such-compiler")
    missing = line(machine.check(1), "native decoder")
    assert missing.status == "fail"
    assert "no-such-compiler" in missing.found
    assert "install gcc or clang" in missing.remedy


def test_a_native_decoder_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_NATIVE", "0")
    assert line(machine.check(1), "native decoder").remedy == "unset FORETOKEN_NATIVE for speed"
    monkeypatch.setenv("FORETOKEN_NATIVE", "perhaps")
    assert line(machine.check(1), "native decoder").status == "fail"


def test_huge_pages_that_are_never_granted_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert "echo madvise" in line(machine.check(1), "huge pages").remedy
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert line(machine.check(1), "huge pages").found == "madvise"
