"""``foretoken train draft`` as a person runs it, and mistakes in the options that all trainings have."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from foretoken.cli.main import main
from foretoken.train import acceptance, distil, mixture, outputs
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

# the commands are the real ones, of recipes with small steps
SMALL = {"batch": 4, "micro_batch": 2}
BLOCK = 64
STEP = SMALL["batch"] * BLOCK  # tokens


@pytest.fixture(autouse=True)
def small_recipes(monkeypatch):
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 16)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 1000)
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 16)
    schedule = replace(distil.RECIPE.schedule, **SMALL)
    monkeypatch.setattr(distil, "RECIPE", replace(distil.RECIPE, block=BLOCK, schedule=schedule))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    lines = [
        {"prompt": f"Tom has {n} marbles. He buys {n + 3} more. How many?", "response": f"He has {2 * n + 3}."}
        for n in range(400)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tom has 1000 marbles. He buys 1003 more. How many?"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "fields.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    (tmp_path / "blank.txt").write_text("\n \n" * 50)
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    return tmp_path


def test_a_draft_is_distilled_judged_and_used(folder, capsys):
    command = (
        f"train draft --target zoo:draft --corpus mine.jsonl --suite prompts.jsonl --num-speculative-tokens 3 "
        f"--out my-draft --tokens {6 * STEP} --threads 1 --seed 2 --json"
    )
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads((folder / "my-draft" / "training.json").read_text())
    assert (record["objective"], record["teacher"], record["seed"]) == ("kl", "zoo:draft", 2)
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"mine": 0.25, "own_words": 0.75}
    assert record["acceptance"]["before"] is None
    for mode in ("greedy", "T=1"):
        found = record["acceptance"]["after"][mode]
        assert 1 <= found["tokens_per_step"] <= 4
        assert len(found["acceptance_by_position"]) == 3
        assert found["tokens_per_step"] == pytest.approx(found["accepted_length"] + 1, abs=0.3)
        assert f"{mode}: {found['tokens_per_step']:.2f} tokens per step; accepted by position: " in err

    assert main(["generate", "Tom has 2 marbles.", "--model", "my-draft", "--max-tokens", "4", "--threads", "1"]) == 0
    again = "--model zoo:draft --method draft_model --draft-model my-draft --max-tokens 4 --threads 1"
    assert main(["generate", "Tom has 2 marbles.", *again.split()]) == 0
    capsys.readouterr()

    more = command.replace("--out my-draft", "--out better --from my-draft --loss tv --own-words 0 --on-policy 0.5")
    assert main(more.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["acceptance"]["before"] is not None
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"mine": 0.5, "on_policy": 0.5}
    assert (record["objective"], record["start"]) == ("tv", "my-draft")


def test_a_draft_for_a_target_with_another_chat_format(folder, capsys):
    save_model("llama", folder / "target", max_position_embeddings=512, vocab_size=112)
    command = (
        f"train draft --target target --corpus mine.jsonl --suite prompts.jsonl --out my-draft --tokens {2 * STEP} "
        "--threads 1"
    )
    assert main(command.split()) == 0, capsys.readouterr().err
    written = [json.loads(line) for line in (folder / "my-draft" / "run" / "own_words.jsonl").open()]
    assert written
    assert not any("<|" in line["document"] for line in written)
    config = json.loads((folder / "my-draft" / "config.json").read_text())
    assert config["vocab_size"] == 112
    assert config["eos_token_id"] in (2, [2])


BAD = [
    ("eagle --target zoo:draft --out . --corpus mine.jsonl", 2, "of no training; name a folder to make"),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --loss kll", 2, "--loss kll: did you mean 'kl'?"),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --own-words 2", 2, "--own-words 2.0: a share must be"),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --on-policy 0.5", 2, "add up to more than 1"),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --suite none.jsonl", 2, "none.jsonl: no such file"),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --num-speculative-tokens 0", 2, "--num-speculative"),
    ("draft --target zoo:draft --out other --corpus mine.jsonl", 2, "--out other: another model lies there"),
    ("draft --target nothing --out out --corpus mine.jsonl", 1, "'nothing' is a folder without config.json"),
    ("eagle --target zoo:draft --out file/out --corpus mine.jsonl", 2, "file is a file; name a folder to make"),
    ("eagle --target zoo:draft --out out --corpus mine.jsonl --from x", 2, "no such option: --from"),
    (
        "eagle --target zoo:draft --out out --corpus mine.jsonl --start file",
        1,
        "file: this is a file, not the folder of",
    ),
    ("draft --target zoo:draft --out out --corpus mine.jsonl --seed 9223372036854775808", 2, "--seed 92233720368547"),
    ("eagle --target zoo:draft --out out --corpus mine.jsonl --mlp-width 1000000000", 2, "--mlp-width 1000000000"),
    ("longspec --target zoo:draft --out out --corpus mine.jsonl --levels 100000", 2, "--levels 100000"),
    ("judge --target zoo:draft --draft-model zoo:draft --out out --tail x", 2, "--tail x: must be mask or negative"),
    ("draft --target ./none --out out --corpus mine.jsonl", 1, "./none"),
    ("draft --target zoo:drft --out out --corpus mine.jsonl", 2, "did you mean 'draft'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=[arguments for arguments, _, _ in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(folder, capsys, arguments, code, message):
    before = sorted(path.name for path in folder.iterdir())
    assert main(["train", *arguments.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert "internal" not in err
    assert len(err.strip().splitlines()) <= 2
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("empty.jsonl", "corpus 'empty' is empty: it holds no document to train on"),
        ("fields.jsonl", "fields.jsonl:2: no fields of a known document type (found 'txt'); known: messages; prompt"),
    ],
)
def test_a_corpus_that_cannot_be_used(folder, capsys, corpus, message):
    assert main(["train", "draft", "--target", "zoo:draft", "--out", "out", "--corpus", corpus, "--tokens", "64"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *estimate, error = err.strip().splitlines()
    assert message in error
    assert "Traceback" not in err
    assert [line for line in estimate if not line.startswith("training ")] == []
    assert not list((folder / "out").glob("*.json"))


def test_a_draft_with_another_vocabulary(folder, capsys):
    save_model("llama", folder / "other")
    command = "train draft --target zoo:draft --from other --corpus mine.jsonl --suite prompts.jsonl --out out"
    assert main(command.split()) == 1
    err = capsys.readouterr().err
    assert "vocabular" in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "out").exists()
