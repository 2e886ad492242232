"""The screen and the page of a fixed plan."""

from __future__ import annotations

from foretoken.planner.candidates import NO_PART, Candidate
from foretoken.planner.costs import Costs, ForwardCosts
from foretoken.planner.page import page
from foretoken.planner.plan import Plan
from foretoken.planner.report import LINES, WIDTH, screen

GOLDEN = """\
zoo:base, int8, 2 threads, EPYC 9B45
40 prompts, 9,412 tokens, temperature 0, in 4 min 10 s
plain decoding: 472 tokens/s; no draft can make it more than 8.8 times as fast:
to check a draft token takes 3% of a step, 8% beyond the first 8

times plain decoding          length  predicted    measured         tokens/step
1 suffix_first+zoo:draft            5 2.60 +- 0.20 2.50 (2.30-2.70) 3.9  #######
2 draft_model+zoo:draft int8        4 2.50 +- 0.20 2.45 (2.25-2.65) 3.6  #######
3 suffix                            8 2.90 +- 0.10 2.20 (2.10-2.30) 2.7  ######
4 eagle                             4 1.90 +- 0.10 -                3.2  #####
5 ngram                             3 1.20 +- 0.10 -                1.4  ###
  3 was not predicted well: trust the measurement
  2 may be as fast as 1: the difference is within the error
why the others lose
  del                            0.80 1.2 tokens a step, and needs 1.6 to gain
  rest: it needs a datastore (foretoken datastore build)
  scylla, longspec: no trained network at hand (foretoken train)
what would change it (predicted, without the time of prompts)
  context in tokens: 128 suffix_first 2.6 · 8,192 suffix 1.9
  requests at once: 1 suffix_first 2.6 · 8 suffix_first 1.2 · 32 no gain
  a draft network of your own (foretoken train scylla | longspec) wins if it
    brings 3.0 tokens a step (4 draft tokens in 10% of a step)
saved plan.json: --plan plan.json, in Python {"plan": "plan.json"}"""


def plan() -> Plan:
    """Figures that nothing has measured."""
    rows, seconds = (1, 8, 16), [0.0020, 0.0024, 0.0037]
    costs = Costs({1: ForwardCosts(rows, (128, 8192), [seconds, [2 * each for each in seconds]])}, 0.0001)
    draft = {"model": "zoo:draft"}
    found = [
        Candidate(
            {"method": "suffix_first", **draft},
            length=5,
            predicted=2.6,
            error=0.2,
            measured=2.5,
            spread=(2.3, 2.7),
            tokens_per_step=3.9,
            by_context={128: 2.6, 8192: 1.7},
            by_requests={1: 2.6, 8: 1.2, 32: 0.9},
            lengths_by_requests={1: 5, 8: 2, 32: 0},
        ),
        Candidate(
            {"method": "draft_model", **draft, "dtype": "int8"},
            length=4,
            predicted=2.5,
            error=0.2,
            measured=2.45,
            spread=(2.25, 2.65),
            tokens_per_step=3.6,
        ),
        Candidate(
            {"method": "suffix"},
            length=8,
            predicted=2.9,
            error=0.1,
            measured=2.2,
            spread=(2.1, 2.3),
            tokens_per_step=2.7,
            by_context={128: 2.2, 8192: 1.9},
            by_requests={1: 2.2, 8: 1.1, 32: 0.8},
            differs=True,
        ),
        Candidate({"method": "eagle"}, length=4, predicted=1.9, error=0.1, tokens_per_step=3.2),
        Candidate({"method": "ngram"}, length=3, predicted=1.2, error=0.1, tokens_per_step=1.4),
        Candidate({"method": "del"}, predicted=0.8, error=0.1, tokens_per_step=1.2, needed=1.6),
        Candidate({"method": "rest"}, "it needs a datastore (foretoken datastore build)"),
        Candidate({"method": "scylla"}, NO_PART),
        Candidate({"method": "longspec"}, NO_PART),
    ]
    return Plan(
        {"name": "zoo:base", "fingerprint": "0" * 64, "dtype": "int8"},
        {"processor": "EPYC 9B45", "variant": "avx2", "threads": 2},
        {"prompts": 40, "given": 40, "tokens": 9412, "params": {"temperature": 0.0}},
        costs,
        found,
        472.0,
        250.0,
    )


def test_the_screen_of_a_fixed_plan() -> None:
    lines = screen(plan(), "plan.json")
    assert "\n".join(lines) == GOLDEN
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH


def test_a_long_list_of_reasons_keeps_the_choice_on_the_screen() -> None:
    made = plan()
    made.candidates += [Candidate({"method": "ngram"}, f"reason {number} " + "long " * 30) for number in range(30)]
    lines = screen(made, "plan.json")
    assert len(lines) <= LINES
    assert lines[-1].startswith("saved plan.json")


def test_a_form_that_was_not_tried_has_a_name_of_its_own() -> None:
    made = plan()
    suffix = made.candidates[2]
    made.candidates.append(Candidate({"method": "suffix", "dtype": "int8"}, "the time was over", plain_form=suffix))
    assert "  suffix dtype=int8: the time was over" in screen(made)


def test_the_file_has_what_the_screen_says() -> None:
    record = plan().record()
    assert record["chosen"] == {"method": "suffix_first", "model": "zoo:draft", "num_speculative_tokens": 5}
    assert record["schedule"] == [[1, 7, 5], [8, 31, 2], [32, 32, 0]]
    assert [each["reason"] for each in record["candidates"]][-1] == NO_PART


def test_plain_decoding_is_chosen_where_nothing_gains() -> None:
    made = plan()
    for each in made.candidates:
        each.measured = None if each.measured is None else 0.9
    assert made.chosen is None
    assert made.record()["chosen"] == {"method": "none"}
    assert "  nothing gains 2 %: plain decoding is chosen" in screen(made)


def test_the_page_is_self_contained() -> None:
    text = page(plan()).decode()
    assert text.count("<svg") == text.count("</svg>") == 2
    assert "width=device-width" in text
    assert "suffix_first + zoo:draft<td>2.6<td>1.7<tr>" in text
    assert "http" not in text
    assert "suffix_first + zoo:draft<" in text


def test_a_reason_is_not_cut_off() -> None:
    made = plan()
    slow = Candidate({"method": "suffix_first", "model": "zoo:draft"}, predicted=1.1, tokens_per_step=13.2, needed=1.0)
    slow.draft_share = 1.0
    made.candidates.insert(5, slow)
    assert "drafting: 100% of a step, 9.3 tokens more" in "\n".join(screen(made))
