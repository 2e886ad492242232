"""A name on the command line means one thing, whatever the command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from foretoken.cli.main import app, main
from foretoken.cli.options import name_values
from foretoken.cli.outputs import json_in_a_file
from foretoken.cli.renamed import remedy

_OF_ITS_OWN = {"--help", "--install-completion", "--show-completion"}  # typer's


def options() -> Iterator[tuple[str, str, Any]]:
    """(command, name, option) of the whole command line."""
    root = typer.main.get_command(app)
    waiting = [((), root)]
    while waiting:
        path, command = waiting.pop()
        if hasattr(command, "list_commands"):
            command.list_commands(None)  # those of train are made when somebody looks for them
        name_values(command)
        for param in command.params:
            for name in param.opts:
                if name.startswith("-") and name not in _OF_ITS_OWN:
                    yield " ".join(path), name, param
        waiting += [((*path, name), each) for name, each in getattr(command, "commands", {}).items()]


def kind(option: Any) -> tuple[str, bool]:
    """What is written behind it, and whether it may be repeated; several values with commas are of the kind of one."""
    return (option.metavar or "").removesuffix(",…"), bool(option.multiple)


def disagreements(found: list[tuple[str, str, Any]]) -> list[str]:
    seen: dict[str, dict[tuple[str, bool], list[str]]] = {}
    for command, name, option in found:
        seen.setdefault(name, {}).setdefault(kind(option), []).append(command)
    return [f"{name}: {kinds}" for name, kinds in seen.items() if len(kinds) > 1]


def test_a_name_has_one_kind_of_value_everywhere():
    found = list(options())
    assert len({command for command, _, _ in found}) > 25
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


def test_short_names_belong_to_one_long_name():
    long: dict[str, set[str]] = {}
    for _, name, option in options():
        if not name.startswith("--"):
            long.setdefault(name, set()).add(max(option.opts, key=len))
    assert {name: names for name, names in long.items() if len(names) > 1} == {}


OLD = [
    (
        "bench serve --url http://localhost:1 --model m",
        "--model of 'foretoken bench serve' is called --served-model-name",
    ),
    ("analyze acceptance --target zoo:base", "is called --model"),
    ("analyze tradeoff --draft zoo:draft", "is called --draft-model"),
    ("analyze scaling --out o --batches 1,2", "is called --batch-size"),
    ("calibrate sparse --model zoo:moe --data a.jsonl", "is called --corpus"),
    ("eval --task keys --context=300", "is called --prompt-tokens"),
    ("train eagle --target zoo:base --out o --prompts p.jsonl", "is called --suite"),
    ("train features --target zoo:base --out o --layers 4", "is called --depths"),
]


@pytest.mark.parametrize(("command", "message"), OLD, ids=[command for command, _ in OLD])
def test_an_old_name_is_answered_with_the_new_one(command, message, capsys):
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) <= 2


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
def test_what_measures_takes_a_file_behind_json(typed, meant):
    assert json_in_a_file(typed.split()) == meant.split()


def test_a_file_behind_json_is_written(tmp_path, capsys):
    there = tmp_path / "there" / "a.json"
    assert main(["bench", "--json", str(there)]) == 2  # refused before the work, as the place of --out is
    assert "--out" in capsys.readouterr().err


def test_what_was_never_another_name_has_no_remedy():
    assert remedy("foretoken generate", ["generate", "--target", "x"]) is None
    assert remedy("foretoken bench", ["bench", "--json", "--nonsense"]) is None
    assert remedy("foretoken eval", ["eval", "--nonsense"]) is None
