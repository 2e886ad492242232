"""A name on the command line means one thing, whatever the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from foretoken.cli.main import app, main
from foretoken.cli.shared.options import name_values
from foretoken.cli.shared.outputs import json_in_a_file
from foretoken.cli.shared.renamed import remedy
from foretoken.core.errors import ModelError

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
        else:
            assert not option.metavar.startswith("<"), f"{command} {name}: choices are written a|b|c"
            assert {"yes", "no"}.isdisjoint(option.metavar.split("|")), f"{command} {name}: switches are on and off"


def test_short_names_belong_to_one_long_name():
    long: dict[str, set[str]] = {}
    for _, name, option in options():
        if not name.startswith("--"):
            long.setdefault(name, set()).add(max(option.opts, key=len))
    assert {name: names for name, names in long.items() if len(names) > 1} == {}


OF_A_MODEL = {
    *("--dtype", "--kv-cache-dtype", "--device", "--threads", "--trust-remote-code", "--revision", "--max-model-len")
}
_TOKENIZER = "reads the tokenizer alone"
_DENSE = "reads a text, or has one written, to count in it: keys and values in codes would only blur the counts"
_HEADS = "heads are trained by the folder of a target, in its own dtype, on a CPU; the text part of it alone"
LEFT_OUT = {  # command -> (what it does not have, why)
    "analyze scaling": (OF_A_MODEL - {"--threads"}, _HEADS),
    "calibrate sparse": ({"--kv-cache-dtype"}, _DENSE),
    "calibrate vocabulary": ({"--kv-cache-dtype"}, _DENSE),
    "datastore append": (OF_A_MODEL, _TOKENIZER),
    "datastore build": (OF_A_MODEL, _TOKENIZER),
}


def test_whatever_loads_a_model_has_the_options_of_a_model():
    names: dict[str, set[str]] = {}
    for command, name, option in options():
        names.setdefault(command, set()).add("--model" if option.opts == ["model"] else name)
    names["serve"].add("--model")  # its argument
    found = {command: OF_A_MODEL - has for command, has in names.items() if "--model" in has}
    assert len(found) > 12
    assert {command: missing for command, missing in found.items() if missing} == {
        command: missing for command, (missing, _) in LEFT_OUT.items()
    }


LOADING = [
    "generate hello",
    "chat",
    "serve zoo:draft",
    "batch {requests} --out {out}",
    "eval --task arithmetic",
    "certify --method ngram",
    "bench --methods ngram",
    "bench verify",
    "rag --passages {texts} --questions {records} --retriever bm25",
    "analyze acceptance",
    "analyze tradeoff --rules typical",
    "calibrate sparse --model zoo:moe --corpus {texts} --out {out}",
    "calibrate scylla --model zoo:base --head {folder}",
    "calibrate vocabulary --model zoo:base --corpus {texts} --size 8 --out {out}",
]


@pytest.mark.parametrize("command", LOADING, ids=[" ".join(each.split()[:2]) for each in LOADING])
def test_the_options_reach_what_loads_it(command, tmp_path, monkeypatch, capsys):
    """The first thing that loads a model is told what was typed."""
    records, texts = tmp_path / "records.jsonl", tmp_path / "texts.jsonl"
    records.write_text('{"prompt": "Hi."}\n')
    texts.write_text('{"text": "Hello there."}\n')
    requests = tmp_path / "requests.jsonl"
    body = {"model": "zoo:base", "messages": [{"role": "user", "content": "Hi."}]}
    requests.write_text(json.dumps({"custom_id": "1", "url": "/v1/chat/completions", "method": "POST", "body": body}))
    told: list[dict[str, Any]] = []

    def listen(name: str, **typed: Any) -> None:
        told.append(typed)
        raise ModelError("not today")

    monkeypatch.setattr("foretoken.models.load.load", listen)
    files = {"records": records, "texts": texts, "requests": requests, "out": tmp_path / "out", "folder": tmp_path}
    typed = "--revision v2 --max-model-len 99 --trust-remote-code --device cpu --dtype float32"
    assert main([*command.format(**files).split(), *typed.split()]) == 1, capsys.readouterr().err
    assert "not today" in capsys.readouterr().err
    expected = {"revision": "v2", "max_length": 99, "trust_remote_code": True, "device": "cpu", "dtype": "float32"}
    assert expected.items() <= told[0].items()


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
