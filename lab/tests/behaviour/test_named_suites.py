"""The named suites: recipes that the command line reads, prompts, and what a run says of decoding alone."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import pkgutil
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from foretoken import catalog, zoo
from foretoken.bench.harness import Method, Plan, measure
from foretoken.bench.page import terminal_page
from foretoken.bench.suite import Column, Section, find_suite
from foretoken.bench.suite import suites as named_suites
from foretoken.bench.summary import summarise
from foretoken.cli.prove.methods import parse_methods
from foretoken.core.draft import Coupled
from foretoken.core.errors import ConfigError
from foretoken.core.metrics import Emitted, Metrics
from foretoken.data.prompts import Prompt
from foretoken.options.sampling import SamplingParams
from foretoken_lab import suites
from foretoken_lab.suites import accuracy, rules
from foretoken_lab.suites import entropy_adaptive as turns
from foretoken_lab.suites.judge import WrongFact, digits
from foretoken_lab.suites.rules import SCHEMES
from foretoken_lab.suites.self_speculation import LONGEST, PASSED_OVER, SETS, held_out
from foretoken_lab.suites.sprinter import Rates, Step
from foretoken_lab.tasks.evaluate import Answer
from foretoken_lab.tasks.example import Example
from helpers.zoo_llms import with_config

_FILES = list(pkgutil.iter_modules(suites.__path__))


def test_every_file_is_listed_under_its_own_name():
    modules = {each.name: importlib.import_module(f"{suites.__name__}.{each.name}") for each in _FILES}
    assert set(named_suites()) == {name for name, module in modules.items() if hasattr(module, "SUITE")}
    for name in named_suites():
        assert find_suite(name).name == name
        assert find_suite(name).question.endswith("?")


@pytest.mark.parametrize("name", named_suites())
def test_recipes_are_what_the_command_line_takes_and_plain_decoding_comes_first(name):
    suite = find_suite(name)
    rows = parse_methods(",".join(suite.methods), [], target=suite.model, draft_model=suite.draft_model)
    assert rows[0].label == "none"
    assert len(rows) == len(suite.methods) + 1
    assert set(suite.options) <= {"max_tokens", "repeats", "temperature", "ignore_eos", "dtype"}
    SamplingParams(**{key: suite.options[key] for key in ("max_tokens", "temperature") if key in suite.options})


def test_an_unknown_suite_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'sprinter'"):
        find_suite("sprintr")


def test_the_rules_are_all_lossless_ones_that_can_sample():
    lossless = {entry.name for entry in catalog.entries("verifier") if entry.promise != "approximate"}
    assert set(SCHEMES) == lossless - {"greedy"}


def test_the_common_table_gives_every_rule_as_many_nodes_in_the_shape_that_it_is_for():
    """Once `recursive` was a chain of six next to `ratio` of four, and `match` drew without its noise."""
    suite = find_suite("rules")
    rows = parse_methods(",".join(suite.methods), [], target=suite.model, draft_model=suite.draft_model)[1:]
    assert {row.config["verifier"] for row in rows} == set(SCHEMES) - {"transport"}
    assert {row.config["num_speculative_tokens"] for row in rows} == {6}
    for row in rows:
        recipe = with_config(row.config).recipe
        rule, drafter = recipe.verifier, recipe.drafter
        assert drafter.branches == (rule.trees and rule.name != "match"), rule.name
        if rule.name == "match":
            assert drafter.laws == (Coupled,)
        elif drafter.branches:
            assert drafter.config.num_drafts == (2 if rule.name == "spechub" else 3)
            assert rule.name == "naive" or drafter.laws == (SCHEMES[rule.name],)


def test_transport_is_timed_where_its_programs_decide_and_solves_them_every_time(monkeypatch):
    solved = []
    monkeypatch.setattr(rules, "_REPEATS", 2)
    setting = rules.Setting(vocab=2048, nodes=6, drafts=3, requests=(1,))
    for filters in ({}, {"top_p": 0.95}):
        assert rules._measure("transport", filters, 1, setting) is None
    solve = rules.transport.solve.__wrapped__
    counted = lru_cache(maxsize=64)(lambda *args: (solved.append(args), solve(*args))[1])
    monkeypatch.setattr(rules.transport, "solve", counted)
    assert rules._measure("transport", {"top_k": 8}, 1, setting)["accepted"] > 0
    assert len(solved) >= 6  # a warm call and two timed ones, one by one and abreast
    assert rules._measure("kseq", {}, 1, setting) is not None


def test_held_out_prompts_are_short_and_not_the_first_ones(tmp_path):
    (tmp_path / "eval").mkdir()
    for name, _ in SETS:
        lines = [
            {"id": number, "category": "qa" if number % 2 else "math", "turns": [f"{name} {number}", "more"]}
            for number in range(60)
        ]
        lines[1]["turns"] = ["x" * (LONGEST + 1)]
        with gzip.open(tmp_path / "eval" / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, lines)))
    prompts = held_out(tmp_path)
    assert [prompt.category for prompt in prompts] == [
        "qa" if name == "spec_bench" else name for name, count in SETS for _ in range(count)
    ]
    assert prompts[0].text == f"mt_bench {PASSED_OVER + 1}"  # the long one is none of those that are passed over
    assert next(each for each in prompts if each.category == "qa").text == f"spec_bench {2 * PASSED_OVER + 3}"
    with pytest.raises(ConfigError, match="--data"):
        held_out(tmp_path / "nowhere")


# ---------------------------------------------------------------------- decoding apart from the prompt


@dataclass
class Output:
    token_ids: list[int]
    metrics: Metrics = field(default_factory=Metrics)
    finish_reason: str = "length"
    error: str | None = None


class Counted:
    """An engine that counts its calls; steps take a second, and bring two tokens, one drafted."""

    def __init__(self, notes: bool = True) -> None:
        self.calls = 0
        self._notes = notes

    def generate(self, prompts, params=None, **options):
        self.calls += 1
        return [self._output(place, each.max_tokens) for place, each in enumerate(params)]

    chat = generate

    def _output(self, place, count):
        """The prompt at a place is read after so many seconds more."""
        steps = [Emitted(1.0 + place, 1, 0), *(Emitted(2.0 + place + i, 2, 1) for i in range((count - 1) // 2))]
        return Output([7] * count, Metrics(emitted=steps if self._notes else []))


PROMPTS = [Prompt("0", "a", "a"), Prompt("1", "b", "b")]
METHODS = [Method("none", {"method": "none"}), Method("x", {"method": "x"})]


def measured(prompts=PROMPTS, batch_size=1, **options):
    engines = {"none": Counted(), "x": Counted(**options)}
    counters = {"calls": lambda: float(engines["none"].calls + engines["x"].calls)}
    params = SamplingParams(max_tokens=5, seed=1)
    return measure(engines, Plan(prompts, params, repeats=2, batch_size=batch_size, counters=counters))


def test_reading_and_decoding_are_separated_within_the_timed_call():
    records = measured()
    assert [dict(sample.counts) for sample in records.samples] == [{"calls": 1.0}] * 8
    assert all(sample.first_token_seconds == 1.0 for sample in records.samples)
    result = summarise(records, METHODS)[1]
    assert result["counts"] == {"calls": 1 / 5}
    assert result["by_category"]["a"]["counts"] == {"calls": 1 / 5}
    assert result["failures"] == 0
    assert result["decode_tokens_per_second"] == 2.0  # four tokens in two seconds
    assert set(result["spread"]) >= {"first_token_seconds", "decode_speedup", "decode_tokens_per_second"}


def test_of_a_batch_decoding_begins_where_every_prompt_is_read():
    records = measured([Prompt("0", "a", "a"), Prompt("1", "b", "a")], batch_size=2)
    first, second = records.samples[:2]
    assert (first.first_token_seconds, second.first_token_seconds) == (1.0, 1.0)  # 2 seconds, of two prompts
    assert (first.decode_tokens, second.decode_tokens) == (2, 4)  # the first one's others came while the second waited
    assert first.decode_seconds == second.decode_seconds == 1.0  # 4 - 2 seconds, of two prompts
    assert summarise(records, METHODS)[1]["decode_tokens_per_second"] == 3.0


def test_latency_counts_an_accepted_block_as_a_reader_sees_it():
    latency = summarise(measured(), METHODS)[1]["latency"]
    assert latency["first_token_seconds"] == {"p50": 1.0, "p99": 1.0}
    assert latency["answer_seconds"] == {"p50": 3.0, "p99": 3.0}
    assert latency["between_tokens_seconds"] == {"mean": 0.5, "p50": 0.5, "p99": 1.0}  # 1, 0, 1, 0: never 0.5 each
    assert (latency["num_answers"], latency["num_gaps"]) == (4, 16)


def test_an_engine_that_notes_nothing_has_no_figures_of_latency_nor_of_decoding():
    plain, other = summarise(measured(notes=False), METHODS)
    assert "first_token_seconds" in plain
    assert "latency" in plain
    assert "first_token_seconds" not in other
    assert "latency" not in other
    assert other["failures"] == 0


def test_tables_show_categories_apart_and_a_suite_s_own_columns_and_sections():
    results = summarise(measured(), METHODS)
    columns = [Column("calls", lambda figures: figures["counts"]["calls"], "{:.3f}"), Column("-", lambda figures: None)]
    section = Section("own", "own", [Column("name", lambda row: row["name"])], [{"name": "planted"}])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(terminal_page(results, "title", columns, [section]))
    text = capture.get()
    decoding = text[text.index("decoding, apart") : text.index("planted")]
    assert decoding.count("0.200") == 6  # two methods, each pooled and in both categories


def test_the_closed_form_of_sprinter_is_that_of_its_geometric_distribution():
    step = Step(1, [True, False], [True, False], [1.0, 0.5], [False, True], [0.0, 0.0], False)
    rates = Rates.of([[step]])
    assert (rates.alpha, rates.eta_tp, rates.eta_fp) == pytest.approx((0.75, 2 / 3, 0.0))
    goes_on = 0.5
    endless = sum(goes_on**drafted * (1 - goes_on) * (drafted + 1) for drafted in range(200))  # stops, and is refused
    assert Rates(0.5, 0.0, 1.0).tokens_per_call(None) == pytest.approx(endless)
    assert rates.tokens_per_call(1) < rates.tokens_per_call(4) < rates.tokens_per_call(None)


# ---------------------------------------------------------------------- accuracy, and drafts that a judge has to bear


def report(*answers: tuple[bool, str | None]):
    made = tuple(
        Answer(
            Example(id=str(i), prompt="?", answer="", response="", category=""),
            "",
            (i,),
            "stop",
            {} if error else {"correct": float(good)},
            0.0,
            error,
        )
        for i, (good, error) in enumerate(answers)
    )
    return SimpleNamespace(answers=made, metrics=Metrics(num_tokens=6, num_steps=3), distortion=0.5, seconds=2.0)


def test_accuracy_is_compared_question_by_question_and_failures_are_left_out_and_counted():
    own = {"t": report((True, None), (False, None), (True, "no"))}
    reference = {"t": report((True, None), (True, None), (True, None))}
    (row,) = accuracy.rows_of("x", own, reference)  # type: ignore[arg-type]
    assert (row["questions"], row["failed"], row["lost"], row["won"]) == (2, 1, 1, 0)
    assert row["accuracy"] == 0.5
    assert row["minus_reference"][0] == -0.5
    assert (row["tokens_per_step"], row["distortion"], row["mean_tokens"]) == (2.0, 0.5, 2.0)
    assert (row["calls_per_right_answer"], row["seconds_per_right_answer"]) == (3.0, 2.0)
    (none,) = accuracy.rows_of("x", {"t": report((True, "no"))}, {"t": report((True, None))})  # type: ignore[arg-type]
    assert (none["questions"], none["failed"], none["accuracy"]) == (0, 1, None)
    assert none["calls_per_right_answer"] is None
    assert [column.cell(none) for column in accuracy.COLUMNS][2:4] == ["–", "–"]


def test_a_wrong_fact_is_one_wrong_token_a_digit_where_there_is_one():
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    ten = digits(tokenizer)
    drafter = WrongFact({}, tokenizer)
    for tokens in ([900, ten[3], 901], [900, 901, 902]):
        wrong = drafter.spoilt((), 0, list(tokens))
        (place,) = [place for place in range(3) if wrong[place] != tokens[place]]
        assert (wrong[place] in ten) == (tokens[1] in ten)
        assert place == 1 or tokens[1] == 901


# ---------------------------------------------------------------------- turns and their controls


def test_controls_write_as_much_as_the_method_random_ones_in_runs_of_its_lengths():
    noted = turns.Noted({0: [False] * 3 + [True] * 5 + [False] * 4, 1: [True] * 2 + [False] * 3})
    assert noted.share == 7 / 17
    assert turns.first_tokens(noted, 0) == [True] * 4 + [False]
    written = turns.random_turns(noted, 1, 2)
    assert written == turns.random_turns(noted, 1, 2)
    assert written != turns.random_turns(noted, 2, 2)
    runs = [(who, len(list(run))) for who, run in itertools.groupby(written)]
    assert {length for who, length in runs[:-1] if who} == {2, 5}
    assert {length for who, length in runs[:-1] if not who} == {3, 4}
    assert sum(written) / len(written) == pytest.approx(3.5 / (3.5 + 10 / 3), abs=0.03)  # of long answers
    assert turns.random_turns(turns.Noted({0: [True] * 4}), 0, 0) == [True]
    assert turns.random_turns(turns.Noted({0: [False] * 4}), 0, 0) == [False]


def test_a_mean_of_rows_is_that_of_figures_and_of_the_ends_of_intervals():
    rows = [
        {"method": "", "task": "t", "accuracy": 0.2, "minus": [0.0, -0.2, 0.2], "per": 3.0, "failed": 1},
        {"method": "", "task": "t", "accuracy": 0.4, "minus": [0.1, -0.1, 0.4], "per": None, "failed": 1},
    ]
    expected = {"method": "", "task": "t", "accuracy": 0.3, "minus": [0.05, -0.15, 0.3], "per": None, "failed": 2}
    found = turns._mean(rows)
    assert found.pop("minus") == pytest.approx(expected.pop("minus"))
    assert found.pop("accuracy") == pytest.approx(expected.pop("accuracy"))
    assert found == expected
