"""Calibration: counts by the definitions, a file that is read as it was written, and that fits one model only."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from foretoken import zoo
from foretoken.core.errors import ConfigError, InputError, MismatchError, ModelError
from foretoken.methods.sparse import calibrate as calibrating
from foretoken.methods.sparse import calibration
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.methods.sparse.calibrate import blocks_of, calibrate
from foretoken.methods.sparse.calibration import Anchors, Calibration, Sparsity, Thresholds
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.load import load
from helpers.tiny_models import save_model

TEXT = [torch.randint(4, 100, (70,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]
RULE = BlockRule(budget=0.5, dense_below=0, size=16, sinks=0, locals=1)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    options = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return load(save_model("qwen3_moe", tmp_path_factory.mktemp("moe"), **options), dtype="float32")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return load(save_model("llama", tmp_path_factory.mktemp("dense")), dtype="float32")


def hidden_before_mlps(target, tokens):
    """What each MLP or MoE block reads, [T, D], in the library's own forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32, attn_implementation="eager").eval()
    found = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda m, args, n=number: found.update({n: args[0].reshape(-1, 64)}))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return model, found


@torch.inference_mode()
def test_shares_of_shut_channels_by_hand(dense):
    found = calibrate(dense, TEXT[:1])
    model, hidden = hidden_before_mlps(dense, TEXT[0])
    gates = {n: F.silu(model.model.layers[n].mlp.gate_proj(x)).detach() for n, x in hidden.items()}
    for each in found.ffn:
        for size in calibrating.GROUPS:
            channels, tiles = [], []
            for g in gates.values():
                for begin in range(0, len(g), size):
                    shut = (g[begin : begin + size].abs() < each.tau).all(0)
                    channels.append(shut.float().mean())
                    tiles.append(shut.view(-1, 16).all(1).float().mean())
            assert each.union[size] == pytest.approx(float(torch.stack(channels).mean()), abs=2e-3)
            assert each.tiles[size] == pytest.approx(float(torch.stack(tiles).mean()), abs=2e-3)
        assert each.row == each.union[1] >= each.union[8] >= each.union[32]
    assert found.moe is None
    assert found.ffn[-1].row > 0.1


@torch.inference_mode()
def test_medians_of_ratios_by_hand(moe):
    found = calibrate(moe, TEXT)
    assert found.num_tokens == sum(map(len, TEXT))
    ratios = {n: [[], []] for n in range(3)}
    for tokens in TEXT:
        model, hidden = hidden_before_mlps(moe, tokens)
        for n, x in hidden.items():
            _, weights, _ = model.model.layers[n].mlp.gate(x)
            for w1, w2, w3 in weights.sort(-1, descending=True).values.tolist():
                ratios[n][0].append(w3 / (w1 + w2))
                ratios[n][1].append((w2 + w3) / w1)
    assert found.moe.num_chosen == 3
    for n, lists in ratios.items():
        for beta, values in zip(found.moe.beta[n], lists, strict=True):
            middle = torch.tensor(values).median()
            assert beta == pytest.approx(float(middle), rel=1e-3)
            assert sum(v < beta for v in values) / len(values) == pytest.approx(0.5, abs=0.02)


@torch.inference_mode()
def test_channels_inside_experts_are_counted_where_an_expert_is_called(moe):
    """Shares are of (expert, group) pairs that occur: an expert without calls saves nothing."""
    found = calibrate(moe, [TEXT[0][:8]])
    model, hidden = hidden_before_mlps(moe, TEXT[0][:8])
    shares = []
    for n, x in hidden.items():
        block = model.model.layers[n].mlp
        _, _, chosen = block.gate(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).any(-1)
            g = F.silu(F.linear(x[rows], block.experts.gate_up_proj[expert].chunk(2)[0]))
            shares.append((g.abs() < 0.1).all(0).float().mean())
    assert next(e for e in found.ffn if e.tau == 0.1).union[8] == pytest.approx(
        float(torch.stack(shares).mean()), abs=1e-3
    )


def test_the_target_is_left_as_it_was(moe):
    calibrate(moe, TEXT[:1])
    assert not any("forward" in vars(module) for module in moe.model.modules())


# ---------------------------------------------------------------------- anchors


def seen_with(picks, theta):
    """Anchors of layers with given picks, one head, one step each."""
    seen = calibrating._Seen(len(picks), RULE)
    seen._picks["per_head"] = {layer: [torch.tensor([pick], dtype=torch.bool)] for layer, pick in enumerate(picks)}
    seen.end_of_chunk()
    return seen.anchors(theta)


