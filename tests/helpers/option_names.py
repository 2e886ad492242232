"""The options of the whole command line, with what other distributions add to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from foretoken.cli.main import app, main
from foretoken.cli.shared.options import name_values
from foretoken.core.errors import ModelError

OF_A_MODEL = {
    *("--dtype", "--kv-cache-dtype", "--device", "--threads", "--trust-remote-code", "--revision", "--max-model-len")
}

_OF_ITS_OWN = {
    *("--help", "--install-completion", "--show-completion"),  # typer's
    "--url",  # a server everywhere; bench serve takes several, with labels
}


def options() -> Iterator[tuple[str, str, Any]]:
    """(command, name, option) of the whole command line."""
    root = typer.main.get_command(app)
    waiting = [((), root)]
    while waiting:
        path, command = waiting.pop()
        if hasattr(command, "list_commands"):
            command.list_commands(None)  # those of train are made on access
        name_values(command)
        for param in command.params:
            for name in param.opts:
                if name.startswith("-") and name not in _OF_ITS_OWN:
                    yield " ".join(path), name, param
        waiting += [((*path, name), each) for name, each in getattr(command, "commands", {}).items()]


def kind(option: Any) -> tuple[str, bool]:
    """The values that it takes, and whether it may be repeated; several values with commas are of the kind of one."""
    return (option.metavar or "").removesuffix(",…"), bool(option.multiple)


def disagreements(found: list[tuple[str, str, Any]]) -> list[str]:
    seen: dict[str, dict[tuple[str, bool], list[str]]] = {}
    for command, name, option in found:
        seen.setdefault(name, {}).setdefault(kind(option), []).append(command)
    return [f"{name}: {kinds}" for name, kinds in seen.items() if len(kinds) > 1]


def missing_of_a_model(found: Iterable[tuple[str, str, Any]]) -> dict[str, set[str]]:
    """By command that loads a model: the options of a model that it lacks."""
    names: dict[str, set[str]] = {}
    for command, name, option in found:
        names.setdefault(command, set()).add("--model" if option.opts == ["model"] else name)
    names["serve"].add("--model")  # its argument
    lacks = {command: OF_A_MODEL - has for command, has in names.items() if "--model" in has}
    assert len(lacks) > 8
    return {command: missing for command, missing in lacks.items() if missing}


def assert_options_reach(command, tmp_path, monkeypatch, capsys):
    """The first function that loads a model gets the typed values."""
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
    for name in ("check", "check_vocabulary"):  # these would look for the revision of a folder
        monkeypatch.setattr(f"foretoken.engine.before_weights.{name}", lambda *given, **options: None)
    files = {"records": records, "texts": texts, "requests": requests, "out": tmp_path / "out", "folder": tmp_path}
    typed = "--revision v2 --max-model-len 99 --trust-remote-code --device cpu --dtype float32"
    assert main([*command.format(**files).split(), *typed.split()]) == 1, capsys.readouterr().err
    assert "not today" in capsys.readouterr().err
    expected = {"revision": "v2", "max_length": 99, "trust_remote_code": True, "device": "cpu", "dtype": "float32"}
    assert expected.items() <= told[0].items()
