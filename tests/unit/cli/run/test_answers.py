"""Progress while a long prompt is read: on a terminal only."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.cli.run import answers
from foretoken.cli.shared.console import CLEAR_LINE
from foretoken.data.prompts import Prompt

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
IDS = list(range(10, 50))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("zoo:draft", max_num_seqs=1, max_rows_per_step=16, speculative_config=None)


def answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, *, patience: float, json: bool = False
) -> str:
    monkeypatch.setattr(answers, "_PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert answers.answer_one(llm, Prompt("0", "x"), IDS, PARAMS, json=json) == 0
    return stderr.getvalue()


def test_a_long_prompt_says_how_far_it_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    said = answered(llm, monkeypatch, Terminal(), patience=0.0)
    lines = said.split(CLEAR_LINE)
    assert [line.partition(" tokens in")[0] for line in lines[1:3]] == [
        "reading the prompt: 16 of 40",
        "reading the prompt: 32 of 40",
    ]
    assert "tokens per step" in lines[3]  # the line is erased before any other output
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("stderr", "options"),
    [(io.StringIO, {"patience": 0.0}), (Terminal, {"patience": 0.0, "json": True}), (Terminal, {"patience": 60.0})],
    ids=["a file", "json", "a short prompt"],
)
def test_other_answers_print_no_note(
    stderr: type[io.StringIO], options: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = answered(llm, monkeypatch, stderr(), **options)
    assert "reading" not in said
    assert CLEAR_LINE not in said


def test_an_interruption_takes_the_line_away(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm.engine.step, []

    def interrupted() -> Any:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    stderr = Terminal()
    monkeypatch.setattr(answers, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert answers.answer_one(llm, Prompt("0", "x"), IDS, PARAMS, json=False) == 130
    assert stderr.getvalue().endswith(CLEAR_LINE)