def test_the_sweep_opens_an_anchor_where_a_layer_is_unlike_the_current_one():
    same, other, half = [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]
    found = seen_with([same, same, same, half, half, other, other], 0.7)
    assert found.layers == (0, 1, 3, 5)
    assert found.jaccard[0][1] == 1.0
    assert found.jaccard[2][3] == pytest.approx(1 / 3, abs=1e-4)
    assert found.jaccard[0][6] == 0.0
    assert seen_with([same, same, half, half], 0.3).layers == (0, 1)
    assert seen_with([same, other, same], 0.7).layers == (0, 1, 2)  # compared with the current anchor, not the best


def test_contexts_too_short_to_pick_from_give_no_anchors(dense):
    assert calibrate(dense, [TEXT[0][:30]], rule=RULE).attention is None


def test_anchors_of_a_model(dense):
    """120 tokens in chunks of 64: before the second are four whole blocks, two are kept, and one of those is picked."""
    tokens = (TEXT[0] + TEXT[1])[:120]
    original = calibrating._CHUNK
    calibrating._CHUNK = 64
    try:
        found = calibrate(dense, [tokens], rule=RULE).attention
    finally:
        calibrating._CHUNK = original
    assert found.layers[:2] == (0, 1)
    for i in range(3):
        assert found.jaccard[i][i] == 1.0
        for j in range(3):
            assert found.jaccard[i][j] == found.jaccard[j][i]
        assert found.jaccard_of_layers[i][i] == 1.0
    assert found.jaccard_of_layers != found.jaccard  # two heads choose apart, and together
    assert found.settings == {"budget": 0.5, "block": 16, "sinks": 0, "locals": 1, "score": "exact"}


def test_a_threshold_is_swept_over_what_the_file_says_of_such_sets(dense):
    """Layers 1 and 2 agree as layers and not head by head; layer 3 has a window, and picks nothing."""
    heads = ((1.0, 0.2, 0.3, 0.0), (0.2, 1.0, 0.4, 0.0), (0.3, 0.4, 1.0, 0.0), (0.0,) * 4)
    layers = ((1.0, 0.6, 0.5, 0.0), (0.6, 1.0, 0.8, 0.0), (0.5, 0.8, 1.0, 0.0), (0.0,) * 4)
    known = Anchors(layers=(0, 1, 2), theta=0.7, jaccard=heads, jaccard_of_layers=layers, settings={})
    found = full(dense, attention=known)
    assert list(found.anchors_for(4)) == [0, 1, 2]
    assert found.anchors_for(4, "global", 0.4) == [0, 1]
    assert found.anchors_for(4, "per_layer") == [0, 1]
    assert found.anchors_for(4, "per_layer", 0.9) == [0, 1, 2]
    assert found.anchors_for(4, "per_layer", 0.0) == [0, 1]  # the first two in any case
    older = full(dense, attention=replace(known, jaccard_of_layers=()))
    with pytest.raises(ConfigError, match=r"older than attention=per_layer.*make one with 'foretoken calibrate sparse"):
        older.anchors_for(4, "per_layer")


def test_what_a_choice_catches_by_hand():
    """One head, six blocks of 16, one of them kept next to the last; the root's key stands in the second block."""
    q_HTD, keys_GCD = torch.zeros(1, 2, 4), torch.zeros(1, 98, 4)
    q_HTD[0, :, 0] = torch.tensor([1.0, -1.0])  # the row after the root asks for the opposite
    keys_GCD[0, 20, 0] = 6.0
    keys_GCD[0, 40:48, 0] = -2.0
    seen = calibrating._Seen(1, BlockRule(budget=0.34, dense_below=0, size=16, sinks=0, locals=1))
    seen.pick(0, q_HTD, keys_GCD, 96, scaling=1.0)
    seen.end_of_chunk()
    found = seen.anchors(0.7).caught
    root, behind = (torch.softmax(keys_GCD[0, : 97 + row, 0] * sign, 0) for row, sign in ((0, 1.0), (1, -1.0)))
    for score in ("exact", "mean", "bounds"):  # the block's mean is the largest, too
        assert found[score]["root"] == pytest.approx(float(root[16:32].sum() / root[:80].sum()), abs=1e-3)
        assert found[score]["draft"] == pytest.approx(float(behind[16:32].sum() / behind[:80].sum()), abs=1e-3)
    assert found["exact"]["root"] > 0.8 > 0.2 > found["exact"]["draft"]


