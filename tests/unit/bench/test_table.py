"""The benchmark as tables and as a report."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foretoken.bench.harness import Method, Records, Sample
from foretoken.bench.report import html_report
from foretoken.bench.summary import summarise
from foretoken.bench.table import tables
from foretoken.bench.workloads import Prompt
from foretoken.core.metrics import Metrics


@pytest.fixture
def results():
    prompts = [Prompt("p<1>", "a", "maths"), Prompt("p2", "b", "chat")]
    samples = []
    for repeat in range(2):
        for prompt in prompts:
            for label, seconds in (("none", 1.0), ("slow", 1.25), ("fast", 0.5)):
                metrics = Metrics(
                    num_tokens=4,
                    num_steps=2,
                    num_draft_tokens=4,
                    num_accepted_tokens=2,
                    drafted_at=[2],
                    accepted_at=[1],
                )
                error = "NaN <logits>" if label == "slow" and prompt.id == "p2" else None
                samples.append(Sample(label, prompt, repeat, seconds, () if error else (1, 2), metrics, error))
    methods = [Method(name, {"method": name}) for name in ("none", "slow", "fast")]
    return summarise(Records(samples, 2), methods, dict.fromkeys(("none", "slow", "fast"), "same text"))


def test_the_table_shows_slowdowns_and_failures_in_red_within_80_columns(results):
    buffer = io.StringIO()
    Console(file=buffer, width=80, force_terminal=True, color_system="standard").print(tables(results, "title"))
    lines = buffer.getvalue().splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= 80
    slow = next(line for line in lines if "slow" in line)
    assert re.search(r"\x1b\[1;31m\s*0\.80x", slow)
    assert re.search(r"\x1b\[1;31m\s*2", slow)  # failures
    assert any("fast" in line and "2.00x" in line for line in plain)
    assert any("prompt p<1>" in line or "prompt p2 failed: NaN <logits>" in line for line in plain)
    assert any("speed-up by category" in line for line in plain)


def test_the_report_is_one_self_contained_file(results):
    page = html_report(results, PROVENANCE)
    assert page.count("<svg") == 3
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']https?:", page)
    assert "NaN &lt;logits&gt;" in page
    assert '<span class="bad">0.80x</span>' in page
    for heading in ("Speed-up by method and category", "Acceptance by position", "Where the time goes", "Provenance"):
        assert heading in page
    ids = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # two pictures on one page must not share ids


PROVENANCE = {
    "model": "zoo:base",
    "suite": {"num_prompts": 2, "file": "<odd>"},
    "repeats": 2,
    "dtype": "bfloat16",
    "threads": 1,
    "temperature": 0.0,
    "max_tokens": 8,
    "batch_size": 1,
    "cpu": "a & b",
    "interrupted": False,
    "command": "foretoken bench",
}
