"""``foretoken train diffuspec``: a network that then drafts as training foretold, stops and stores; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foretoken.cli.main import main
from foretoken.methods.diffuspec import train as diffuspec
from foretoken.methods.diffuspec.command import Config
from foretoken.methods.diffuspec.network import BlockNetwork
from foretoken.methods.diffuspec.trigram import FILE, Trigram
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is
from foretoken.train.feature_heads import run as training
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from helpers.head_training import BLOCK, STEP, assert_foretold, enter, fill, small_steps
from helpers.mistakes import assert_one_line
from helpers.stored_features import Wanted, extract
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_steps(monkeypatch, diffuspec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # so many that the draws' mean at T = 1 lies within 0.05 of its expectation: 0.06 a standard error with four of them
    return fill(tmp_path_factory.mktemp("folder"), 32, (("target", 64), ("other", 96)))


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    enter(folder, monkeypatch)


def train(arguments):
    return main(["train", *arguments.split()])


def test_a_network_of_the_targets_own_words_drafts(capsys):
    command = (
        f"diffuspec --target target --corpus mine.jsonl --tokens {4 * STEP} --draft-vocab-size 60 --slots 3 --seed 1 "
        "--suite ask.jsonl --threads 1 --out head --json"
    )
    assert train(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record == json.loads(Path("head/training.json").read_text())
    assert (record["steps"], record["draft_vocab_size"], record["slots"]) == (4, 60, 3)
    assert {source["name"]: source["share"] for source in record["mixture"]} == {"own_words": 1.0}
    assert_foretold(record, ("greedy", "T=1"))
    assert "greedy:" in err
    assert BlockNetwork.load(Path("head")).config.target_fingerprint == fingerprint(Path("target"))
    assert record["kept"]["trigram_bytes"] == (Path("head") / FILE).stat().st_size
    assert float(Trigram.load(Path("head") / FILE, VOCAB_SIZE).row(5, 6).sum()) == pytest.approx(1.0, abs=1e-5)
    generate = (
        "generate Hi --model target --method diffuspec --set head=head --max-tokens 6 --threads 1 --dtype float32"
    )
    assert main(generate.split()) == 0
    assert main(generate.replace("--model target", "--model other").split()) == 1
    assert "not for 'other' as it is now: train one with 'foretoken train diffuspec" in capsys.readouterr().err


def run(out, steps, **options):
    settings = {"bounds": Bounds(tokens=steps * STEP), **options}
    sources = [] if "features" in settings else [parse("mine.jsonl")]
    config = Config(target="target", out=Path(out), slots=3, draft_vocab_size=60, own_words=0.0)
    return training.run(diffuspec.training(config), sources, Path(out), **settings)


def test_it_learns_stops_and_goes_on():
    whole = run("whole", 40)
    losses = [loss for _, _, loss in whole["curve"]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    seen = []

    def stop(progress):
        seen.append(progress.step)
        if len(seen) == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("parts", 40, report=stop, checkpoint_every=1e-9)
    run("parts", 40)
    ours, theirs = BlockNetwork.load(Path("parts")), BlockNetwork.load(Path("whole"))
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors().values(), theirs.tensors().values(), strict=True))
    assert (Path("parts") / FILE).read_bytes() == (Path("whole") / FILE).read_bytes()


def test_stored_features_teach():
    loaded = load_as_is("target", device="cpu")
    generator = torch.Generator().manual_seed(2)
    blocks = [torch.randint(4, 101, (BLOCK - number % 3,), generator=generator) for number in range(40)]
    wanted = Wanted((1, 2, "final"), 0, "float32")
    extract(loaded.model, blocks, Path("store"), wanted, target=loaded.fingerprint)
    record = run("from-store", 4, features=Path("store"))
    assert record["own_words"] == 0
    assert record["mixture"][0]["name"] == "features"
    assert Trigram.load(Path("from-store") / FILE, VOCAB_SIZE).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--target target --corpus mine.jsonl --out file", 2, "this is a file"),
        ("--target target --corpus mine.jsonl --out target", 2, "another model lies there"),
        ("--target target --corpus mine.jsonl --out new --slots 65", 2, "--slots 65 must be"),
        ("--target target --corpus mine.jsonl --out new --layers 33", 2, "--layers 33"),
        ("--target target --corpus mine.jsonl --out new --draft-vocab-size 500", 2, "target has 101 tokens"),
        ("--target target --corpus mine.jsonl --out new --mlp-width 40", 2, "--mlp-width 40"),
        ("--target target --corpus mine.jsonl --out new --own-words 2", 2, "--own-words 2"),
        ("--target target --corpus mine.jsonl --out new --features store", 2, "--features holds its text already"),
        ("--target nobody --corpus mine.jsonl --out new", 1, "nobody"),
    ],
)
def test_mistakes_end_in_one_line(arguments, code, message, capsys):
    assert train(f"diffuspec {arguments} --suite ask.jsonl --tokens 10") == code
    assert_one_line(capsys, message)
    assert not Path("new").exists()
