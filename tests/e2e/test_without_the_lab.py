"""Foretoken installed alone: what the lab has is named with how to get it, and the rest does without."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.cli.main import main
from helpers.extensions import alone  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    "command",
    [
        "analyze",
        "analyze acceptance --limit 1",
        "eval --task json",
        "bench verify --help",
        "bench serve",
        "rag --passages texts.jsonl --questions questions.jsonl",
        "generate Hi --model grown:base:100m",
        "generate Hi --model shape:100m",
        "calibrate sparse --model zoo:base --corpus mine.jsonl",
        "calibrate scylla --model zoo:base",
        "calibrate vocabulary --model zoo:base --corpus mine.jsonl --size 9 --out out",
        "train base --recipe base",
        "bench --suite rules",
        "bench --report report.html",
        "bench --csv run.csv",
        "train judge --target zoo:base --draft-model zoo:draft --out out",
        "train draft --target zoo:base --out out",
        "train draft --target zoo:base --out out --data .",
        "train draft --target zoo:base --out out --corpus generated",
        "train features --target zoo:base --out out",
        "train features --target zoo:base --out out --corpus generated=2",
        "train sprinter --target zoo:base --draft-model zoo:draft --out out",
    ],
)
def test_what_the_lab_has_is_named_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert "foretoken-lab" in line
    assert "pip install foretoken-lab" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("group", "absent", "present"),
    [("", ("analyze", "eval"), "certify"), ("bench", ("verify",), "--suite"), ("train", ("base  ",), "eagle")],
)
def test_help_lists_the_available_commands(
    group: str, absent: tuple[str, ...], present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*group.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert present in shown
    assert not any(f"│ {name}" in shown for name in absent)


def test_no_suite_is_listed_and_the_remedy_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list-suites"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install foretoken-lab" in err
