"""Calibration: counts by the definitions, a file that is read as it was written, and that fits one model only."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from foretoken.core.errors import ConfigError, InputError
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.models.load import load
from foretoken_lab.calibrations import sparse as calibrating
from foretoken_lab.calibrations.sparse import blocks_of, calibrate
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
