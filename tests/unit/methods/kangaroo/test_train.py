"""Training of an adapter: the loss by hand, the trained weights, and that stops and feature stores change nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from foretoken.core.errors import ConfigError, ForetokenError, InputError, MismatchError
from foretoken.forward.hidden_states import FINAL
from foretoken.methods.kangaroo import train as kangaroo
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.kangaroo.train import ExitTarget, FullLaw, judge
from foretoken.models.load import load_as_is
from foretoken.train.feature_heads.batches import FromFeatures, FromTokens
from foretoken.train.sources import parse
from foretoken.train.trainer import Bounds
from foretoken_lab.features.stored_blocks import StoredBlocks
from helpers.stored_features import Wanted, extract
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

EXIT, BLOCK, BATCH = 1, 24, 4
STEP = BATCH * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a text, and stores of features of the text."""
    place = tmp_path_factory.mktemp("kangaroo")
    save_model("llama", place / "target")
    lines = [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(300)]
    (place / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    made = kangaroo.recipe

    def small(*arguments):
        recipe = made(*arguments)
        schedule = replace(recipe.schedule, batch=BATCH, micro_batch=2)
        return replace(recipe, block=BLOCK, schedule=schedule)

    monkeypatch.setattr(kangaroo, "recipe", small)


class Replies:
    """Every third position."""

    def used(self, tokens_BT):
        return (torch.arange(tokens_BT.shape[1]) % 3 == 1).expand_as(tokens_BT)


def parts_of(folder):
    loaded = load_as_is(str(folder), device="cpu")
    target = ExitTarget(loaded.model, EXIT)
    torch.manual_seed(0)
    adapter = kangaroo.build(loaded.model.config, target, "it", loaded.fingerprint)
    torch.nn.init.normal_(adapter.o_proj.weight, std=0.05)
    return loaded, target, adapter


def block_of(rows=3, length=20):
    return torch.randint(4, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def train(folder, out, steps, **options):
    settings = {"own_words": 0.0, "bounds": Bounds(tokens=steps * STEP), **options}
    sources = [] if "features" in settings else [parse(str(folder / "my.jsonl"))]
    return kangaroo.run(str(folder / "target"), EXIT, sources, folder / out, **settings)


# gemma2 scales its norms by 1 + weight and caps its logits; gpt2 has positions to run out of and LayerNorms
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_the_loss_by_hand(family, tmp_path):
    loaded, target, adapter = parts_of(save_model(family, tmp_path))
    tokens_BT, replies = block_of(), Replies()
    loss = FullLaw(target, FromTokens(target, replies, (target.exit_layer,)))(adapter, tokens_BT, torch.Generator())

    with torch.no_grad():
        output = loaded.model(input_ids=tokens_BT, output_hidden_states=True)
    p_BTV = output.logits.softmax(-1)
    z_BTV = loaded.model.get_output_embeddings()(adapter(output.hidden_states[EXIT]))
    if family == "gemma2":
        z_BTV = 8.0 * torch.tanh(z_BTV / 8.0)
    by_position_BT = -(p_BTV * z_BTV.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, by_position_BT[:, 1::3].mean(), rtol=1e-5, atol=1e-5)

    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapter.parameters())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    with torch.no_grad():  # nothing of the head's use is left in the model
        assert torch.equal(loaded.model(input_ids=tokens_BT).logits, output.logits)


def test_the_head_on_more_rows_than_the_target_has_positions(tmp_path):
    loaded, target, _ = parts_of(save_model("gpt2", tmp_path))
    tokens_BT = block_of(rows=3, length=100)
    final_BTD = target.states(tokens_BT)[FINAL]
    with torch.no_grad():
        torch.testing.assert_close(
            target.logits(final_BTD.flatten(0, 1)), loaded.model(input_ids=tokens_BT).logits.flatten(0, 1)
        )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_untrained_it_has_the_final_norm(family, tmp_path):
    loaded, target, _ = parts_of(save_model(family, tmp_path))
    adapter = kangaroo.build(loaded.model.config, target, "it", loaded.fingerprint)
    torch.nn.init.zeros_(adapter.o_proj.weight)
    exit_BTD = target.states(block_of())[EXIT]
    torch.testing.assert_close(adapter(exit_BTD), target.parts.final_norm(exit_BTD), rtol=1e-4, atol=1e-4)


def test_no_reply_in_a_micro_batch_moves_nothing(folder):
    _, target, adapter = parts_of(folder / "target")

    class Nothing:
        def used(self, tokens_BT):
            return torch.zeros_like(tokens_BT, dtype=torch.bool)

    lessons = FromTokens(target, Nothing(), (target.exit_layer,))
    loss = FullLaw(target, lessons)(adapter, block_of(), torch.Generator())
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(parameter.grad.any() for parameter in adapter.parameters())


def test_judged_tokens_by_hand(folder):
    loaded, target, adapter = parts_of(folder / "target")

    class Blocks:
        def held_out(self, count):
            return block_of(count)

    lessons = FromTokens(target, Replies(), (target.exit_layer,))
    found = judge({"one": adapter, "other": adapter}, target, lessons, Blocks(), 3, 2)["one"]
    with torch.no_grad():
        output = loaded.model(input_ids=block_of(), output_hidden_states=True)
        z_NV = loaded.model.lm_head(adapter(output.hidden_states[EXIT]))[:, 1::3].flatten(0, 1)
    p_NV, q_NV = output.logits[:, 1::3].flatten(0, 1).softmax(-1), z_NV.softmax(-1)
    assert found["positions"] == len(p_NV)
    assert found["acceptance"] == pytest.approx(float(torch.minimum(p_NV, q_NV).sum(-1).mean()), abs=1e-4)
    assert found["cross_entropy"] == pytest.approx(float(-(p_NV * q_NV.log()).sum(-1).mean()), abs=1e-3)
    ranks_N = (q_NV > q_NV.gather(1, p_NV.argmax(-1)[:, None])).sum(-1)
    for k in (1, 2, 3):
        assert found[f"top_{k}"] == pytest.approx(float((ranks_N < k).float().mean()), abs=1e-4)


def test_training_helps_and_leaves_a_whole_folder(folder):
    record = train(folder, "helped", 30, seed=3)
    assert record["held_out"]["after"]["cross_entropy"] < record["held_out"]["before"]["cross_entropy"]
    assert record["curve"][-1][2] < record["curve"][0][2]
    assert record == json.loads((folder / "helped" / "training.json").read_text())
    assert (record["seed"], record["steps"], record["replies_only"]) == (3, 30, False)
    assert len(record["mixture"][0]["files"][0]["sha256"]) == 64
    adapter = Adapter.load(folder / "helped")
    assert adapter.config.target_fingerprint == load_as_is(str(folder / "target"), device="cpu").fingerprint
    assert adapter.config.exit_layer == EXIT


@pytest.mark.parametrize("stored", [False, True])
def test_stopped_and_gone_on_is_the_same_adapter(folder, monkeypatch, stored):
    options = {"checkpoint_every": 1e-9}
    if stored:
        options["features"] = features(folder, "to-resume", wanted=Wanted((EXIT, "final")))
    steps = train(folder, f"whole-{stored}", 6, **options)["steps"]
    made, calls = FullLaw.__call__, []

    def cut(self, *arguments):
        calls.append(1)
        if len(calls) > 7:  # in the middle of the fourth step
            raise RuntimeError("killed")
        return made(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FullLaw, "__call__", cut)
        with pytest.raises(RuntimeError, match="killed"):
            train(folder, f"cut-{stored}", 6, **options)
    assert not (folder / f"cut-{stored}" / "config.json").exists()
    record = train(folder, f"cut-{stored}", 6, **options)
    assert record["steps"] == steps
    found, wanted = (load_file(folder / f"{name}-{stored}" / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ForetokenError, match="holds a run with another seed; name another --out"):
        train(folder, f"cut-{stored}", 6, seed=1, **options)


def features(folder, name, *, wanted, count=40):
    loaded = load_as_is(str(folder / "target"), device="cpu")
    generator = torch.Generator().manual_seed(2)
    blocks = [torch.randint(4, 101, (BLOCK - number % 3,), generator=generator) for number in range(count)]
    extract(loaded.model, blocks, folder / name, wanted, target=loaded.fingerprint, shard_tokens=200)
    return folder / name


@pytest.mark.parametrize(("layers", "top_logits"), [((EXIT, "final"), 0), ((EXIT,), "all")])
def test_stored_features_teach_the_same(folder, layers, top_logits):
    stored = StoredBlocks(
        features(folder, f"store-{top_logits}", wanted=Wanted(layers, top_logits, "float32")), (EXIT,), seed=0
    )
    _, target, adapter = parts_of(folder / "target")
    numbers_B1 = stored.next(5)
    sequences = [each.tokens_N for each in stored.sequences(numbers_B1.flatten().tolist())]
    assert len({len(each) for each in sequences}) > 1
    batches = FromFeatures(target, Replies(), stored, (target.exit_layer,))
    found = FullLaw(target, batches)(adapter, numbers_B1, torch.Generator()).detach()
    on_the_fly = FullLaw(target, FromTokens(target, Replies(), (target.exit_layer,)))
    parts = [
        (float(on_the_fly(adapter, each[None], torch.Generator()).detach()), len(each[1::3])) for each in sequences
    ]
    wanted = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_a_store_is_read_in_an_order_of_its_own_and_keeps_the_last_sequences(folder):
    place = features(folder, "ordered", wanted=Wanted((EXIT, "final")))
    stored = StoredBlocks(place, (EXIT,), seed=0)
    held = set(stored.held_out(64).flatten().tolist())
    assert held == {38, 39}
    first = stored.next(38).flatten().tolist()
    assert sorted(first) == list(range(38))
    second = stored.next(38).flatten().tolist()
    assert sorted(second) == sorted(first)
    assert first != second
    again = StoredBlocks(place, (EXIT,), seed=0)
    again.next(20)
    other = StoredBlocks(place, (EXIT,), seed=0)
    other.resume(json.loads(json.dumps(again.state())))
    assert other.next(30).flatten().tolist() == (first + second)[20:50]
    assert StoredBlocks(place, (EXIT,), seed=1).next(38).flatten().tolist() != first


def test_a_run_from_features(folder):
    record = train(folder, "from-store", 12, features=features(folder, "store", wanted=Wanted((EXIT, "final"))))
    assert record["held_out"]["after"]["cross_entropy"] < record["held_out"]["before"]["cross_entropy"]
    assert record["mixture"][0]["name"] == "features"
    assert record["own_words"] == 0


def test_features_that_do_not_fit(folder):
    place = features(folder, "shallow", wanted=Wanted((2, "final"), 4))
    with pytest.raises(InputError, match=r"holds the depths 2, final; needed are 1 and final .* --depths 1,final"):
        train(folder, "none", 1, features=place)
    loaded = load_as_is(str(folder / "target"), device="cpu")
    extract(loaded.model, block_of(), folder / "others", Wanted((EXIT, "final")), target="0" * 64)
    with pytest.raises(MismatchError, match="another target"):
        train(folder, "none", 1, features=folder / "others")
    assert not (folder / "none").exists()


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_an_exit_that_is_not_there(folder, layer):
    with pytest.raises(ConfigError, match=f"--exit-layer {layer}: must be from 1 to 2, as the target has 3 layers"):
        kangaroo.run(str(folder / "target"), layer, [], folder / "none")
    assert not (folder / "none").exists()
