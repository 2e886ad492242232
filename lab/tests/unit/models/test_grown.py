"""Grown models: the same function, of the requested size, from every listed family; refusals with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from foretoken.core.errors import ConfigError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.engine.llm import LLM
from foretoken.models.load import load, load_as_is, source_of
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from foretoken_lab.models import grown
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, STATE_SPACE, Family, save_model

# layouts with options that change the growing; peaked attention would amplify rounding, hence Granite's own multipliers
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.4, "logits_scaling": 2.0}),
    "granitemoe": ("granitemoe", {"attention_multiplier": 0.25, "embedding_multiplier": 3.0}),
    "cohere_norms": ("cohere", {"use_qk_norm": True}),
    "gemma_untied": ("gemma", {"tie_word_embeddings": False}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "qwen3_moe_alternating": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "smollm3_without_rotary": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}
GROWING = [name for name, family in FAMILIES.items() if family.model_type in grown.FAMILIES]
GROWING = list(dict.fromkeys([*GROWING, *VARIANTS, "mamba2", "mamba2_groups", "bamba", "bamba_groups"]))
GROWING += ["falcon_h1", "granitemoehybrid", "granitemoehybrid_dense"]
ALL_COPIES = {
    "llama",
    "mixtral",
    "gpt_neox",
    "olmo2",
    "bamba",
    "mamba2",
}  # one of every kind of growth; of others, c = 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build.library()  # the native decoder comes from the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "foretoken"


def logits(source: str) -> list[torch.Tensor]:
    """Of the library's own plain model, in float64 and float32."""
    transformers.utils.logging.disable_progress_bar()
    plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, **plainest).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return [model.to(dtype)(input_ids=ids).logits for dtype in (torch.float64, torch.float32)]


def assert_same_function(original: str, name: str, *, mixers: bool = False) -> None:
    """Equal but for rounding: to 1e-5 of the largest logit in float32, to 1e-6 where only the norms are float32.

    Args:
        mixers: the library computes states in float32, whatever the dtype, and random ones amplify the difference.
    """
    close, closer = (4e-5, 1e-5) if mixers else (1e-5, 1e-6)
    ours, theirs = logits(source_of(name)), logits(original)
    for found, expected, tolerance in zip(ours, theirs, (closer, close), strict=True):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("size", ["25m", pytest.param("60m", marks=pytest.mark.full_product)])
def test_base_grows_and_stays_itself(size: str) -> None:
    assert_same_function(source_of("zoo:base"), f"grown:base:{size}")


def counts_of(family: str) -> tuple[int, ...]:
    if "gemma" in family:
        return (1, 4)
    return (1, 2, 3) if family in ALL_COPIES else (3,)


def once_or_more(family: str, copies: int) -> Any:
    """By default every family with the most copies, and one with every number."""
    often = family != "llama" and copies < max(counts_of(family))
    return pytest.param(family, copies, marks=pytest.mark.full_product if often else ())


@pytest.mark.parametrize(
    ("family", "copies"), [once_or_more(family, copies) for family in GROWING for copies in counts_of(family)]
)
def test_every_growing_family_keeps_its_function(family: str, copies: int, tmp_path: Path) -> None:
    layout, options = VARIANTS.get(family, (family, {}))
    source = save_model(layout, tmp_path / "original", **options)
    model = load_as_is(source).model
    larger = grown.grow(model, grown.Growth(copies, 5))
    larger.save_pretrained(tmp_path / "grown")
    assert (larger.config.num_hidden_layers, larger.config.hidden_size) == (5, copies * model.config.hidden_size)
    assert larger.dtype == model.dtype
    assert_same_function(str(source), str(tmp_path / "grown"), mixers=family in STATE_SPACE)


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "mixtral"])
def test_a_grown_model_runs_in_our_engine(family: str, tmp_path: Path) -> None:
    source, prompt = save_model(family, tmp_path), {"prompt_token_ids": [1, 40, 61, 72, 40, 61]}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    original = LLM(str(source), dtype="float32", device="cpu", speculative_config=None)
    larger = LLM(f"grown:{source}:2m", dtype="float32", device="cpu", speculative_config={"method": "ngram"})
    assert larger.target.num_parameters > 5 * original.target.num_parameters
    assert larger.generate(prompt, params)[0].token_ids == original.generate(prompt, params)[0].token_ids


def test_gemma_is_not_rounded_in_bfloat16_and_its_parts_do_not_grow(tmp_path: Path) -> None:
    source = save_model("gemma", tmp_path / "original", dtype=torch.bfloat16)
    model = load_as_is(source).model
    grown.grow(model, grown.Growth(4, 3)).save_pretrained(tmp_path / "grown")
    assert_same_function(str(source), str(tmp_path / "grown"))
    origin = grown.Origin(source, 64, 3, 4, 3, shared=False)
    assert origin.first_share == 1.0
    with pytest.raises(MismatchError, match=r"does not serve 'it'.* train one for it"):
        origin.check_shared("head", "it")


def test_a_grown_hybrid_says_what_the_original_says_and_a_drafter_drafts_for_it() -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    original = LLM("zoo:hybrid", dtype="float32", device="cpu", speculative_config=None)
    larger = LLM("grown:hybrid:50m", dtype="float32", device="cpu", speculative_config={"method": "suffix"})
    assert larger.target.num_parameters > 2.5 * original.target.num_parameters
    assert larger.target.native_decoder is not None or build.library() is None
    prompt = "Once upon a time"
    assert larger.generate(prompt, params)[0].token_ids == original.generate(prompt, params)[0].token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tied_embeddings_and_biases_keep_the_function(family: str, tmp_path: Path) -> None:
    options = {**FAMILIES[family].options, "tie_word_embeddings": True, "attention_bias": True}
    source = save_model(Family(family, options), tmp_path)
    assert_same_function(str(source), f"grown:{source}:0.5m")


