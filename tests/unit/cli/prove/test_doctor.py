"""``foretoken doctor``: its output and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.doctor import machine
from foretoken.doctor.finding import found


def test_findings_are_lines_or_one_object_and_the_worst_one_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = [found("a", "one")]
    monkeypatch.setattr(machine, "check", lambda threads: list(looked))
    assert main(["doctor"]) == 0
    looked += [found("b", "two", warn="do this"), found("c", "three", fail="do that")]
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out.split() == [
        *["fine", "a", "one"],
        *["fine", "a", "one", "slow", "b", "two", ">", "do", "this", "FAIL", "c", "three", ">", "do", "that"],
    ]
    del looked[2]
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1]["remedy"] == "do this"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-model", "zoo:draft"], "add --model"),
        (["--run", "x.json", "--model", "zoo:base"], "leave --model"),
        (["--run", "nowhere.json"], "cannot be read"),
        (["--model", "zoo:bsae"], "unknown zoo model"),
        (["--model", "./nowhere"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_server_is_looked_at_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().out.startswith("FAIL  server")
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--model", "zoo:base"]) == 2
    assert "leave --model out" in capsys.readouterr().err
