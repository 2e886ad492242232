"""Prediction layers of the makers' names and kinds, against the published arithmetic written out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.mtp.layouts import LAYOUTS
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.methods.mtp.train import laid_out
from foretoken.models.load import load, load_as_is
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.mtp_models import VOCABULARY, WEIGHTS, retensor
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import Family, save_model
from helpers.zoo_llms import with_config

W, HEADS, DIM, CHANNELS, SMALL, EXPERTS, WINDOW, THETA = 64, 4, 16, 96, 32, 4, 5, 10000.0
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": W,
    "intermediate_size": CHANNELS,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "moe_intermediate_size": SMALL,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_BESIDE = {"e": "mtp.pre_fc_norm_embedding", "h": "mtp.pre_fc_norm_hidden", "proj": "mtp.fc", "out": "mtp.norm"}


def _around(prefix: str, out: str) -> dict[str, str]:
    return {"e": f"{prefix}enorm", "h": f"{prefix}hnorm", "proj": f"{prefix}eh_proj", "out": f"{prefix}{out}"}


@dataclass(frozen=True, kw_only=True)
class Maker:
    """One maker's layer, as published.

    Attributes:
        names: of the norms and the projection around the decoder layer, without ``.weight``; ``out`` may be the
            target's.
        attention, mlp: beginnings of names.
        norms: before attention and before the MLP, or (``after``) after each.
        rope: how many elements of a head are rotated, in pairs of neighbours or of halves.
        experts: names of the router, its bias and the shared MLP in the place of the MLP.
    """

    options: dict[str, Any]
    names: dict[str, str]
    attention: str = "mtp.layers.0.self_attn."
    mlp: str = "mtp.layers.0.mlp."
    norms: tuple[str, str] = ("mtp.layers.0.input_layernorm", "mtp.layers.0.post_attention_layernorm")
    after: bool = False
    groups: int = 2
    v_dim: int = DIM
    v_scale: float = 1.0
    rope: int = DIM
    neighbours: bool = False
    window: int = 0
    head_norms: bool = True
    sinks: str = ""
    experts: dict[str, str] = field(default_factory=dict)
    factor: float = 1.0
    gated: bool = True


_HY, _MIMO, _NEMOTRON = "model.layers.2.", "model.mtp.layers.0.", "mtp.layers."
MAKERS = {
    "mellum": Maker(
        options={
            "num_local_experts": EXPERTS,
            "num_nextn_predict_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        names=_BESIDE,
        window=WINDOW,
        experts={"gate": "gate"},
    ),
    "exaone_moe": Maker(
        options={
            "num_experts": EXPERTS,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        names=_BESIDE,
        rope=0,
    ),
    "exaone4": Maker(
        options={"layer_types": ["sliding_attention", "full_attention"]},
        names=_BESIDE,
        norms=("mtp.layers.0.post_attention_layernorm", "mtp.layers.0.post_feedforward_layernorm"),
        after=True,
        window=WINDOW,
    ),
    "hy_v3": Maker(
        options={
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "router_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        },
        names=_around(_HY, "final_layernorm"),
        attention=f"{_HY}self_attn.",
        mlp=f"{_HY}mlp.",
        norms=(f"{_HY}input_layernorm", f"{_HY}post_attention_layernorm"),
        experts={"gate": "router.gate", "bias": "expert_bias", "shared": "shared_mlp."},
        factor=1.5,
    ),
    "mimo_v2_flash": Maker(
        options={
            "v_head_dim": 12,
            "n_routed_experts": EXPERTS,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_value_scale": 0.7,
            "rope_parameters": {
                each: {"rope_type": "default", "rope_theta": THETA * scale, "partial_rotary_factor": 0.5}
                for each, scale in (("full_attention", 9.0), ("sliding_attention", 1.0))
            },
        },
        names=_around(_MIMO, "final_layernorm"),
        attention=f"{_MIMO}self_attn.",
        mlp=f"{_MIMO}mlp.",
        norms=(f"{_MIMO}input_layernorm", f"{_MIMO}pre_mlp_layernorm"),
        groups=4,
        v_dim=12,
        v_scale=0.7,
        rope=8,
        window=WINDOW,
        head_norms=False,
        sinks=f"{_MIMO}self_attn.attention_sink_bias",
    ),
    "ernie4_5_moe": Maker(
        options={"moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1, "rope_theta": THETA},
        names={
            "e": "model.mtp_emb_norm.0",
            "h": "model.mtp_hidden_norm.0",
            "proj": "model.mtp_linear_proj.0",
            "out": "model.norm",
        },
        attention="model.mtp_block.0.self_attn.",
        mlp="model.mtp_block.0.mlp.",
        norms=("model.mtp_block.0.input_layernorm", "model.mtp_block.0.post_attention_layernorm"),
        neighbours=True,
        head_norms=False,
    ),
    "nemotron_h": Maker(
        options={
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": SMALL,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.0,
            "num_nextn_predict_layers": 1,
            "layer_norm_epsilon": 1e-6,
        },
        names={**_around(f"{_NEMOTRON}0.", ""), "out": f"{_NEMOTRON}1.final_layernorm"},
        attention=f"{_NEMOTRON}0.mixer.",
        mlp=f"{_NEMOTRON}1.mixer.",
        norms=(f"{_NEMOTRON}0.norm", f"{_NEMOTRON}1.norm"),
        rope=0,
        head_norms=False,
        experts={"gate": "gate", "bias": "gate.e_score_correction_bias", "shared": "shared_experts."},
        factor=2.0,
        gated=False,
    ),
}
FAULTS = ("halves swapped", "no hidden norm", "no output norm", "another window", "rotated otherwise")


def drawn(maker: Maker, generator: torch.Generator) -> dict[str, Tensor]:
    """The layer's tensors by the maker's names."""
    found: dict[str, Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int) -> None:
        found[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 / inputs**0.5

    def mlp(name: str, channels: int) -> None:
        for part in ("gate_proj", "up_proj") if maker.gated else ("up_proj",):
            matrix(f"{name}{part}", channels, W)
        matrix(f"{name}down_proj", W, channels)

    for name in (*maker.norms, *(maker.names[each] for each in "eh"), maker.names["out"]):
        found[f"{name}.weight"] = 1 + 0.2 * torch.randn(W, generator=generator)
    matrix(maker.names["proj"], W, 2 * W)
    for part, outputs in (("q", HEADS * DIM), ("k", maker.groups * DIM), ("v", maker.groups * maker.v_dim)):
        matrix(f"{maker.attention}{part}_proj", outputs, W)
    matrix(f"{maker.attention}o_proj", W, HEADS * maker.v_dim)
    if maker.head_norms:
        for part in ("q_norm", "k_norm"):
            found[f"{maker.attention}{part}.weight"] = 1 + 0.2 * torch.randn(DIM, generator=generator)
    if maker.sinks:
        found[maker.sinks] = torch.randn(HEADS, generator=generator)
    if not maker.experts:
        mlp(maker.mlp, CHANNELS)
        return found
    matrix(maker.mlp + maker.experts["gate"], EXPERTS, W)
    for number in range(EXPERTS):
        mlp(f"{maker.mlp}experts.{number}.", SMALL)
    if "bias" in maker.experts:
        found[maker.mlp + maker.experts["bias"]] = torch.randn(EXPERTS, generator=generator)
        mlp(maker.mlp + maker.experts["shared"], SMALL)
    return found


def reference(maker: Maker, w: dict[str, Tensor], e_TW: Tensor, f_TW: Tensor, fault: str = "") -> Tensor:
    """Inputs of the LM head for pairs of a token's embedding and the state before it, [T, W]."""
    count = len(e_TW)

    def normed(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def product(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T

    def rotated(x_HTd: Tensor) -> Tensor:
        size = maker.rope or (DIM if fault == "rotated otherwise" else 0)
        neighbours = maker.neighbours != (fault == "rotated otherwise")
        angles_TF = torch.arange(count)[:, None] * THETA ** -(torch.arange(0, size, 2) / max(1, size))
        x, rest = x_HTd[..., :size], x_HTd[..., size:]
        a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
        cos, sin = angles_TF.cos(), angles_TF.sin()
        pair = a * cos - b * sin, b * cos + a * sin
        return torch.cat([torch.stack(pair, -1).flatten(-2) if neighbours else torch.cat(pair, -1), rest], -1)

    def attention(x_TW: Tensor) -> Tensor:
        q, k, v = (
            product(f"{maker.attention}{each}_proj", x_TW).unflatten(-1, (heads, -1)).transpose(0, 1)
            for each, heads in (("q", HEADS), ("k", maker.groups), ("v", maker.groups))
        )
        if maker.head_norms:
            q, k = normed(f"{maker.attention}q_norm", q), normed(f"{maker.attention}k_norm", k)
        q, k = rotated(q), rotated(k).repeat_interleave(HEADS // maker.groups, 0)
        ago = torch.arange(count)[:, None] - torch.arange(count)
        window = maker.window or count
        if fault == "another window":
            window = count if maker.window else WINDOW
        scores = (q @ k.mT / DIM**0.5).masked_fill((ago < 0) | (ago >= window), -torch.inf)
        if maker.sinks:
            scores = torch.cat([scores, w[maker.sinks][:, None, None].expand(-1, count, 1)], -1)
        shares = scores.softmax(-1)[..., :count]
        v = maker.v_scale * v.repeat_interleave(HEADS // maker.groups, 0)
        return product(f"{maker.attention}o_proj", (shares @ v).transpose(0, 1).flatten(1))

    def mlp(name: str, x: Tensor) -> Tensor:
        up = product(f"{name}up_proj", x)
        inner = F.silu(product(f"{name}gate_proj", x)) * up if maker.gated else F.relu(up) ** 2
        return product(f"{name}down_proj", inner)

    def experts(x_TW: Tensor) -> Tensor:
        scores = product(maker.mlp + maker.experts["gate"], x_TW)
        scores, bias = (
            (scores.sigmoid(), w[maker.mlp + maker.experts["bias"]])
            if "bias" in maker.experts
            else (scores.softmax(-1), torch.zeros(EXPERTS))
        )
        shares = torch.zeros_like(scores).scatter(1, (scores + bias).topk(2, -1).indices, 1) * scores
        shares = maker.factor * shares / shares.sum(-1, keepdim=True)
        found = sum(shares[:, each, None] * mlp(f"{maker.mlp}experts.{each}.", x_TW) for each in range(EXPERTS))
        return found + mlp(maker.mlp + maker.experts["shared"], x_TW) if "shared" in maker.experts else found

    def branch(norm: str, part: Any, x: Tensor) -> Tensor:
        return x + (normed(norm, part(x)) if maker.after else part(normed(norm, x)))

    sides = [normed(maker.names["e"], e_TW), f_TW if fault == "no hidden norm" else normed(maker.names["h"], f_TW)]
    x_TW = product(maker.names["proj"], torch.cat(sides[::-1] if fault == "halves swapped" else sides, -1))
    x_TW = branch(maker.norms[0], attention, x_TW)
    x_TW = branch(maker.norms[1], experts if maker.experts else lambda x: mlp(maker.mlp, x), x_TW)
    return x_TW if fault == "no output norm" else normed(maker.names["out"], x_TW)


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    maker = MAKERS[name]
    save_model(Family(name, {"rms_norm_eps": 1e-6, **_SIZES, **maker.options}), folder)
    generator = torch.Generator().manual_seed(7)
    retensor(folder, lambda tensors: tensors.update(drawn(maker, generator)))
    return name, folder


def test_the_layer_computes_the_published_arithmetic(made: tuple[str, Path]) -> None:
    """Read in chunks over a cache; and every planted fault is far away."""
    name, folder = made
    model, tokens = load(str(folder), device="cpu"), tokens_of(5, 12, VOCABULARY)
    states_TW = torch.randn(12, W, generator=torch.Generator().manual_seed(1))
    tensors = load_file(folder / WEIGHTS)
    layer = PredictionLayer(model.model, model.name, read_layer(model.config, model.source, model.name))
    e_TW = model.model.get_input_embeddings().weight.detach()[tokens[1:]]
    run, cache = Runner(model, layer), KVCache(1, 1, 64)
    cache.reserve(cache.acquire(), 16)
    found = []
    with torch.inference_mode():
        for begin, end in ((0, 4), (4, 9), (9, 10), (10, 11)):
            batch = PackedBatch()
            batch.add_chunk(0, begin, tokens[begin + 1 : end + 1], wanted=end - begin)
            found.append(run.forward(batch, cache, run.features(states_TW[begin:end]), top=2)[0].logits_MV)
            cache.commit(0, range(end - begin))
        head_VW = model.model.get_output_embeddings().weight
        whole = layer(states_TW[:-1], torch.tensor(tokens[1:]), layer.embedding_VW) @ head_VW.T
        expected = reference(MAKERS[name], tensors, e_TW, states_TW[:-1]) @ head_VW.T
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
        for fault in FAULTS:
            wrong = reference(MAKERS[name], tensors, e_TW, states_TW[:-1], fault) @ head_VW.T
            assert float((wrong - expected).abs().max()) > 0.05, fault


def test_drafts_do_not_change_the_text(made: tuple[str, Path]) -> None:
    model = load(str(made[1]), device="cpu")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens_of(seed, 4 + 5 * seed, VOCABULARY)} for seed in range(2)]
    plain, drafted = (
        with_config(config, target=model, max_num_seqs=2).generate(prompts, params)
        for config in ({"method": "none"}, {"method": "mtp", "num_speculative_tokens": 3})
    )
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.metrics.num_draft_tokens for each in drafted) > 10


def test_tensors_are_written_as_they_were_read(made: tuple[str, Path]) -> None:
    name, folder = made
    model = load_as_is(str(folder), device="cpu").model
    read = read_layer(model.config, str(folder), name)
    written = PredictionLayer(model, name, read).tensors()
    assert written.keys() - read.keys() == ({"block.0.norm.weight"} if name == "ernie4_5_moe" else set())
    assert all(torch.equal(written[each], read[each]) for each in read)


def test_a_stated_kind_of_attention_replaces_the_usual() -> None:
    stated = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model("exaone_moe", **_SIZES, **MAKERS["exaone_moe"].options, mtp_layer_types=stated)
    of_layer = LAYOUTS["exaone_moe"].of_layer(config)
    assert (of_layer.layer_types, of_layer.mlp_layer_types) == (["sliding_attention"], ["dense"])
    assert config.mlp_layer_types == ["dense", "sparse"]


def test_blocks_that_are_not_computed_are_refused() -> None:
    stated = {"mtp_layers_block_type": ["full_attention", "moe", "moe"]}
    config = AutoConfig.for_model("nemotron_h", **{**_SIZES, **MAKERS["nemotron_h"].options, **stated})
    with pytest.raises(UnsupportedArchitecture, match=r"mtp_layers_block_type=.* is not computed, only \['full_att"):
        LAYOUTS["nemotron_h"].of_layer(config)


def test_a_layer_that_is_only_read_is_not_trained(made: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"'{made[0]}' can be read, but not trained: only of deepseek_v3"):
        laid_out(str(made[1]), made[1], tmp_path)