def test_a_planted_mistake_is_seen(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "original")
    wrong = Path(shutil.copytree(source_of(f"grown:{source}:0.5m"), tmp_path / "wrong"))
    model = AutoModelForCausalLM.from_pretrained(wrong)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.1
    model.save_pretrained(wrong)
    with pytest.raises(AssertionError):
        assert_same_function(str(source), str(wrong))


@pytest.mark.parametrize(("size", "parameters"), [("25m", 25e6), ("100m", 100e6), ("0.2b", 200e6)])
def test_the_size_is_close_to_the_requested_one(size: str, parameters: float) -> None:
    model = load_as_is(f"grown:base:{size}").model
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.06)
    assert model.dtype == torch.bfloat16


def test_added_layers_are_spread_and_add_nothing() -> None:
    model = load_as_is("grown:base:100m").model
    silent = [not layer.mlp.down_proj.weight.any() for layer in model.model.layers]
    assert (len(silent), sum(silent)) == (15, 7)
    assert "11" not in "".join(str(int(each)) for each in silent)  # never two in a row: 8 real ones stand between
    assert all(
        layer.self_attn.q_proj.weight.any() for layer in model.model.layers
    )  # they are not zero, so they cost time


def test_no_weight_is_rounded() -> None:
    original = load_as_is("zoo:base").model
    model = load_as_is("grown:base:0.2b").model
    given, width = original.model.layers[0].mlp.up_proj.weight, original.config.hidden_size
    copies = model.config.hidden_size // width
    assert copies == 3
    shares = model.model.layers[0].mlp.up_proj.weight[: len(given)].view(len(given), copies, width)
    assert torch.equal(shares.float().sum(1), given.float())


def test_it_is_made_once_and_again_when_the_original_changes(tmp_path: Path, own_cache: Path) -> None:
    source = save_model("llama", tmp_path / "original")
    first = source_of(f"grown:{source}:0.5m")
    written = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert source_of(f"grown:{source}:0.5m") == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == written
    save_model("llama", source, seed=1)
    assert source_of(f"grown:{source}:0.5m") != first
    assert sorted(own_cache.glob("grown/*")) == sorted(map(Path, {first, source_of(f"grown:{source}:0.5m")}))


def test_our_engine_loads_it_with_the_original_s_tokenizer(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path)
    ours, original = load(f"grown:{source}:0.5m", device="cpu"), load(source, device="cpu")
    assert ours.tokenizer.get_vocab() == original.tokenizer.get_vocab()
    assert ours.end_ids == original.end_ids
    assert ours.num_parameters > 3 * original.num_parameters


@pytest.mark.parametrize("family", ["gpt_bigcode", "gemma3n_text", "hunyuan_v1_moe"])
def test_a_family_that_is_not_known_to_grow(family: str, tmp_path: Path, own_cache: Path) -> None:
    source = save_model(family, tmp_path / "original")
    with pytest.raises(UnsupportedArchitecture, match=f"type '{FAMILIES[family].model_type}' cannot be grown"):
        source_of(f"grown:{source}:5m")
    assert not [path for path in own_cache.rglob("*") if path.is_file()]  # nothing half made is left


def test_norms_after_the_sums_cannot_carry_shares(tmp_path: Path) -> None:
    source = save_model("opt", tmp_path, do_layer_norm_before=False)
    with pytest.raises(UnsupportedArchitecture, match="no norm before its head can carry shares"):
        source_of(f"grown:{source}:5m")


def test_an_unknown_part(tmp_path: Path) -> None:
    model = load_as_is(save_model("llama", tmp_path)).model
    model.model.layers[0].surprise = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedArchitecture, match=r"'model\.layers\.0\.surprise\.weight' is unknown"):
        grown.growth_for(model, 1e6, "grown:it:1m")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grown:base", "write grown:NAME:SIZE"),
        ("grown:base:", "write grown:NAME:SIZE"),
        ("grown::100m", "write grown:NAME:SIZE"),
        ("grown:base:large", "write grown:NAME:SIZE"),
        ("grown:base:-5m", "write grown:NAME:SIZE"),
        ("grown:base:9999999b", "of memory; name a smaller size"),
        ("grown:base:10m", "the original has 15.7 M parameters; name a size beyond that"),
        ("grown:zoo:bsae:100m", "did you mean 'base'"),
        ("grown:/nowhere:100m", "'/nowhere' is no model of the zoo and no folder with a checkpoint"),
        ("shape:100", "did you mean '100m'"),
    ],
)
def test_a_name_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(name, device="cpu")


def test_a_damaged_original(tmp_path: Path) -> None:
    source = save_model("llama", tmp_path)
    (source / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        source_of(f"grown:{source}:1m")


def test_a_shape_has_random_weights_of_that_shape(own_cache: Path) -> None:
    model = load("shape:16m", device="cpu")
    assert (model.num_layers, model.config.hidden_size) == (8, 384)
    assert json.loads((own_cache / "shapes" / "16m" / "config.json").read_text())["vocab_size"] == 8192
    assert load("shape:16m", device="cpu").source == model.source
