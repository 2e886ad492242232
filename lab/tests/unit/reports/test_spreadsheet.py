"""A benchmark as comma-separated values."""

from __future__ import annotations

import csv
import io

import pytest

from foretoken_lab.reports.spreadsheet import csv_lines
from helpers.bench_results import PROVENANCE, results_of_three


@pytest.fixture
def results():
    return results_of_three()


def test_a_line_of_values_for_every_method_and_category(results):
    rows = list(csv.DictReader(io.StringIO(csv_lines(_record(results)))))
    assert [(row["method"], row["category"]) for row in rows] == [
        (name, part) for name in ("none", "slow", "fast") for part in ("all", "maths", "chat")
    ]
    fast = rows[6]
    assert (float(fast["speedup"]), float(fast["speedup_lowest"])) == (2.0, 2.0)
    assert (float(fast["first_token_seconds_p50"]), float(fast["answer_seconds_p99"])) == (0.25, 0.5)
    assert (float(fast["between_tokens_seconds_mean"]), float(fast["between_tokens_seconds_p50"])) == (0.125, 0.125)
    assert rows[5]["speedup"] == ""  # what failed has no figure


def test_one_repeat_has_no_spread(results):
    for result in results:
        for figures in (result, *result["by_category"].values()):
            figures["num_repeats"] = 1
    for row in csv.DictReader(io.StringIO(csv_lines(_record(results)))):
        assert row["speedup_lowest"] == row["speedup_highest"] == ""


def _record(results, provenance=PROVENANCE):
    return {"provenance": provenance, "results": results, "samples": []}
