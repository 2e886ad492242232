"""``foretoken rag`` as a person uses it."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main
from helpers.knowledge import QUESTIONS, passages


@pytest.fixture
def files(tmp_path):
    known, asked = tmp_path / "passages.jsonl", tmp_path / "questions.jsonl"
    known.write_text("".join(json.dumps({"id": each.name, "text": each.text}) + "\n" for each in passages(12)))
    asked.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in QUESTIONS))
    return ["rag", "--passages", str(known), "--questions", str(asked), "--dtype", "float32", "--threads", "1"]


def answers(capsys, *arguments):
    assert main([*arguments, "--json", "--max-tokens", "10"]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return [json.loads(line) for line in out.out.splitlines()]


@pytest.mark.parametrize("retriever", ["bm25", "flat", "knn"])
def test_both_methods_write_one_text(files, capsys, tmp_path, retriever):
    index = ["--index", str(tmp_path / "index")] if retriever == "flat" else []
    plain, guessed = (
        answers(capsys, *files, "--retriever", retriever, "--method", method, *index, "--set", "stride=2")
        for method in ("sequential", "ralmspec")
    )
    assert [each["token_ids"] for each in guessed] == [each["token_ids"] for each in plain]
    assert [each["prompt"] for each in plain] == list(QUESTIONS)
    for each in plain + guessed:
        assert each["promise"] == "same text"
        assert each["error"] is None
        assert {"tokens_per_second", "finish_reason", "retrievals", "rollbacks", "recomputed_rows"} <= set(each)


def test_a_person_gets_text_and_one_line(files, capsys):
    assert main([*files, "--retriever", "bm25", "--max-tokens", "6", "--limit", "1"]) == 0
    out = capsys.readouterr()
    assert out.out.strip()
    assert len(out.err.splitlines()) == 1
    assert "searches of" in out.err


def test_mistakes_are_one_line(files, capsys, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for arguments, says in [
        (["--retriever", "bm52"], "did you mean 'bm25'"),
        (["--method", "ralm"], "did you mean 'ralmspec'"),
        (["--set", "strid=2"], "did you mean 'stride'"),
        (["--set", "stride=0"], "stride=0"),
        (["--retriever", "bm25", "--set", "neighbours=3"], "neighbours=… has no effect with --retriever bm25"),
        (["--retriever", "bm25", "--index", "x"], "--index has no effect with --retriever bm25"),
        (["--retriever", "knn", "--encoder", "x"], "--encoder has no effect with --retriever knn"),
        (["--passages", str(tmp_path / "empty.jsonl")], "no passages in this file"),
        (["--passages", str(tmp_path / "nowhere.jsonl")], "no such file"),
        (["--questions", str(tmp_path / "empty.jsonl")], "no prompts in this file"),
        (["--model", "zoo:bse"], "did you mean 'base'"),
    ]:
        given = files.copy()
        if arguments[0] in files:
            given[files.index(arguments[0]) + 1] = arguments[1]
        else:
            given += arguments
        code = main(given)
        error = capsys.readouterr().err
        assert code == 2, arguments
        assert says in error, (arguments, error)
        assert len(error.splitlines()) == 1
