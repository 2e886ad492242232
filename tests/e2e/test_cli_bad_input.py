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


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    """None of these mistakes may reach the engine."""
    import foretoken

    def refuse(*args, **options):
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(foretoken, "LLM", refuse)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"\n')
    (tmp_path / "field.jsonl").write_text('{"prompt": "one"}\n{"prompt": 3}\n')
    (tmp_path / "keys.jsonl").write_text('{"prompt": "one", "max_tokns": 3}\n')
    (tmp_path / "scores.jsonl").write_text('{"prompt": "a"}\n{"prompt": "one", "logprobs": 3}\n')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one", "prompt_logprobs": 0}\n')
    (tmp_path / "elsewhere.jsonl").write_text('{"prompt": "one", "max_completion_tokens": 3}\n')
    (tmp_path / "model.jsonl").write_text('{"prompt": "one", "model": "zoo:base"}\n')
    (tmp_path / "own.jsonl").write_text('{"prompt": "one", "max_tokens": 3}\n')
    (tmp_path / "ids.jsonl").write_text(
        '{"prompt": "one", "id": "a"}\n{"prompt": "two"}\n{"prompt": "six", "id": "a"}\n'
    )
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    return tmp_path


LONG = "a" * 300
BAD = [
    ("generate x --method ngrm", "did you mean 'ngram'"),
    ("generate x --method match", "is a verifier"),
    ("--version extra", "--version prints the version, and does nothing else: leave 'extra' out"),
    ("generate --prompts ids.jsonl", "ids.jsonl:3: has the id 'a' of ids.jsonl:1"),
    ("generate x --methd none", "--method"),
    ("bench --model zoo:draft verify", "--model stands before 'verify': write foretoken bench verify --model"),
    ("bench --limit 1 serve --url http://localhost:1", "--limit stands before 'serve'"),
    ("generate x --temperature 1e300", "--temperature 1e+300 must be a number in [0, 1e+300)"),
    ("train eagle --target zoo:draft --out o --device gpu", "device='gpu' is unknown"),
    ("eval --text good.jsonl --seed 5", "--seed is for tasks"),
    ("bench verify --plans dense,spars", "did you mean 'sparse'"),
    ("bench verify --plans dense,sparse,dense", "twice"),
    ("bench verify --plans dense+verification.budget=0.2", "no settings"),
    ("bench verify --plans sparse+budget=0.2", "for example verification.budget=0.2"),
    ("bench verify --set budget=0.2", "for example verification.budget=0.2"),
    ("bench verify --set verification.budgt=0.2", "did you mean 'budget'"),
    ("bench verify --set verification.budget=2", "verification.budget=2"),
    ("bench verify --set verification.confirm=4", "between forwards"),
    ("bench verify --context 0", "--context 0"),
    ("bench verify --rows 4,x", "--rows '4,x'"),
    ("bench verify --fill rnd", "--fill 'rnd'"),
    ("bench verify --model shape:100", "did you mean '100m'"),
    ("bench verify --model shape:16m --dtype float16", "bfloat16 or float32"),
    ("bench verify --out nowhere/out.json", "no folder nowhere"),
    (f"generate x --model {LONG}", "no file has a name of this length"),
    (f"generate x --draft-model {LONG}", "no file or model has such a name"),
    (f"eval --task code --save-outputs {LONG}", "no file has a name of this length"),
    (f"train eagle --target zoo:draft --out {LONG}", "no file has a name of this length"),
    ("generate x --model zoo:bse", "did you mean 'base'"),
    ("generate x --model ./nowhere", "no such folder"),
    ("generate x --temperature -1", "--temperature -1.0"),
    ("generate x --temperature nan", "--temperature nan"),
    ("train base --recipe base --compile yes", "'--compile': 'yes' is not one of 'auto', 'on', 'off'"),
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
    ("eval --task code --save-outputs good.jsonl --against good.jsonl", "--against is this file"),
    ("datastore build good.jsonl good.jsonl --model zoo:draft --out o", "good.jsonl twice"),
    ("datastore build good.jsonl --model zoo:draft --out good.jsonl", "is this file"),
    ("eval --task arithmetic --limit 99999999999", "at most 100000"),
    ("certify --method ngram --threads 100000", "--threads 100000"),
    ("train eagle --target zoo:draft --out o --threads 100000", "--threads 100000"),
    ("bench verify --threads 100000", "--threads 100000"),
    ("bench verify --context 99999999999", "--context 99999999999: at most"),
    ("bench --repeats 99999999999", "--repeats"),
    ("bench serve --url http://localhost:99999", "write http://HOST:PORT"),
    ("bench serve --url http://localhost:80+top_k", "write http://HOST:PORT"),
    ("bench serve --url http://", "write http://HOST:PORT"),
    ("analyze acceptance --samples 99999999999", "--samples"),
    ("analyze scaling --out o --tokens 1e999", "--tokens 1e999: whole numbers"),
    ("analyze scaling --out o --tokens nan", "--tokens nan: whole numbers"),
    (
        "calibrate vocabulary --model zoo:draft --corpus good.jsonl --size 9 --out o --writer raw --temperature 1",
        "--temperature 1 does nothing with --writer raw",
    ),
    (
        "calibrate vocabulary --model zoo:draft --corpus good.jsonl --size 9 --out good.jsonl/kept",
        "/good.jsonl is a file; name a folder to make",
    ),
    ("serve --model zoo:draft", "written without --model"),
    ("serve --allow-origin nope", "--allow-origin nope: write http://HOST:PORT"),
    ("serve --allow-origin=", "--allow-origin is empty"),
    ("generate x --temp 0.5", "is written --temperature here"),
    ("generate x --verifier block", "is written --set verifier=NAME here"),
    ("eval --task code --method=", "--method is empty"),
    ("train eagle --target zoo:draft --out=", "--out is empty"),
    ("generate x --n 1000000000", "--n 1000000000"),
    ("generate x --model good.jsonl", "is a file"),
    ("generate x --max-model-len 1", "--max-model-len"),
    ("generate --prompts scores.jsonl", "scores.jsonl:2: logprobs are shown in the JSON objects only: add --json"),
    ("generate --prompts prompts.jsonl", "prompts.jsonl:1: prompt_logprobs are shown in the JSON objects only"),
    ("generate --prompts elsewhere.jsonl", "unknown field 'max_completion_tokens': it is called max_tokens"),
    ("generate --prompts model.jsonl", "unknown field 'model': it is one for all prompts: give --model"),
    ("eval --list --limit 5 --json", "--list lists names, and does nothing else: leave --limit out"),
    ("eval --task list --model x", "--task list lists names, and does nothing else: leave --model out"),
    ("bench --list-suites --seed 3", "--list-suites lists names, and does nothing else: leave --seed out"),
    ("generate --prompts keys.jsonl", "keys.jsonl:1: unknown field 'max_tokns': did you mean 'max_tokens'"),
    ("bench --suite own.jsonl", "own.jsonl:1: field 'max_tokens' is for 'foretoken generate --prompts'"),
    ("generate x --logprobs 3", "add --json"),
    ("generate x --set novalue", "key=value"),
    ("generate x --set a=1 --set a=2", "twice"),
    ("generate x --set method=none", "use --method"),
    ("generate x --method suffix --draft-model zoo:draft", "does not go with method 'suffix'"),
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
    ("bench --suite sprintr", "did you mean 'sprinter'"),
    ("bench --suite self_speculation", "name it with --data DIR"),
    ("bench --suite half.jsonl", "half.jsonl:2"),
    ("bench --repeats 0", "--repeats"),
    ("bench --limit 0", "--limit"),
    ("bench --out no/out.json", "there is no folder no"),
    ("bench --csv no/out.csv", "--csv no/out.csv: there is no folder no"),
    ("bench --markdown .", "--markdown .: this is a folder"),
    ("bench --report no/out.html", "--report no/out.html: there is no folder no"),
    ("bench serve --url http://localhost:1 --out no/out.json", "there is no folder no"),
    ("bench --out a.html --report a.html", "choose two files"),
    ("bench --batch-size 1,0", "--batch-size 0"),
    ("bench --prompt-tokens 128,many", "--prompt-tokens '128,many'"),
    ("bench --data .", "--data .: only named suites read the corpora"),
    ("bench --suite good.jsonl --data .", "--data .: only named suites read the corpora"),
    ("train eagle --target zoo:draft --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
    ("train features --target zoo:draft --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
    ("analyze scaling --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
    ("generate x --model zoo:hybri", "did you mean 'hybrid'"),
    ("generate x --model zoo:moe-tasks", "it is called 'moe' now"),
    ("generate x --num-speculative-tokens 3", "is written --set num_speculative_tokens=N here"),
    ("generate x --max-new-tokens=3", "is written --max-tokens here"),
    ("bench --speculative-model zoo:draft", "is written --draft-model here"),
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
    if "--model ./m" in command:
        message = "--draft-model"
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.lower() in err.lower()
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) <= 2


ENVIRONMENT = [
    ("FORETOKEN_DATA", "nowhere", "eval --task gsm8k", "FORETOKEN_DATA=nowhere: there is no such folder"),
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


def test_ray_that_is_not_there_is_said_before_a_file_is_made(files, monkeypatch, capsys):
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
    if hasattr(command, "list_commands"):  # those of train are collected when somebody looks for them
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


def test_help_is_broken_where_the_terminal_ends_and_shows_what_is_in_brackets(capsys, monkeypatch):
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
    assert "longest n-gram" in options["prompt_lookup_max"]["help"]
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
    [("medusa", "'eagle' comes nearest"), ("lookahead", "'ngram' and 'suffix'"), ("prompt-lookup", "called 'ngram'")],
)
def test_a_name_of_the_field_is_answered_with_what_comes_nearest(name, nearest, capsys):
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
            pipe.close()  # what was left in it goes nowhere, as at the end of a process
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["--help", "--version", "methods", "zoo list", "bench --help"])
def test_a_full_disk_is_said(command, monkeypatch, capsys):
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


def test_closed_output_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["methods", "--json"]) == 1
    assert "cannot write to stdout: it is closed" in capsys.readouterr().err
