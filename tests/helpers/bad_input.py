"""Mistakes at the command line: files with mistakes in them, and what an answer to a mistake looks like."""

from __future__ import annotations

import pytest

from foretoken.cli.main import main

LONG = "a" * 300


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


def assert_refused(command, message, capsys):
    """One line with the message on stderr, exit code 2, and nothing else."""
    if "--model ./m" in command:
        message = "--draft-model"
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.lower() in err.lower()
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) <= 2
