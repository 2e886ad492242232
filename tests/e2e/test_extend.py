"""docs/extend.md is a working drafter of at most forty lines, and it does not change the text."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"


def test_the_drafter_of_the_page_runs_and_keeps_the_text(capsys):
    drafter, check = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(drafter.splitlines()) <= 40
    names: dict = {}
    exec(compile(drafter, str(PAGE), "exec"), names)
    exec(compile(check, str(PAGE), "exec"), names)  # asserts equal token ids itself
    assert capsys.readouterr().out.endswith("tokens per step\n")
    metrics = names["out"].metrics
    assert metrics.num_accepted_tokens > 0
    assert metrics.tokens_per_step > 1.0
    assert not names["fast"].generate(["x"], names["params"])[0].error
