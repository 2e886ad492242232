"""Mistakes at the lab's commands: one clear line, the right exit code, no traceback, and nothing loaded for it."""

from __future__ import annotations

import pytest

from helpers import bad_input
from helpers.bad_input import LONG, assert_refused

files, no_model = bad_input.files, bad_input.no_model  # fixtures

BAD = [
    ("bench --model zoo:draft verify", "--model precedes 'verify'"),
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
    (f"eval --task code --save-outputs {LONG}", "no file or model has such a name"),
    ("train base --recipe base --compile yes", "'--compile': 'yes' is not one of 'auto', 'on', 'off'"),
    ("eval --task code --save-outputs good.jsonl --against-outputs good.jsonl", "--against-outputs is this file"),
    ("eval --task arithmetic --limit 99999999999", "at most 100000"),
    ("bench verify --threads 100000", "--threads 100000"),
    ("bench verify --context 99999999999", "--context 99999999999"),
    ("bench serve --url http://localhost:99999", "write http://HOST:PORT"),
    ("bench serve --url http://localhost:80+top_k", "write http://HOST:PORT"),
    ("bench serve --url http://", "write http://HOST:PORT"),
    ("analyze acceptance --samples 99999999999", "--samples"),
    ("analyze scaling --out o --tokens 1e999", "--tokens 1e999"),
    ("analyze scaling --out o --tokens nan", "--tokens nan"),
    ("eval --task code --method=", "--method is empty"),
    ("eval --list --limit 5 --json", "leave --limit out"),
    ("eval --task list --model x", "leave --model out"),
    (
        "calibrate vocabulary --model zoo:draft --corpus good.jsonl --size 9 --out o --writer raw --temperature 1",
        "--temperature 1 does nothing with --writer raw",
    ),
    (
        "calibrate vocabulary --model zoo:draft --corpus good.jsonl --size 9 --out good.jsonl/kept",
        "/good.jsonl is a file",
    ),
    ("bench --suite sprintr", "did you mean 'sprinter'"),
    ("bench --suite self_speculation --model zoo:base", "use --data DIR"),
    ("bench serve --url http://localhost:1 --out no/out.json", "there is no folder no"),
    ("analyze scaling --out o --data . --corpus good.jsonl", "--data . and --corpus good.jsonl"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[command.replace(LONG, "a…") for command, _ in BAD])
def test_one_line_and_exit_code_2(command, message, files, capsys):
    assert_refused(command, message, capsys)


def test_a_data_folder_that_is_not_there(files, monkeypatch, capsys):
    monkeypatch.setenv("FORETOKEN_DATA", "nowhere")
    assert_refused("eval --task gsm8k", "FORETOKEN_DATA=nowhere", capsys)
