"""``foretoken datastore`` and the method ``rest`` as a person uses them, over a small corpus."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main

PROMPT = "What is the secret of the blue house on the hill?"
ANSWER = "The secret of the blue house on the hill is that nobody ever lived in it."


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datastore")
    records = [{"prompt": PROMPT, "response": ANSWER}, {"text": "A second text."}]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    corpus, out = str(folder / "corpus.jsonl"), str(folder / "store")
    assert main(["datastore", "build", corpus, "--model", "zoo:base", "--out", out]) == 0
    return folder / "store"


def test_rest_gives_the_text_of_plain_decoding(store, capsys):
    shared = ("--model", "zoo:base", "--dtype", "float32", "--threads", "1", "--max-tokens", "24", "--json", "--raw")
    rest = ("--method", "rest", "--set", f"datastore={store}", "--set", "min_match=1")
    found = []
    for more in (("--method", "none"), rest, (*rest, "--set", "num_speculative_tokens=4")):
        assert main(["generate", f"{PROMPT} {ANSWER[:40]}", *shared, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted, forced = found
    assert drafted["token_ids"] == plain["token_ids"]
    assert forced["token_ids"] == plain["token_ids"]
    assert forced["num_draft_tokens"] > 0


def test_info_and_append(store, tmp_path, capsys):
    assert main(["datastore", "info", str(store), "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 2
    assert found["model"] == "zoo:base"
    more = tmp_path / "more.txt"
    more.write_text("A third text.\n")
    assert main(["datastore", "append", str(store), str(more), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 3
    assert [entry["files"] for entry in found["history"]] == [["corpus.jsonl"], ["more.txt"]]


def test_mistakes_are_one_line(store, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    corpus = str(store.parent / "corpus.jsonl")
    for arguments, says in [
        (["build", "nowhere.jsonl", "--model", "zoo:base", "--out", "x"], "nowhere.jsonl: no such file"),
        (["build", str(tmp_path), "--model", "zoo:base", "--out", "x"], "this is a folder"),
        (["build", str(empty), "--model", "zoo:base", "--out", str(tmp_path / "x")], "corpus is empty"),
        (["build", corpus, "--model", "zoo:bse", "--out", str(tmp_path / "x")], "did you mean 'base'"),
        (["build", corpus, "--model", "zoo:base", "--out", str(store)], "is a datastore already"),
        (["info", str(tmp_path)], "not a datastore"),
        (["append", str(tmp_path), corpus], "not a datastore"),
    ]:
        code = main(["datastore", *arguments])
        error = capsys.readouterr().err
        assert code in (1, 2), arguments
        assert says in error, (arguments, error)
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    assert main(["generate", "x", "--model", "zoo:base", "--method", "rest"]) == 2
    assert "foretoken datastore build" in capsys.readouterr().err
