"""A name on the command line means one thing, whatever the command, with those of the lab."""

from __future__ import annotations

import pytest

from helpers.option_names import OF_A_MODEL, assert_options_reach, disagreements, missing_of_a_model, options


def of_the_lab():
    groups = ("analyze", "calibrate", "eval", "rag")
    return [each for each in options() if each[0].split(" ")[0] in groups or each[0].startswith("bench ")]


def test_a_name_has_one_kind_of_value_everywhere():
    assert len({command for command, _, _ in of_the_lab()}) == 10
    assert disagreements(list(options())) == []


def test_whatever_loads_a_model_has_the_options_of_a_model():
    # heads are trained by the folder of a target, in its own dtype, on a CPU; the text part of it alone; keys and
    # values in codes would only blur the counts
    left_out = {
        "analyze scaling": OF_A_MODEL - {"--threads"},
        "calibrate sparse": {"--kv-cache-dtype"},
        "calibrate vocabulary": {"--kv-cache-dtype"},
    }
    ours = {command for command, _, _ in of_the_lab()}
    found = missing_of_a_model(options())
    assert {command: missing for command, missing in found.items() if command in ours} == left_out


LOADING = [
    "eval --task arithmetic",
    "rag --passages {texts} --questions {records} --retriever bm25",
    "bench verify",
    "analyze acceptance",
    "analyze tradeoff --rules typical",
    "calibrate vocabulary --model zoo:base --corpus {texts} --size 8 --out {out}",
    "calibrate sparse --model zoo:moe --corpus {texts} --out {out}",
    "calibrate scylla --model zoo:base --head {folder}",
]


@pytest.mark.parametrize("command", LOADING, ids=[" ".join(each.split()[:2]) for each in LOADING])
def test_the_options_reach_what_loads_it(command, tmp_path, monkeypatch, capsys):
    assert_options_reach(command, tmp_path, monkeypatch, capsys)
