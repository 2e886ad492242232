"""A benchmark as a page with pictures."""

from __future__ import annotations

import re

import pytest

from foretoken_lab.reports.page import html_page
from helpers.bench_results import PROVENANCE, results_of_three


@pytest.fixture
def results():
    return results_of_three()


def test_the_report_is_one_self_contained_file(results):
    page = html_page(_record(results))
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
    page = html_page(_record(results))
    assert "<wbr>+num_speculative_tokens=4<wbr>+tree=topk" in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    names = {text for svg in pictures for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)}
    assert {"draft_model+num_speculative_tokens=4+tree=topk", "draft_model+num_speculative_tokens=4", "+tree=topk"} <= (
        names
    )


def test_several_settings_are_one_picture(results):
    grid = [{**result, "batch_size": size, "prompt_tokens": None} for size in (1, 8) for result in results]
    page = html_page(_record(grid, {**PROVENANCE, "batch_size": [1, 8]}))
    assert page.count("<svg") == 2


def test_one_repeat_is_reported_as_such(results):
    for result in results:
        result["num_repeats"] = 1
    assert "measured once" in html_page(_record(results))


def _record(results, provenance=PROVENANCE):
    return {"provenance": provenance, "results": results, "samples": []}
