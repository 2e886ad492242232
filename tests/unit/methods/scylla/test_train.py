"""Training of a Scylla head: two stages, stops, stores, and a walk that foretells what serving measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.methods.scylla.command import Config
from foretoken.methods.scylla.network import Scylla
from foretoken.methods.scylla.train import stages, training
from foretoken.models.load import load_as_is
from foretoken.train import acceptance
from foretoken.train.feature_heads.batches import AllPositions
from foretoken.train.feature_heads.expected_length import texts
from foretoken.train.feature_heads.run import run
from foretoken.train.feature_heads.training import BLOCK as LONGEST
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from helpers.head_training import BATCH, shortened
from helpers.stored_features import Wanted, extract
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

BLOCK, STEPS = 24, 3
STEP = BATCH * BLOCK
OPENINGS = ["What is 3 + 1?", "Who was there?", "It is late.", "one two three", "abc abc abc", "Tell me more."]
PROMPTS = [f"{opening} {word}" for opening in OPENINGS for word in ("Yes", "No", "It", "a")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a text."""
    place = tmp_path_factory.mktemp("scylla")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(300)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def small(**options):
    return shortened(training(Config(**options)), BLOCK, micro_batch=2)


def train(folder, out, steps, shape=None, **options):
    settings = {"bounds": Bounds(tokens=steps * STEP), **options}
    shape = {"own_words": settings.pop("own_words", 0.0), "steps": STEPS, "draft_vocab_size": 60, **(shape or {})}
    sources = [] if "features" in settings else [parse(str(folder / "my.jsonl"))]
    made = small(target=str(folder / "target"), out=folder / out, **shape)
    return run(made, sources, folder / out, **settings)


def shaped(**options):
    return Config(target="it", out=Path("none"), **options)


def test_the_stages_and_their_shares():
    first, second = stages(shaped(pretrain=0.6, own_words=0.3))
    assert (first.name, first.share, first.own_words, first.replies_only) == ("pretrain", 0.6, 0.0, False)
    assert (second.name, second.own_words, second.replies_only) == ("sft", 0.3, True)
    assert second.share == pytest.approx(0.4)
    assert [each.name for each in stages(shaped(pretrain=0.0))] == ["sft"]
    assert [each.name for each in stages(shaped(pretrain=1.0))] == ["pretrain"]
    used = AllPositions().used(torch.zeros(2, 5))
    assert used[:, :-1].all()
    assert not used[:, -1].any()


def test_two_stages_learn_stop_and_go_on(folder):
    whole = train(folder, "whole", 24)
    assert [(each["name"], each["steps"]) for each in whole["stages"]] == [("pretrain", 18), ("sft", 6)]
    assert (whole["steps"], whole["tokens"], whole["layers"]) == (24, 24 * STEP, 2)
    losses = [loss for _, _, loss in whole["stages"][0]["curve"]]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    seen = []

    def stop(progress):
        seen.append(progress.step)
        if len(seen) == 21:  # in the second stage
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts", 24, report=stop, checkpoint_every=1e-9)
    assert seen[-1] == 3
    seen.clear()
    parts = train(folder, "parts", 24, report=lambda progress: seen.append(progress.step))
    assert seen == [3, 4, 5, 6]
    assert [each["steps"] for each in parts["stages"]] == [18, 6]
    ours, theirs = Scylla.load(folder / "parts"), Scylla.load(folder / "whole")
    assert ours.config.window == LONGEST  # it never learned to look further
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors().values(), theirs.tensors().values(), strict=True))
    with pytest.raises(ForetokenError, match="holds a run with another description, shape"):
        train(folder, "parts", 24, {"layers": 1})


def test_stored_features_teach(folder):
    loaded = load_as_is(str(folder / "target"), device="cpu")
    generator = torch.Generator().manual_seed(2)
    blocks = [torch.randint(4, 101, (BLOCK - number % 3,), generator=generator) for number in range(40)]
    extract(loaded.model, blocks, folder / "store", Wanted(("final",), 0, "float32"), target=loaded.fingerprint)
    record = train(folder, "from-store", 4, features=folder / "store")
    assert [each["own_words"] for each in record["stages"]] == [0, 0]
    assert record["mixture"][0]["name"] == "features"


@pytest.mark.full_product
def test_training_says_what_serving_then_measures(folder, monkeypatch):
    """Chains: at temperature 0 step for step the same, above it within the error of the mean."""
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 40)
    name = str(folder / "target")
    decode = load_as_is(name, device="cpu").tokenizer.decode
    said = [*texts(name, PROMPTS, 0.0), *texts(name, [f"{prompt} And" for prompt in PROMPTS], 1.0)]
    (folder / "said.jsonl").write_text("".join(json.dumps({"text": decode(each.tokens)}) + "\n" for each in 5 * said))
    shape = {"steps": STEPS, "draft_vocab_size": 80, "pretrain": 0.5, "own_words": 0.0}
    sources = [parse(str(folder / "said.jsonl"))]
    out = folder / "learned"
    made, bounds = small(target=name, out=out, **shape), Bounds(tokens=150 * STEP)
    record = run(made, sources, out, bounds=bounds, prompts=PROMPTS, rate=2.0)
    config = {"method": "scylla", "head": str(out), "tree": False, "num_speculative_tokens": STEPS}
    served, walked = acceptance.measure(name, config, PROMPTS), record["walked"]
    assert served["greedy"]["tokens_per_step"] > 1.08
    assert walked["greedy"]["after"] == pytest.approx(served["greedy"]["tokens_per_step"], rel=0.01)
    assert walked["greedy"]["after"] > walked["greedy"]["before"]
    # two texts of 960 tokens, each in about 550 steps, with a deviation of their lengths of about 0.9
    assert walked["T=1"]["after"] == pytest.approx(served["T=1"]["tokens_per_step"], abs=3 * 0.9 * (2 / 550) ** 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers=0 must be an integer between 1 and 32"),
        ({"layers": 40}, "layers=40 must be an integer between 1 and 32"),
        ({"mlp_width": 50}, "--mlp-width 50: a multiple of 32"),
        ({"pretrain": 1.5}, "pretrain=1.5 must be"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        shaped(**options)


def test_runs_that_cannot_be(folder):
    with pytest.raises(ConfigError, match=r"--own-words 1\.5"):
        train(folder, "bad", 1, own_words=1.5)
    with pytest.raises(ConfigError, match="--draft-vocab-size 500"):
        train(folder, "bad", 1, {"draft_vocab_size": 500})
    with pytest.raises(ConfigError, match="another model lies there"):
        train(folder, "target", 1)
    assert not Path(folder, "bad").exists()
