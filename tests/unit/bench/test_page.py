"""The benchmark as tables, as Markdown, as comma-separated values and as a report."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console

from foretoken.bench.harness import Method, Records, Sample
from foretoken.bench.page import html_page, markdown_page, terminal_page
from foretoken.bench.sheets import sheets
from foretoken.bench.spreadsheet import csv_lines
from foretoken.bench.summary import summarise
from foretoken.core.metrics import Emitted, Metrics
from foretoken.data.prompts import Prompt


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
                    drafted_at=[30, 2],
                    accepted_at=[24, 1],
                    emitted=[Emitted(0.25, 1, 0), Emitted(seconds, 2, 1)],
                )
                error = "NaN <logits>" if label == "slow" and prompt.id == "p2" else None
                samples.append(Sample(label, prompt, repeat, seconds, () if error else (1, 2), metrics, error))
    methods = [Method(name, {"method": name}) for name in ("none", "slow", "fast")]
    return summarise(Records(samples, 2), methods, dict.fromkeys(("none", "slow", "fast"), "same text"))


def test_the_table_shows_slowdowns_and_failures_in_red_within_80_columns(results):
    buffer = io.StringIO()
    Console(file=buffer, width=80, force_terminal=True, color_system="standard").print(terminal_page(results, "title"))
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
    page = html_page(results, PROVENANCE)
    assert page.count("<svg") == 2 * 4  # speed-up, waiting, acceptance, time; for wide and for narrow screens
    assert page.count('<figure class="wide"') == page.count('<figure class="narrow"') == 4
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']https?:", page)
    assert "NaN &lt;logits&gt;" in page
    assert '<span class="bad">0.80x</span>' in page
    for heading in ("Speed-up by method and category", "Acceptance by position", "Where the time goes", "Provenance"):
        assert heading in page
    ids = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # two pictures on one page must not share ids


def test_a_long_name_is_folded_between_its_settings(results):
    for result in results:
        if result["method"] == "fast":
            result["method"] = "draft_model+num_speculative_tokens=4+tree=topk"
    page = html_page(results, PROVENANCE)
    assert "<wbr>+num_speculative_tokens=4<wbr>+tree=topk" in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    names = {text for svg in pictures for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)}
    assert {"draft_model+num_speculative_tokens=4+tree=topk", "draft_model+num_speculative_tokens=4", "+tree=topk"} <= (
        names
    )


def test_no_heading_is_cut_within_a_word_at_80_columns(results):
    labels = {"slow": "draft_model+num_speculative_tokens=3", "fast": "fast"}
    for result in results:
        result["method"] = labels.get(result["method"], result["method"])
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(terminal_page(results, "title"))
    text = buffer.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[\w-]+", text))
    for sheet in sheets(results):
        for head in sheet.heads:
            if head not in labels.values():  # a method's name may be folded
                assert set(re.findall(r"[\w-]+", head)) <= words, head


def test_deep_positions_are_listed_with_their_counts(results):
    sheet = next(each for each in sheets(results) if each.title.startswith("acceptance"))
    assert [cell.text for cell in sheet.rows[0]] == ["1", "0.80 of 120", "0.80 of 60", "0.80 of 120"]
    assert [cell.text for cell in sheet.rows[1]] == ["2", "0.50 of 8", "0.50 of 4", "0.50 of 8"]
    assert not any(cell.doubtful for cell in sheet.rows[0])
    assert all(cell.doubtful for cell in sheet.rows[1][1:])
    assert "0.50 of 8 (?)" in markdown_page(results, PROVENANCE)


def test_one_repeat_has_no_spread(results):
    for result in results:
        for figures in (result, *result["by_category"].values()):
            figures["num_repeats"] = 1
    for sheet in sheets(results):
        if "lowest to highest" in sheet.heads:
            place = sheet.heads.index("lowest to highest")
            assert {row[place].text for row in sheet.rows} == {"–"}
    for row in csv.DictReader(io.StringIO(csv_lines(results, PROVENANCE))):
        assert row["speedup_lowest"] == row["speedup_highest"] == ""
    assert "measured once" in html_page(results, PROVENANCE)


def test_a_line_of_values_for_every_method_and_category(results):
    rows = list(csv.DictReader(io.StringIO(csv_lines(results, PROVENANCE))))
    assert [(row["method"], row["category"]) for row in rows] == [
        (name, part) for name in ("none", "slow", "fast") for part in ("all", "maths", "chat")
    ]
    fast = rows[6]
    assert (float(fast["speedup"]), float(fast["speedup_lowest"])) == (2.0, 2.0)
    assert (float(fast["first_token_seconds_p50"]), float(fast["answer_seconds_p99"])) == (0.25, 0.5)
    assert (float(fast["between_tokens_seconds_mean"]), float(fast["between_tokens_seconds_p50"])) == (0.125, 0.125)
    assert rows[5]["speedup"] == ""  # what failed has no figure


def test_markdown_holds_the_tables_and_the_command(results):
    page = markdown_page(results, PROVENANCE)
    assert "$ foretoken bench" in page
    assert re.search(r"^\| slow \| \*\*0\.80x\*\* \|", page, flags=re.MULTILINE)
    assert "NaN \\<logits\\>" in page
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_several_settings_are_one_table_and_one_picture(results):
    grid = [{**result, "batch_size": size, "prompt_tokens": None} for size in (1, 8) for result in results]
    (sheet,) = sheets(grid)
    assert [row[0].text for row in sheet.rows] == ["1", "", "", "8", "", ""]
    page = html_page(grid, {**PROVENANCE, "batch_size": [1, 8]})
    assert page.count("<svg") == 2
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(terminal_page(grid, "title"))
    assert max(map(len, buffer.getvalue().splitlines())) <= 80


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
    "commit": None,
    "date": "2026-11-22",
}
