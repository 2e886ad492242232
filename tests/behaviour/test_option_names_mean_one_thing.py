"""A name on the command line means one thing, whatever the command."""

from __future__ import annotations

import pytest

from foretoken.cli.main import main
from foretoken.cli.shared.outputs import json_in_a_file
from helpers.extensions import alone  # noqa: F401  (a fixture)
from helpers.option_names import OF_A_MODEL, assert_options_reach, disagreements, missing_of_a_model, options

pytestmark = pytest.mark.usefixtures("alone")


def test_a_name_has_one_kind_of_value_everywhere():
    found = list(options())
    assert len({command for command, _, _ in found}) > 20
    assert disagreements(found) == []


def test_that_is_seen(monkeypatch):
    found = list(options())
    _, _, planted = next(each for each in found if each[:2] == ("bench", "--json"))
    planted.metavar = "FILE"
    assert disagreements(found)[0].startswith("--json: ")


def test_switches_take_no_value_and_values_have_a_word():
    for command, name, option in options():
        if option.is_flag:
            assert option.metavar == "", f"{command} {name} looks as if it took a value"
        elif option.metavar is None:
            assert option.type_descriptor.annotation is not str, f"{command} {name} has no word for its value"
        else:
            assert not option.metavar.startswith("<"), f"{command} {name}: choices are written a|b|c"
            assert {"yes", "no"}.isdisjoint(option.metavar.split("|")), f"{command} {name}: switches are on and off"


def test_short_names_belong_to_one_long_name():
    long: dict[str, set[str]] = {}
    for _, name, option in options():
        if not name.startswith("--"):
            long.setdefault(name, set()).add(max(option.opts, key=len))
    assert {name: names for name, names in long.items() if len(names) > 1} == {}


_TOKENIZER = "reads the tokenizer alone"
LEFT_OUT = {  # command -> (missing option, reason)
    "doctor": (OF_A_MODEL - {"--threads"}, "reads headers and configs alone"),
    "methods": (OF_A_MODEL, "reads the names of a model's files alone"),
    "datastore append": (OF_A_MODEL, _TOKENIZER),
    "datastore build": (OF_A_MODEL, _TOKENIZER),
}


def test_whatever_loads_a_model_has_the_options_of_a_model():
    assert missing_of_a_model(options()) == {command: missing for command, (missing, _) in LEFT_OUT.items()}


LOADING = [
    "generate hello",
    "chat",
    "serve zoo:draft",
    "batch {requests} --out {out}",
    "certify --method ngram",
    "bench --methods ngram",
]


@pytest.mark.parametrize("command", LOADING, ids=[" ".join(each.split()[:2]) for each in LOADING])
def test_the_options_reach_what_loads_it(command, tmp_path, monkeypatch, capsys):
    assert_options_reach(command, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bench --json a.json --limit 1", "bench --out a.json --limit 1"),
        ("bench verify --rows 1 --json a.json", "bench verify --rows 1 --out a.json"),
        ("analyze tradeoff --json a.json", "analyze tradeoff --out a.json"),
        ("bench --limit 1 --json=--json", "bench --limit 1 --out=--json"),
        ("bench --json", "bench --json"),
        ("bench --json --limit 1", "bench --json --limit 1"),
        ("generate --json a.json", "generate --json a.json"),  # a prompt
        ("methods --json ngram", "methods --json ngram"),
    ],
)
def test_measuring_commands_take_a_file_after_json(typed, meant):
    assert json_in_a_file(typed.split()) == meant.split()


def test_a_file_after_json_is_written(tmp_path, capsys):
    there = tmp_path / "there" / "a.json"
    assert main(["bench", "--json", str(there)]) == 2  # refused before the work, as the place of --out is
    assert "--out" in capsys.readouterr().err
