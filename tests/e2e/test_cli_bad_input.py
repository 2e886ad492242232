"""Mistakes at the command line: one clear line, the right exit code, no traceback, and nothing loaded for it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from foretoken import zoo
from foretoken.__main__ import run
from foretoken.cli.main import app, main
from helpers import bad_input
from helpers.bad_input import LONG, assert_refused

files, no_model = bad_input.files, bad_input.no_model  # fixtures

BAD = [
    ("generate x --method ngrm", "did you mean 'ngram'"),
    ("generate x --method match", "is a verifier"),
    ("generate x --model ~nouser/x", "'~nouser'"),
    ("--version extra", "leave 'extra' out"),
    ("generate --prompts ids.jsonl", "ids.jsonl:3: has the id 'a' of ids.jsonl:1"),
    ("generate x --methd none", "--method"),
    ("bench --limit 1 serve --url http://localhost:1", "--limit precedes 'serve'"),
    ("generate x --temperature 1e300", "--temperature 1e+300"),
    ("train eagle --target zoo:draft --out o --device gpu", "device='gpu' is unknown"),
    (f"generate x --model {LONG}", "no file or model has such a name"),
    (f"generate x --draft-model {LONG}", "no file or model has such a name"),
    (f"train eagle --target zoo:draft --out {LONG}", "no file or model has such a name"),
    ("generate x --model zoo:bse", "did you mean 'base'"),
    ("generate x --model ./nowhere", "no such folder"),
    ("generate x --temperature -1", "--temperature -1.0"),
    ("generate x --temperature nan", "--temperature nan"),
    ("batch", "missing argument 'FILE'"),
    ("generate x --temperature warm", "--temperature"),
    ("generate x --top-p 0", "--top-p 0.0"),
    ("generate x --top-p 1.5", "--top-p 1.5"),
    ("generate x --top-k -2", "--top-k -2"),
    ("generate x --min-p 2", "--min-p 2.0"),
    ("generate x --max-tokens 0", "--max-tokens 0"),
    ("generate x --max-tokens 2 --min-tokens 3", "min_tokens=3"),
    ("generate x --n 0", "--n 0"),
    ("generate x --seed -1", "--seed -1"),
    ("generate x --repetition-penalty 0", "--repetition-penalty 0.0"),
    ("generate x --stop-token-id -3", "stop_token_ids"),
    ("generate x --logit-bias 5", "ID=VALUE"),
    ("generate x --logit-bias 5=1 --logit-bias 5=2", "--logit-bias gives 5 twice"),
    ("generate x --max-tokens 2 --max-tokens 3", "--max-tokens is given twice"),
    ("bench --json a.json --out b.json", "--out is given twice"),
    ("generate x --draft-model=", "--draft-model is empty"),
    ("bench --suite=", "--suite is empty"),
    ("bench --methods=", "--methods is empty"),
    ("generate x --stop a --stop a", "--stop has a twice"),
    ("bench --suite good.jsonl --out good.jsonl", "--suite is this file, and would be lost"),
    ("batch good.jsonl --out ./good.jsonl", "is this file, and would be lost"),
    ("datastore build good.jsonl good.jsonl --model zoo:draft --out o", "good.jsonl twice"),
    ("datastore build good.jsonl --model zoo:draft --out good.jsonl", "is this file"),
    ("certify --method ngram --threads 100000", "--threads 100000"),
    ("train eagle --target zoo:draft --out o --threads 100000", "--threads 100000"),
    ("bench --repeats 99999999999", "--repeats"),
    ("serve --allow-origin nope", "--allow-origin nope"),
    ("serve --allow-origin=", "--allow-origin is empty"),
    ("train eagle --target zoo:draft --out=", "--out is empty"),
    ("generate x --n 1000000000", "--n 1000000000"),
    ("generate x --model good.jsonl", "is a file"),
    ("generate x --max-model-len 1", "--max-model-len"),
    ("generate --prompts scores.jsonl", "scores.jsonl:2: logprobs"),
    ("generate --prompts prompts.jsonl", "prompts.jsonl:1: prompt_logprobs"),
    ("generate --prompts elsewhere.jsonl", "unknown field 'max_completion_tokens'"),
    ("generate --prompts model.jsonl", "unknown field 'model'"),
    ("bench --list-suites --seed 3", "leave --seed out"),
    ("generate --prompts keys.jsonl", "keys.jsonl:1: unknown field 'max_tokns': did you mean 'max_tokens'"),
    ("bench --suite own.jsonl", "own.jsonl:1: field 'max_tokens'"),
    ("generate x --logprobs 3", "add --json"),
    ("generate x --set novalue", "key=value"),
    ("generate x --set a=1 --set a=2", "twice"),
    ("generate x --set method=none", "use --method"),
    ("generate x --method suffix --draft-model zoo:draft", "does not apply to method 'suffix'"),
    ("generate x --method draft_model --model gpt2", "--draft-model"),
    ("generate x --method draft_model --draft-model a --set model=b", "contradicts"),
    ("generate x --dtype float23", "did you mean 'float32'"),
    ("generate x --device gpu", "device='gpu' is unknown"),
    ("generate x --threads 0", "--threads"),
    ("generate x --system s --raw", "--system"),
    ("generate x --prompts good.jsonl", "keep one"),
    ("generate --prompts nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("generate --prompts half.jsonl", "half.jsonl:2: not valid JSON"),
    ("generate --prompts field.jsonl", "field.jsonl:2: field 'prompt'"),
    ("generate --prompts empty.jsonl", "no prompts"),
    ("generate --prompts latin.jsonl", "latin.jsonl:1: not UTF-8"),
    ("bench --methods ngrm", "did you mean 'ngram'"),
    ("bench --suite half.jsonl", "half.jsonl:2"),
    ("bench --repeats 0", "--repeats"),
    ("bench --limit 0", "--limit"),
    ("bench --out no/out.json", "there is no folder no"),
    ("bench --csv no/out.csv", "--csv no/out.csv: there is no folder no"),
    ("bench --markdown .", "--markdown .: this is a folder"),
    ("bench --report no/out.html", "--report no/out.html: there is no folder no"),
    ("bench --out a.html --report a.html", "choose two files"),
    ("bench --batch-size 1,0", "--batch-size 0"),
    ("bench --prompt-tokens 128,many", "--prompt-tokens '128,many'"),
    ("bench --data .", "--data ."),
    ("bench --suite good.jsonl --data .", "--data ."),
    ("train eagle --target zoo:draft --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
    ("train features --target zoo:draft --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
    ("generate x --model zoo:hybri", "did you mean 'hybrid'"),
    ("bench --set ngram=3", "METHOD.key=value"),
    ("bench --model ./m --methods draft_model", "no such folder"),
    ("certify --method ngrm", "did you mean 'ngram'"),
    ("certify", "--method"),
    ("methods ngrm", "did you mean 'ngram'"),
    ("zoo path bas", "did you mean 'base'"),
    ("generates x", "did you mean 'generate'"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[command.replace(LONG, "a…") for command, _ in BAD])
def test_one_line_and_exit_code_2(command, message, files, capsys):
    assert_refused(command, message, capsys)


ENVIRONMENT = [
    ("FORETOKEN_ZOO", "good.jsonl", "zoo list", "FORETOKEN_ZOO=good.jsonl: this is a file"),
    ("FORETOKEN_ZOO", "zoo", "zoo list", "training.json: cannot be read"),
    ("FORETOKEN_ZOO", "zoo", "generate x --model zoo:mamba", "training.json: cannot be read"),
]


@pytest.mark.parametrize(("name", "value", "command", "message"), ENVIRONMENT, ids=[each[3] for each in ENVIRONMENT])
def test_a_variable_of_the_environment_that_is_wrong(name, value, command, message, files, monkeypatch, capsys):
    if name == "FORETOKEN_ZOO":
        monkeypatch.setattr(zoo, "_HERE", files / "nothing is bundled")
    (files / "zoo" / "mamba").mkdir(parents=True)
    (files / "zoo" / "mamba" / "config.json").write_text("{}")
    (files / "zoo" / "mamba" / "training.json").write_text("{")
    monkeypatch.setenv(name, value)
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_empty_method_is_no_method(capsys):
    assert main(["generate", "x", "--method", ""]) == 2
    assert "--method is empty" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["", " \n", "\udcff"])
def test_a_prompt_that_is_none(prompt, capsys):
    assert main(["generate", prompt]) == 2
    assert "the prompt" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\n", "is empty"), (b"\xff", "not UTF-8")])
def test_standard_input_that_is_no_prompt(content, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["generate"]) == 2
    assert message in capsys.readouterr().err


def test_missing_ray_is_reported_before_a_file_is_made(files, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    (files / "asked.jsonl").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    before = sorted(files.iterdir())
    assert main(["batch", "asked.jsonl", "--ray"]) == 2
    assert "foretoken[ray]" in capsys.readouterr().err
    assert sorted(files.iterdir()) == before


def test_report_without_matplotlib_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--report", str(tmp_path / "r.html")]) == 2
    assert "foretoken[report]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    yield " ".join(path)
    if hasattr(command, "list_commands"):  # those of train are collected on the first look-up
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize("command", list(_commands(typer.main.get_command(app))))
def test_every_command_teaches(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: foretoken" in out
    if command != "zoo list":
        assert "Example" in out
    assert not re.search(r"<(str|path|int|float|list)\b", out), "an argument's type is shown as Python calls it"
    assert not re.search(r"--[a-z-]+\u2026", out), "an option's name is cut at 80 columns"
    flags = [line for line in out.splitlines() if "<bool>" in line and "--help" not in line]
    assert not flags, "a switch looks as if it took a value"


def test_help_wraps_at_the_terminal_width_and_keeps_brackets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert 'pip install "foretoken[serve]"' in out
    for line, following in itertools.pairwise(out.partition("Examples")[0].splitlines()[3:]):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + len(following.split()[0]) > 78, "a line ends before the terminal does"


def test_methods_as_text_and_json(capsys):
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^\* (\w+)", text, flags=re.MULTILINE) == [
        "auto",
        "draft_model",
        "ngram",
        "suffix",
        "suffix_first",
        "needs",
    ]
    assert main(["methods", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for entry in entries:
        assert set(entry) == {"name", "kind", "summary", "paper", "promise", "needs", "weights"}
        assert entry["name"] in text
    assert {"none", "draft_model", "ngram", "suffix", "match"} <= {entry["name"] for entry in entries}


def test_options_of_a_method(capsys):
    assert main(["methods", "ngram", "--json"]) == 0
    options = {each["name"]: each for each in json.loads(capsys.readouterr().out)["options"]}
    assert options["prompt_lookup_max"]["default"] == 4
    assert "Longest n-gram" in options["prompt_lookup_max"]["help"]
    assert "num_speculative_tokens" in options
    assert main(["methods", "draft_model"]) == 0
    assert "model = required" in capsys.readouterr().out


def test_zoo(capsys):
    assert main(["zoo", "list"]) == 0
    assert "zoo:base" in capsys.readouterr().out
    assert main(["zoo", "path", "zoo:draft"]) == 0
    assert capsys.readouterr().out.strip().endswith("draft")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("foretoken ")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("medusa", "'eagle' is the nearest"), ("lookahead", "'ngram' and 'suffix'"), ("prompt-lookup", "called 'ngram'")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, nearest, capsys):
    for command in (["methods", name], ["generate", "x", "--method", name]):
        assert main(command) == 2
        assert nearest in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--help", "generate --help", "train eagle --help", "methods"])
def test_a_reader_that_went_away_is_no_failure(command, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", pipe)
    try:
        assert main(command.split()) == 0
    finally:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()  # the rest of its content is lost, as at the end of a process
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["--help", "--version", "methods", "zoo list", "bench --help"])
def test_a_full_disk_is_reported(command, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command.split()) == 1
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err in (
        "error: cannot write: No space left on device\n",
        "error: cannot write to stdout: No space left on device\n",
    )


def test_what_a_shell_closed_is_neither_written_to_nor_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["methods", "nope"]) == 2
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate"]) == 2
    assert "is empty" in capsys.readouterr().err


def test_ctrl_c_while_the_command_is_imported(monkeypatch):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "foretoken.cli.main", Interrupted("foretoken.cli.main"))
    assert run() == 130


def test_closed_output_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["methods", "--json"]) == 1
    assert "cannot write to stdout: it is closed" in capsys.readouterr().err


PLACES = [
    "generate x --model",
    "generate --prompts",
    "chat --model",
    "serve",
    "batch good.jsonl --model",
    "batch good.jsonl --out",
    "bench --model",
    "bench --out",
    "bench --csv",
    "bench --suite",
    "certify --method none --model",
    "train draft --out o --target",
    "train draft --target zoo:draft --out",
    "datastore build good.jsonl --out o --model",
    "datastore info",
    "rag --passages good.jsonl --questions good.jsonl --model",
    "rag --questions good.jsonl --passages",
]
IMPOSSIBLE = {"no-user": "~nouser/x", "zero": "a\0b", "surrogate": "\ud800", "lines": "a\nb"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.parametrize("place", PLACES)
def test_a_path_or_a_model_that_there_cannot_be_is_the_users_mistake(place, kind, files, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*place.split(), IMPOSSIBLE[kind]]) in (1, 2)
    said = capsys.readouterr().err
    assert "error: " in said
    assert "should not happen" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", ["generate x --model ~nouser/x", "batch good.jsonl --model ~nouser/x"])
def test_a_user_that_there_is_not_is_named(command, files, capsys):
    assert main(command.split()) == 2
    assert "'~nouser'" in capsys.readouterr().err
