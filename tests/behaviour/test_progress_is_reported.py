"""Progress of long operations, and the statistics of an answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.certify.certify import _Parts
from foretoken.cli.main import main
from foretoken.cli.run.answers import statistics
from foretoken.cli.shared import console
from foretoken.core.metrics import Metrics
from foretoken.core.phases import PHASES


def test_slow_loading_and_checking_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 0.2)
    with console.passing_note("loading it"):
        time.sleep(0.5)
        PHASES.info("checking %s", "it")
    assert capsys.readouterr().err.splitlines() == ["loading it", "checking it"]
    with console.passing_note("loading it"):
        PHASES.info("checking %s", "it")
    assert capsys.readouterr().err == ""
    PHASES.info("without a listener")
    assert capsys.readouterr().err == ""


def test_loading_reports_its_phases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 0.0)
    assert main(["generate", "Once", "--model", "zoo:draft", "--method", "none", "--max-tokens", "2"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said.index("loading zoo:draft") < said.index("checking zoo:draft")


def test_a_bar_without_a_terminal_says_how_long_it_still_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    with console.progress_bar("questions", 10) as advance:
        time.sleep(0.3)
        advance()
    assert "questions: 1 of 10, about 3 s left" in capsys.readouterr().err
    assert (console.time_left(80.0), console.time_left(600.0)) == ("80 s", "10 min")


def test_a_proof_says_how_long_it_still_takes() -> None:
    lines: list[str] = []
    part = _Parts(["closed form", "teeth", "sampled distribution"], lines.append)
    part("closed form", "a")
    part._began -= 20.0
    part("teeth", "b")
    assert lines[0] == "1 of 3: closed form: a"
    assert lines[1] == "2 of 3, about 2 min left: teeth: b"  # 14 shares more, of 10 seconds each


def output(reason: str, **counts: Any) -> Any:
    completion = SimpleNamespace(
        metrics=Metrics(num_tokens=128, num_steps=128, **counts), finish_reason=reason, token_ids=range(128)
    )
    return SimpleNamespace(outputs=[completion], promise="same text")


def test_an_answer_that_was_cut_says_so() -> None:
    assert "cut at 128 tokens by the length limit (--max-tokens)" in statistics([output("length")], 1.0)
    assert "cut" not in statistics([output("stop")], 1.0)
    assert "1 of 2 answers cut by" in statistics([output("length"), output("stop")], 1.0)


def test_statistics_say_why_nothing_was_drafted() -> None:
    llm = SimpleNamespace(why_undrafted="the drafter was called and proposed nothing")
    assert "nothing was drafted: the drafter was called" in statistics([output("stop")], 1.0, llm)
    assert "nothing was drafted" not in statistics([output("stop", num_draft_tokens=3)], 1.0, llm)
    assert "nothing was drafted" not in statistics([output("stop")], 1.0, SimpleNamespace(why_undrafted=""))


def test_the_commands_say_why_nothing_was_drafted(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--method", "draft_model", "--max-tokens", "3", "--threads", "1"]
    assert main(["generate", "Once", *typed]) == 0
    said = capsys.readouterr().err
    assert "nothing was drafted: the answers ended before a plain step had been timed" in said
    assert "num_speculative_tokens=4 drafts in any case" in said
    assert main(["generate", "Once", "--method", "none", "--max-tokens", "3"]) == 0
    assert "nothing was drafted" not in capsys.readouterr().err
    short = ["--limit", "1", "--repeats", "1", "--max-tokens", "1", "--threads", "1"]
    assert main(["bench", "--methods", "draft_model", *short]) == 0
    assert "draft_model never drafted: " in capsys.readouterr().err
