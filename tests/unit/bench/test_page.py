"""The benchmark as tables and as Markdown."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foretoken.bench.page import markdown_page, terminal_page
from foretoken.bench.sheets import sheets
from helpers.bench_results import PROVENANCE, results_of_three


@pytest.fixture
def results():
    return results_of_three()


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


def test_markdown_holds_the_tables_and_the_command(results):
    page = markdown_page(results, PROVENANCE)
    assert "$ foretoken bench" in page
    assert re.search(r"^\| slow \| \*\*0\.80x\*\* \|", page, flags=re.MULTILINE)
    assert "NaN \\<logits\\>" in page
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_several_settings_are_one_table(results):
    grid = [{**result, "batch_size": size, "prompt_tokens": None} for size in (1, 8) for result in results]
    (sheet,) = sheets(grid)
    assert [row[0].text for row in sheet.rows] == ["1", "", "", "8", "", ""]
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(terminal_page(grid, "title"))
    assert max(map(len, buffer.getvalue().splitlines())) <= 80
