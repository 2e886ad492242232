"""For tests of draft networks over hidden states: serving and training against the plain forward; damaged folders.

Letters: T rows, F width of the fused depths, W width, K draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.drafting.feature_heads import runner
from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.description import Gated, NetworkDescription, Recycle, Stacked
from foretoken.drafting.feature_heads.pair_network import PairNetwork
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.feature_heads.unroll import every_column, unrolled
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.hidden_states import FINAL
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from foretoken.train.frozen_target import FrozenTarget
from helpers.golden import tokens_of
from helpers.tiny_models import save_model

Change = Callable[[Path], None]
WAYS = ("native", "native, multiplied", "torch")  # multiplied: without a table of the tokens' parts


def save_tiny(folder: Path) -> Path:
    """A model with sizes that the native decoder takes."""
    return save_model("llama", folder, hidden_size=64, head_dim=32, intermediate_size=128)


@dataclass(frozen=True)
class Text:
    """A text with the target's states, and what the plain forward makes of it.

    Attributes:
        states_TF: the taps side by side.
        logits: of column i and step s the logits of the token after i + 1 + s, [K]: pairs up to i read the target's
            states, the s pairs after them the network's own outputs.
    """

    tokens: list[int]
    states_TF: Tensor
    embedding_VW: Tensor
    rows_KW: Tensor
    logits: dict[tuple[int, int], Tensor]


COLUMNS, STEPS = (0, 6, 13), 4


def read_text(network: PairNetwork, folder: Path, *, num_tokens: int = 20) -> Text:
    """The plain forward of a network, column by column."""
    model = load_as_is(str(folder), device="cpu").model
    taps, tokens = network.description.taps, tokens_of(3, num_tokens, 100)
    depths = (FINAL,) if taps.final else taps.of(model.config.get_text_config().num_hidden_layers)
    states = FrozenTarget(model, [each for each in depths if each != FINAL]).states(torch.tensor([tokens]))
    states_TF = torch.cat([states[each] for each in depths], dim=-1)[0]
    with torch.inference_mode():
        rows_KW, embedding_VW = network.lm_head_of(model), network.embedding_of(model)
        logits = {
            (column, step): network(states_TF[: column + 1], torch.tensor(tokens[1 : column + 2 + step]), embedding_VW)[
                -1
            ]
            @ rows_KW.T
            for column in COLUMNS
            for step in range(STEPS)
        }
    return Text(tokens, states_TF, embedding_VW, rows_KW, logits)


def served_logits(run: Runner, text: Text) -> dict[tuple[int, int], Tensor]:
    """The same by packed rows: a prefix in two chunks, then one row a step, all columns in one batch."""
    cache, found, tokens = KVCache(run.num_layers, len(COLUMNS), 64), {}, text.tokens
    g_TW = run.features(text.states_TF)
    for column in COLUMNS:
        slot = cache.acquire()
        cache.reserve(slot, 32)
        for begin, end in ((0, column // 2), (column // 2, column)):
            if begin < end:
                batch = PackedBatch()
                batch.add_chunk(slot, begin, tokens[begin + 1 : end + 1], wanted=0)
                run.forward(batch, cache, g_TW[begin:end], top=0)
                cache.commit(slot, range(end - begin))
    g = g_TW[list(COLUMNS)]
    for step in range(STEPS):
        batch = PackedBatch()
        for slot, column in enumerate(COLUMNS):
            batch.add_chunk(slot, column + step, [tokens[column + 1 + step]], wanted=1)
        output, g = run.forward(batch, cache, g, top=3)
        assert output.columns is run.lm_head.columns
        scored = range(len(output.logits_MV[0])) if output.columns is None else output.columns.ids_C.tolist()
        for row, column in enumerate(COLUMNS):
            found[column, step] = output.logits_MV[row].clone()
            best = [scored[each] for each in found[column, step].topk(3).indices.tolist()]
            assert list(output.top_ids[3 * row : 3 * row + 3]) == best
    return found


def tree_logits(run: Runner, text: Text, column: int) -> dict[tuple[int, ...], Tensor]:
    """Of a tree that grows from a column, level by level: the logits after each path."""
    cache, token = KVCache(run.num_layers, 1, 64), text.tokens[column + 1]
    cache.reserve(cache.acquire(), 64)
    batch = PackedBatch()
    batch.add_chunk(0, 0, text.tokens[1 : column + 2], wanted=1)
    g_TW = run.features(text.states_TF[: column + 1])
    _, g = run.forward(batch, cache, g_TW, top=1)
    cache.commit(0, range(column + 1))
    batch = PackedBatch()
    batch.add_level(0, column + 1, [7, 8], depths=[0, 0], tail=0, tail_depths=[], ancestors=[[], []])
    first, after = run.forward(batch, cache, g.expand(2, -1), top=1)
    logits = {(token, 7): first.logits_MV[0].clone(), (token, 8): first.logits_MV[1].clone()}
    batch = PackedBatch()
    batch.add_level(0, column + 1, [9, 9], depths=[1, 1], tail=2, tail_depths=[0, 0], ancestors=[[1], [0]])
    second, _ = run.forward(batch, cache, after[[1, 0]], top=1)
    return {**logits, (token, 8, 9): second.logits_MV[0].clone(), (token, 7, 9): second.logits_MV[1].clone()}


def unrolled_logits(network: PairNetwork, text: Text) -> dict[tuple[int, int], Tensor]:
    """The same by the unrolled forward of training: two sequences, of which the first has other wanted columns."""
    tokens_2T = torch.tensor([text.tokens[::-1], text.tokens])
    states_2TF = torch.stack([text.states_TF.flip(0), text.states_TF])
    wanted_2C = torch.zeros(2, len(text.tokens) - 1, dtype=torch.bool)
    wanted_2C[0, 3] = True
    wanted_2C[1, list(COLUMNS)] = True
    found = {}
    with torch.inference_mode():
        steps = unrolled(network, states_2TF, tokens_2T, text.embedding_VW, STEPS, wanted_2C)
        for step, rows_NW in enumerate(steps):
            for column, row_W in zip(COLUMNS, rows_NW[1:], strict=True):
                found[column, step] = row_W @ text.rows_KW.T
    return found


def difference(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> float:
    """The largest, as a share of the largest logit."""
    assert found.keys() == expected.keys()
    size = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[each] - expected[each]).abs().max()) for each in expected) / size


def runner_of(network: PairNetwork, folder: Path, way: str) -> Runner:
    """Runs a network in one of ``WAYS``."""
    model = _loaded(folder)
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr(model, "native_decoder", None)
        elif way == "native, multiplied":
            patch.setattr(runner, "TABLE_BYTES", 0)
        run = Runner(model, network)
    assert run.native == (way != "torch" and model.native_decoder is not None)
    return run


@cache
def _loaded(folder: Path) -> LanguageModel:
    return load(str(folder), device="cpu")


def assert_all_equal_the_plain_forward(
    network: PairNetwork, folder: Path, ways: Sequence[str] = WAYS, *, trained: bool = True
) -> None:
    """Packed rows in all ways, trees, and, of a network that can be ``trained``, the unrolled forward of training."""
    text = read_text(network, folder)
    if trained:
        assert difference(unrolled_logits(network, text), text.logits) < 1e-5
    for way in ways:
        run = runner_of(network, folder, way)
        assert difference(served_logits(run, text), text.logits) < 1e-5, way
        found, column = tree_logits(run, text, 5), 5
        expected = {}
        for path in found:
            tokens = torch.tensor([*text.tokens[1 : column + 1], *path])
            with torch.inference_mode():
                rows = network(text.states_TF[: column + 1], tokens, text.embedding_VW)
                expected[path] = rows[-1] @ text.rows_KW.T
        assert difference(found, expected) < 1e-5, way


Fault = Callable[[NetworkDescription], NetworkDescription]


def faults_of(description: NetworkDescription) -> dict[str, Fault]:
    """One wrong field each; what a description does not have cannot be wrong."""

    def entry(**fields: Any) -> Fault:
        return lambda each: replace(each, entry=replace(each.entry, **fields))

    def fuse(**fields: Any) -> Fault:
        return lambda each: replace(each, fuse=replace(each.fuse, **fields))

    found: dict[str, Fault] = {}
    enters, head = description.entry, description.lm_head
    if isinstance(enters, Stacked):
        swapped = {"token_norm": enters.feature_norm, "feature_norm": enters.token_norm}
        found["norms swapped"] = entry(**swapped)
        found["another residual"] = entry(normed_residual=not enters.normed_residual)
    elif isinstance(enters, Gated):
        found["sides swapped"] = entry(feature=enters.token, token=enters.feature)
    elif enters.token_norm is not None:
        found["norms swapped"] = entry(token_norm=enters.feature_norm, feature_norm=enters.token_norm)
        found["no norm of the feature"] = entry(feature_norm=None)
    if description.fuse.norm is not None:
        found["states not normed"] = fuse(norm=None)
    if description.fuse.tap_norms is not None:
        found["taps not normed"] = fuse(tap_norms=None)
    if head.norm is not None:
        found["recycled before or after the norm"] = lambda each: replace(
            each, recycle=Recycle(normed=not each.recycle.normed)
        )
        found["no final norm"] = lambda each: replace(each, lm_head=replace(head, norm=None))
    if description.layers.count > 1:
        found["a layer less"] = lambda each: replace(each, layers=replace(each.layers, count=each.layers.count - 1))
    if description.layers.first_norm and not isinstance(enters, Stacked):
        found["no norm before the first layer"] = lambda each: replace(
            each, layers=replace(each.layers, first_norm=False)
        )
    return found


def assert_a_wrong_description_is_seen(
    network: PairNetwork, folder: Path, ways: Sequence[str] = ("native", "torch")
) -> None:
    """Each planted fault changes serving and training, and so do states that are moved or swapped."""
    text, right = read_text(network, folder), network.description
    moved = [text.states_TF.roll(1, 0)]
    if right.taps.count > 1:
        *first, last = text.states_TF.chunk(right.taps.count, dim=-1)
        moved.append(torch.cat([last, *first], dim=-1))
    for states_TF in moved:
        other = replace(text, states_TF=states_TF)
        assert difference(unrolled_logits(network, other), text.logits) > 1e-3
        assert all(
            difference(served_logits(runner_of(network, folder, way), other), text.logits) > 1e-3 for way in ways
        )
    faults = faults_of(right)
    for name, fault in faults.items():
        wrong = deepcopy(network)
        wrong.description = fault(right)
        assert difference(unrolled_logits(wrong, text), text.logits) > 1e-3, name
        for way in ways:
            assert difference(served_logits(runner_of(wrong, folder, way), text), text.logits) > 1e-3, (name, way)


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


def first_column(network: PairNetwork, state_F: Tensor, table_VW: Tensor, token: int) -> Tensor:
    """The LM head's input for the first pair of a text, [W]."""
    tokens_1T, states_1TF = torch.tensor([[1, token]]), torch.stack([state_F, state_F])[None]
    (found_NW,) = unrolled(network, states_1TF, tokens_1T, table_VW, 1, every_column(tokens_1T))
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