# ---------------------------------------------------------------------- text and file


def test_blocks_come_from_the_files_by_turns(dense, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "a" * 45}) + "\n" for _ in range(4)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 50}) + "\n")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    texts = [dense.tokenizer.decode(block) for block in blocks_of(files, dense, block=40, num_tokens=10**6)]
    assert [("b" in text) for text in texts[:4]] == [False, True, False, True]
    assert "".join(texts).count("a") == 180
    assert len(list(blocks_of(files, dense, block=40, num_tokens=41))) == 2
    with pytest.raises(ConfigError, match=r"--block 400: must be between 2 and the 128 positions"):
        list(blocks_of(files, dense, block=400, num_tokens=1))


def test_no_text_is_refused(dense):
    with pytest.raises(InputError, match="no text to calibrate on"):
        calibrate(dense, [])


def full(target, **changes):
    fields = {
        "model": "m",
        "fingerprint": fingerprint_of(target.source),
        "num_tokens": 7,
        "ffn": (Sparsity(tau=0.1, row=0.2, union={1: 0.2, 8: 0.1}, tiles={1: 0.0, 8: 0.0}),),
        "moe": Thresholds(num_chosen=3, beta={0: (0.1, 0.2), 2: (0.3, 0.4)}),
        "attention": Anchors(
            layers=(0, 1),
            theta=0.7,
            jaccard=((1.0, 0.5), (0.5, 1.0)),
            jaccard_of_layers=((1.0, 0.8), (0.8, 1.0)),
            settings={"block": 64},
            caught={"exact": {"root": 0.9, "draft": 0.5}},
        ),
        "provenance": {"command": "c"},
    }
    return Calibration(**{**fields, **changes})


def test_the_file_comes_back_as_it_went(dense, tmp_path):
    path = tmp_path / "sparse.json"
    for written in (full(dense), full(dense, ffn=(), moe=None, attention=None)):
        written.save(path)
        assert Calibration.load(path) == written
        assert calibration.find(dense, path) == written


def test_a_calibration_next_to_the_weights_is_found(dense, tmp_path):
    assert calibration.find(dense, None) is None
    place = calibration.default_path(dense)
    full(dense).save(place)
    try:
        assert calibration.find(dense, None) == full(dense)
        full(dense, fingerprint="0" * 64).save(place)
        with pytest.raises(MismatchError, match=r"made for 'm' \(fingerprint 0000.*as it is now: make one with"):
            calibration.find(dense, None)
    finally:
        place.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"fingerprint"', '"fingrprint"'),
        lambda text: text.replace('"row": 0.2', '"row": 2'),
        lambda text: text.replace('"row": 0.2', '"row": null'),
        lambda text: text.replace("0.3,", "-0.3,"),
        lambda text: text.replace("0.3,", "NaN,"),
        lambda text: text.replace('"layers": [\n   0,\n   1', '"layers": [\n   1,\n   0'),
        lambda text: text.replace("0.8,\n    1.0", "0.8"),
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_refused(damage, dense, tmp_path):
    path = tmp_path / "sparse.json"
    full(dense).save(path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ModelError, match=r"sparse\.json: the calibration cannot be read"):
        Calibration.load(path)


def test_a_missing_file_is_reported(dense, tmp_path):
    with pytest.raises(ModelError, match="there is no such calibration file"):
        calibration.find(dense, str(tmp_path / "none.json"))


def test_the_speedup_is_that_of_the_weights_read():
    each = Sparsity(tau=1.0, row=0.5, union={1: 0.5}, tiles={1: 0.25})
    assert each.speedup(1) == pytest.approx(3 / (1 + 0.75 + 0.5))
    assert math.isclose(Sparsity(tau=1.0, row=0, union={1: 0.0}, tiles={1: 0.0}).speedup(1), 1.0)


@pytest.mark.parametrize("name", ["moe", "long"])
def test_the_zoos_own_calibrations_fit_their_models(name):
    folder = zoo.path(name)
    found = Calibration.load(folder / calibration.FILE)
    assert found.fingerprint == fingerprint(folder), "the weights are newer: run foretoken calibrate sparse again"
    assert found.model == f"zoo:{name}"
    assert (found.moe is not None) == (name == "moe")
    assert (found.attention is not None) == (name == "long")
    assert found.num_tokens >= 40_000
    assert "/" not in found.provenance["files"][0]
