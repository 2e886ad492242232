"""Progress without a terminal: a line every 30 seconds, and none where the task is done sooner."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from foretoken.cli.learn import training
from foretoken.cli.shared import console
from foretoken.core.phases import PHASES
from foretoken.train.effort import Effort
from foretoken.train.trainer import Progress


class Clock:
    """Seconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_pieces_of_work_are_counted_30_seconds_apart(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("1 of 2: ", 100) as advance:
        for seconds, what in ((10.0, "none"), (20.0, "suffix"), (29.0, ""), (1.0, "ngram")):
            clock.after(seconds)
            advance(what)
    assert lines(capsys) == [
        "1 of 2: suffix: 2 of 100, about 24 min left",
        "1 of 2: ngram: 4 of 100, about 24 min left",
    ]


def test_a_task_that_is_done_soon_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("prompts", 2) as advance:
        advance()
        advance()
    with training.progress("training a head") as report:
        report(Progress(step=1, tokens=10, seconds=1.0, loss=2.0, done=1.0))
    assert lines(capsys) == []


def test_training_writes_step_loss_tokens_and_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "join", lambda self: None)
    with training.progress("training a head") as report:
        for step in range(1, 10):  # from 10 % on, as of a run that was resumed; 10 seconds a step
            clock.after(10.0)
            done = 0.1 + 0.04 * step
            report(Progress(step=step, tokens=step * 100_000, seconds=step * 10.0, loss=3.0 - step / 10, done=done))
    assert lines(capsys) == [
        "training a head: 14%, step 1, loss 2.900, 0.10 M tokens, 10,000 tokens/s",
        "training a head: 26%, step 4, loss 2.600, 0.40 M tokens, 10,000 tokens/s, about 3 min left",
        "training a head: 38%, step 7, loss 2.300, 0.70 M tokens, 10,000 tokens/s, about 3 min left",
    ]


def test_a_preparation_says_its_phases_and_the_estimate_at_once(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "join", lambda self: None)
    network = torch.nn.Linear(10, 10, bias=False)
    with training.progress("training a head") as report:
        clock.after(5.0)
        PHASES.info("loading a model")
        Effort(token_flops=2e9, kept_bytes=10**9).tell(network, 4e12, tokens=6_000_000, minutes=None)
        report(Progress(step=1, tokens=10, seconds=1.0, loss=2.0, done=0.5))
        PHASES.warning("the model is loaded again to be measured")
    first, second = lines(capsys)
    assert first == "training a head: loading a model"
    assert second.startswith("training a head: about 100 minutes, 1000 tokens/s, ")
    assert second.endswith("up to 1.0 GB of disk until it ends; all rough")


def test_the_time_left_is_of_the_stage_under_way(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with console.display("heads", live=False) as show:
        for seconds, share in ((0.0, 0.0), (20.0, 1.0), (0.0, 0.0), (10.0, 0.5)):
            clock.after(seconds)
            show("working", share)
    assert lines(capsys) == ["heads: working, about 10 s left"]


def test_preparation_that_reports_nothing_still_writes_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.1)
    with training.progress("training a head"):
        time.sleep(0.5)
    found = lines(capsys)
    assert len(found) >= 2
    assert set(found) == {"training a head: reading the data"}
