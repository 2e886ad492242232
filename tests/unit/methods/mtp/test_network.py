"""Prediction layers of all layouts: against the library's own layer, and refusals, by name."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.cli.main import main
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.mtp.network import PredictionLayer
from foretoken.methods.mtp.shards import read_layer
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.feature_heads import assert_a_wrong_description_is_seen, assert_all_equal_the_plain_forward
from helpers.golden import tokens_of
from helpers.mtp_models import (
    FAMILIES,
    LAYERS,
    PREFIX,
    QWEN,
    VOCABULARY,
    WEIGHTS,
    WIDTH,
    named,
    reconfig,
    retensor,
    save_mtp,
    shard,
)
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(request.param, tmp_path_factory.mktemp(request.param))


def layer_of(model: LanguageModel) -> PredictionLayer:
    return PredictionLayer(model.model, model.name, read_layer(model.config, model.source, model.name))


def reference(folder: Path, tokens: list[int], states_TW: Tensor) -> Tensor:
    """Logits of all pairs by the library: its model with one layer more, of which only the last is called."""
    config = AutoConfig.from_pretrained(folder)
    family = config.model_type
    deeper: dict[str, Any] = {"num_hidden_layers": LAYERS + 1}
    if family in QWEN:
        deeper["layer_types"] = [*config.layer_types, "full_attention"]
    if family == "glm4_moe_lite":
        deeper["mlp_layer_types"] = [*config.mlp_layer_types, "sparse"]
    tensors, layer = dict(load_file(folder / WEIGHTS)), named(family, "")
    behind = Path(shutil.copytree(folder, folder / "behind", dirs_exist_ok=True))
    renamed = {PREFIX + each.removeprefix(layer) if each.startswith(layer) else each: tensors[each] for each in tensors}
    save_file(renamed, behind / WEIGHTS, {"format": "pt"})
    model: Any = AutoModelForCausalLM.from_pretrained(
        behind, config=AutoConfig.from_pretrained(folder, **deeper), dtype=torch.float32, attn_implementation="eager"
    )

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        gain = tensors[named(family, f"{name}.weight")]
        return scaled * (1 + gain if family in QWEN else gain)

    e_TW = model.get_input_embeddings()(torch.tensor(tokens[1:]))
    x_TW = (
        torch.cat([norm(e_TW, "enorm"), norm(states_TW[:-1], "hnorm")], -1) @ tensors[named(family, "eh_proj.weight")].T
    )
    positions = torch.arange(len(x_TW))[None]
    mask = torch.full((len(x_TW), len(x_TW)), -torch.inf).triu(1)[None, None]
    h_1TW = model.model.layers[LAYERS](
        x_TW[None],
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(x_TW[None], positions),
    )
    h_TW = h_1TW[0]
    return norm(h_TW, "shared_head.norm") @ model.lm_head.weight.T


def test_it_computes_what_the_library_s_layer_does(folder: Path) -> None:
    """Read in chunks over a cache, row by row at the end, against one whole forward."""
    model, tokens = load(str(folder), device="cpu"), tokens_of(5, 12, VOCABULARY)
    states_TW = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    run, cache = Runner(model, layer_of(model)), KVCache(1, 1, 64)
    cache.reserve(cache.acquire(), 16)
    with torch.inference_mode():
        expected = reference(folder, tokens, states_TW)
        found = []
        for begin, end in ((0, 4), (4, 9), (9, 10), (10, 11)):
            batch = PackedBatch()
            batch.add_chunk(0, begin, tokens[begin + 1 : end + 1], wanted=end - begin)
            output, following = run.forward(batch, cache, run.features(states_TW[begin:end]), top=2)
            cache.commit(0, range(end - begin))
            found.append(output.logits_MV)
        assert following.shape == (1, WIDTH)
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    assert float((expected[3] - expected[7]).abs().max()) > 0.1  # not the same distribution everywhere


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm_output", [True, False])
def test_serving_and_training_compute_the_plain_forward(norm_output: bool, folder: Path) -> None:
    """And no wrong field of the description goes unseen."""
    model = load(str(folder), device="cpu")
    tensors = read_layer(model.config, model.source, model.name)
    layer = PredictionLayer(model.model, model.name, tensors, norm_output=norm_output)
    assert_all_equal_the_plain_forward(layer, folder, ["torch"])
    assert_a_wrong_description_is_seen(layer, folder, ["torch"])


def test_copies_of_the_target_s_tables_cost_nothing(folder: Path) -> None:
    layer = layer_of(load(str(folder), device="cpu"))
    theirs = load(str(folder), device="cpu")
    again = layer_of(theirs)
    embedding: Any = theirs.model.get_input_embeddings().weight
    assert again.embedding_VW.data_ptr() == embedding.data_ptr()
    assert layer.head_VW.shape == (VOCABULARY, WIDTH)


def test_shards_of_its_own(tmp_path: Path) -> None:
    folder = save_mtp("glm4_moe", tmp_path)
    whole = layer_of(load(str(folder), device="cpu")).state_dict()
    shard(folder)
    parts = layer_of(load(str(folder), device="cpu")).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def one_by_one(tensors: dict[str, Tensor]) -> None:
    """Experts as they are published."""
    name = f"{PREFIX}mlp.experts."
    if f"{name}gate_up_proj" in tensors:
        both, down = tensors.pop(f"{name}gate_up_proj"), tensors.pop(f"{name}down_proj")
        for number in range(4):
            gate, up = both[number].chunk(2)
            tensors |= {f"{name}{number}.gate_proj.weight": gate.clone(), f"{name}{number}.up_proj.weight": up.clone()}
            tensors[f"{name}{number}.down_proj.weight"] = down[number].clone()


def without(*names: str, prepared: Change = lambda tensors: None) -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        prepared(tensors)
        for name in names:
            del tensors[f"{PREFIX}{name}"]

    return apply


def made(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}{name}"] = change(tensors[f"{PREFIX}{name}"])

    return apply


def nothing_behind(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(PREFIX)]:
        del tensors[name]


def deeper(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(PREFIX)]:
        tensors[name.replace(PREFIX, "model.layers.5.")] = tensors.pop(name)


DAMAGE: dict[str, tuple[Change, type[ForetokenError], str]] = {
    "no layer": (nothing_behind, ModelError, f"no tensor model.layers.{LAYERS}.*; use the published checkpoint"),
    "another depth": (deeper, ModelError, "num_hidden_layers=2, but there is model.layers.5.*"),
    "no norm": (without("enorm.weight"), ModelError, "the tensor enorm.weight is missing"),
    "no projection": (without("eh_proj.weight"), ModelError, "the tensor eh_proj.weight is missing"),
    "no output norm": (without("shared_head.norm.weight"), ModelError, "the tensor shared_head.norm.weight is missing"),
    "no attention": (without("self_attn.o_proj.weight"), ModelError, "self_attn.o_proj.weight is missing"),
    "no expert": (
        without("mlp.experts.3.up_proj.weight", prepared=one_by_one),
        ModelError,
        "the tensor mlp.experts.3.up_proj.weight is missing",
    ),
    "another shape": (
        made("eh_proj.weight", lambda each: each[:, :WIDTH]),
        ModelError,
        "eh_proj.weight is [48, 48], but",
    ),
    "no numbers": (
        made("self_attn.o_proj.weight", lambda each: each / 0),
        ModelError,
        "self_attn.o_proj.weight holds NaN or infinite values",
    ),
    "a table of no numbers": (
        made("shared_head.head.weight", lambda each: each * math.nan),
        ModelError,
        "shared_head.head.weight holds NaN or infinite values",
    ),
    "another vocabulary": (
        made("shared_head.head.weight", lambda each: each[:90]),
        MismatchError,
        "shared_head.head.weight has 90 rows, but the vocabulary has 101",
    ),
    "one tensor more": (
        lambda tensors: tensors.update({f"{PREFIX}extra.weight": torch.zeros(3)}),
        ModelError,
        "the tensor extra.weight is not of such a layer",
    ),
    "quantised": (
        made("eh_proj.weight", lambda each: each.to(torch.float8_e4m3fn)),
        UnsupportedArchitecture,
        "eh_proj.weight of '{}' is quantised (torch.float8_e4m3fn)",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp("deepseek_v3", tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_layers(kind: str, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "copy"))
    change, error, message = DAMAGE[kind]
    retensor(folder, change)
    model = load(str(folder), device="cpu")
    with pytest.raises(error) as caught:
        compose.build({"method": "mtp"}, model)
    assert message.format(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [LAYERS - 1, LAYERS + 1])
def test_layers_that_are_counted_wrong(count: int, good: Path, tmp_path: Path) -> None:
    """The target loads: to it one layer is as good as another."""
    folder = Path(shutil.copytree(good, tmp_path / "copy"))
    reconfig(folder, num_hidden_layers=count)
    with pytest.raises(ModelError, match=rf"num_hidden_layers={count}, but there is model\.layers\.{LAYERS}\.\*"):
        compose.build({"method": "mtp"}, load(str(folder), device="cpu"))


def test_experts_in_both_layouts(tmp_path: Path) -> None:
    folder = save_mtp("deepseek_v3", tmp_path)
    model = load(str(folder), device="cpu")
    tensors = read_layer(model.config, model.source, model.name)
    named = {f"{PREFIX}{name}": value for name, value in tensors.items()}
    one_by_one(named)
    single = {name.removeprefix(PREFIX): value for name, value in named.items()}
    assert "mlp.experts.2.gate_proj.weight" in single
    stacked = {name: value for name, value in single.items() if ".experts." not in name}
    experts = [[single[f"mlp.experts.{e}.{kind}_proj.weight"] for e in range(4)] for kind in ("gate", "up", "down")]
    stacked["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*experts[:2], strict=True)])
    stacked["mlp.experts.down_proj"] = torch.stack(experts[2])
    ours, theirs = (
        PredictionLayer(model.model, model.name, single).state_dict(),
        PredictionLayer(model.model, model.name, stacked).state_dict(),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    extra = {"mlp.experts.4.gate_proj.weight": torch.zeros(1)}
    with pytest.raises(ModelError, match="more than 4 experts"):
        PredictionLayer(model.model, model.name, {**single, **extra})


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_mtp("glm4_moe", tmp_path)
    shard(folder)
    model = load(str(folder), device="cpu")
    lost = folder / "model-00002-of-00002.safetensors"
    kept = lost.read_bytes()
    lost.write_bytes(kept[:1000])
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        compose.build({"method": "mtp"}, model)
    lost.unlink()
    with pytest.raises(
        ModelError, match=r"the shard model-00002-of-00002\.safetensors with model\.layers\.2\..* is missing"
    ):
        compose.build({"method": "mtp"}, model)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="its index of tensors cannot be read"):
        compose.build({"method": "mtp"}, model)


def test_another_layout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("llama", tmp_path)
    assert main(["generate", "x", "--model", str(tmp_path), "--method", "mtp", "--dtype", "float32"]) == 1
    err = capsys.readouterr().err
    assert "is of type 'llama'; next-token-prediction layers are supported for deepseek_v3, glm4_moe" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"norm_output": 1}, "norm_output=1"),
        ({"head": "x"}, "unknown option 'head'"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.build({"method": "mtp", **options}, load(str(folder), device="cpu"))
    assert message in str(caught.value)
