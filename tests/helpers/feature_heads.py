"""What the tests of heads over hidden states share: serving is the columns that training unrolls; damaged folders.

Letters: T rows, F width of the fused depths, W width, K draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.drafting.feature_heads import runner
from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.head import FeatureHead
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.feature_heads.unroll import every_column, unrolled
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.hidden_states import FINAL
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.load import load, load_as_is
from foretoken.train.frozen_target import FrozenTarget
from helpers.golden import tokens_of
from helpers.tiny_models import save_model

Change = Callable[[Path], None]
WAYS = ("native", "native, multiplied", "torch")


def save_tiny(folder: Path) -> Path:
    """A model whose sizes the native decoder takes."""
    return save_model("llama", folder, hidden_size=64, head_dim=32, intermediate_size=128)


def assert_serves_what_it_learned(
    make: Callable[[LanguageModel], FeatureHead],
    tiny: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    columns: Sequence[int] = (0, 13),
) -> None:
    """Draft pass t behind pair i, over a cache of all layers read in chunks, is column i of unrolled step t."""
    model = load(str(tiny), device="cpu")
    if way == "torch":
        monkeypatch.setattr(model, "fused", None)
    elif way == "native, multiplied":
        monkeypatch.setattr(runner, "_TABLE_BYTES", 0)
    head, tokens, steps = make(model), tokens_of(3, 20, 100), 4
    depths = (FINAL,) if head.config.reads_final else head.config.depths_of(model.num_layers)
    frozen = FrozenTarget(load_as_is(str(tiny), device="cpu").model, [each for each in depths if each != FINAL])
    states = frozen.states(torch.tensor([tokens]))
    states_1TF = torch.cat([states[each] for each in depths], dim=-1)
    run = Runner(model, head)
    assert run.native == (way != "torch" and model.fused is not None)
    with torch.inference_mode():
        rows, table = head.head_of(frozen.model), head.embedding_of(frozen.model)
        text_1T = torch.tensor([tokens])
        unroll = unrolled(head, states_1TF, text_1T, table, steps, every_column(text_1T))
        expected = [rows_NW @ rows.T for rows_NW in unroll]
        g_TW = run.features(states_1TF[0])
        for column in columns:
            found = served(run, g_TW, tokens, column, steps)
            for output, expected_CK in zip(found, expected, strict=True):
                assert_law(run, output, expected_CK[column : column + 1])
        # planted: each feature beside the token one further on
        (shifted,) = served(run, g_TW.roll(1, 0), tokens, 13, 1)
        assert float((shifted.logits_MV - expected[0][13:14]).abs().max()) > 1e-2


def assert_law(run: Runner, output: Output, expected_1K: Tensor) -> None:
    """The logits of a head's own tokens, and the best three of them as the target's."""
    assert output.columns is run.head.columns
    torch.testing.assert_close(output.logits_MV, expected_1K, rtol=1e-4, atol=1e-4)
    tokens = range(expected_1K.shape[1]) if output.columns is None else output.columns.ids_C.tolist()
    best = [tokens[column] for column in expected_1K[0].topk(3).indices.tolist()]
    assert list(output.top_ids) == best
    assert output.best[0] == best[0]


def served(run: Runner, g_TW: Tensor, tokens: list[int], column: int, steps: int) -> list[Output]:
    """Passes of a draft of ``steps`` given tokens from a column, behind all pairs before it."""
    cache = KVCache(run.num_layers, 1, 64)
    cache.reserve(cache.acquire(), 32)
    for begin, end in ((0, column // 2), (column // 2, column)):
        if begin < end:
            batch = PackedBatch()
            batch.add_chunk(0, begin, tokens[begin + 1 : end + 1], wanted=0)
            run.forward(batch, cache, g_TW[begin:end], top=0)
            cache.commit(0, range(end - begin))
    g, found = g_TW[column : column + 1], []
    for step in range(steps):
        batch = PackedBatch()
        batch.add_chunk(0, column + step, [tokens[column + 1 + step]], wanted=1)
        output, g = run.forward(batch, cache, g, top=3)
        found.append(output)
    return found


def rms(x_W: Tensor, gain_W: Tensor, eps: float) -> Tensor:
    """RMSNorm, written out."""
    return x_W * (x_W.pow(2).mean() + eps).rsqrt() * gain_W


def layer_by_hand(weights: Mapping[str, Tensor], config: BlockConfig, read: Tensor, x_W: Tensor) -> Tensor:
    """A decoder layer over a row that sees nothing but itself: attention hands its values on, whatever the scores are.

    Args:
        weights: of the layer.
        read: what attention reads.
        x_W: where the residual begins.
    """
    bias = {name: weights.get(f"self_attn.{name}_proj.bias", torch.zeros(())) for name in "vo"}
    v_Gd = (weights["self_attn.v_proj.weight"] @ read + bias["v"]).unflatten(0, (config.kv_heads, -1))
    seen = v_Gd.repeat_interleave(config.heads // config.kv_heads, 0).flatten()
    x_W = x_W + weights["self_attn.o_proj.weight"] @ seen + bias["o"]
    u_W = rms(x_W, weights["post_attention_layernorm.weight"], config.norm_eps)
    gate, up = (weights[f"mlp.{name}_proj.weight"] @ u_W for name in ("gate", "up"))
    return x_W + weights["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


def first_column(head: FeatureHead, state_F: Tensor, table_VW: Tensor, token: int) -> Tensor:
    """What the head reads for the first pair of a text, [W]."""
    tokens_1T, states_1TF = torch.tensor([[1, token]]), torch.stack([state_F, state_F])[None]
    (found_NW,) = unrolled(head, states_1TF, tokens_1T, table_VW, 1, every_column(tokens_1T))
    return found_NW[0]


# ------------------------------------------------------------------ damage


def edit(**changes: Any) -> Change:
    """Change, or with ``...`` remove, fields of a folder's config."""

    def change(folder: Path) -> None:
        settings = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))

    return change


def retensor(**changes: Callable[[Tensor], Tensor | None]) -> Change:
    """Change, or with None remove, tensors; two underscores stand for a dot."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        for name, made in changes.items():
            found = made(tensors.pop(name.replace("__", "."), torch.zeros(1)))
            if found is not None:
                tensors[name.replace("__", ".")] = found.contiguous()
        save_file(tensors, folder / WEIGHTS)

    return change


def gone(tensor: Tensor) -> None:
    """For :func:`retensor`."""
