"""EAGLE's network in its forms, and its folders: ours, those made to the published schema, and damaged ones."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretoken.cli.main import main
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.drafting.published.blocks import RopeScaling
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.feature_heads import (
    Change,
    assert_a_wrong_description_is_seen,
    assert_all_equal_the_plain_forward,
    difference,
    edit,
    first_column,
    gone,
    layer_by_hand,
    read_text,
    retensor,
    rms,
    runner_of,
    save_tiny,
    served_logits,
)
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import PROMPTS, base, prompt_ids, target, with_config

LLAMA3 = {  # of Llama 3.1, but for a context in which a few positions show it
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALING = RopeScaling.of(LLAMA3)
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 40},
    "all tokens": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "qwen3": {"norm_heads": True, "attention_bias": True, "depths": (2, 1, 2)},
    "llama 3's positions": {"rope_scaling": SCALING},
    "eagle2": {"algorithm": "eagle"},
    "eagle2 with a bias": {"algorithm": "eagle", "fusion_bias": True},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sizes that the native decoder takes."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("shape", SHAPES)
def test_serving_and_training_compute_the_plain_forward(shape: str, tiny: Path) -> None:
    """And no wrong field of the description goes unseen."""
    network = random_part(Eagle, load(str(tiny), device="cpu"), **SHAPES[shape])
    assert_all_equal_the_plain_forward(network, tiny)
    assert_a_wrong_description_is_seen(network, tiny)


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle"])
def test_tables_of_its_own_are_used(algorithm: str, tiny: Path) -> None:
    """Embedding and LM head. Planted: the target's embedding, or its LM head, in place of its own."""
    model = load(str(tiny), device="cpu")
    shared = random_part(Eagle, model, algorithm=algorithm)
    network = shared.with_rows_of(model.model)
    with torch.no_grad():
        assert network.lm_head is not None
        assert network.embed_tokens is not None
        for table in (network.lm_head.weight, network.embed_tokens.weight):
            table += table.std() * torch.randn(table.shape, generator=torch.Generator().manual_seed(4))
    assert_all_equal_the_plain_forward(network, tiny)
    text = read_text(network, tiny)
    for name in ("lm_head", "embed_tokens"):
        wrong = deepcopy(network)
        setattr(wrong, name, None)
        assert difference(served_logits(runner_of(wrong, tiny, "native"), text), text.logits) > 1e-2
        assert difference(served_logits(runner_of(wrong, tiny, "torch"), text), text.logits) > 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_the_first_pair_by_hand(shape: str, tiny: Path) -> None:
    """The definition of both networks, written out for a pair that sees itself only."""
    model = load(str(tiny), device="cpu")
    head = random_part(Eagle, model, **SHAPES[shape])
    config, weights = head.config, head.state_dict()
    f, e = torch.randn(2, head.fc.in_features, generator=torch.Generator().manual_seed(2))
    f, e = (f, e[:64]) if config.algorithm == "eagle3" else (f[:64], e[:64])
    own = {name.removeprefix("layers.0."): each for name, each in weights.items()}
    if config.algorithm == "eagle3":
        state = f
        if config.norm_before_fc:
            state = rms(state, weights["input_norm.weight"], config.norm_eps)
        if config.fc_norm:
            pieces = [
                rms(each, weights[f"fc_norm.{n}.weight"], config.norm_eps) for n, each in enumerate(state.split(64))
            ]
            state = torch.cat(pieces)
        g = weights["fc.weight"] @ state
        normed = rms(g, own["hidden_norm.weight"], config.norm_eps)
        read = torch.cat([rms(e, own["input_layernorm.weight"], config.norm_eps), normed])
        h = layer_by_hand(own, config, read, normed if config.norm_before_residual else g)
        expected = rms(h, weights["norm.weight"], config.norm_eps)
    else:
        x = weights["fc.weight"] @ torch.cat([e, f]) + weights.get("fc.bias", torch.zeros(()))
        expected = layer_by_hand(own, config, x, x)
    torch.testing.assert_close(first_column(head, f, e.repeat(10, 1), 9), expected, rtol=1e-4, atol=1e-4)


def test_positions_count_only_by_their_distance(tiny: Path) -> None:
    """EAGLE's positions in other engines begin at 1: the same distribution. Depths moved by one: another
    distribution.
    """
    model = load(str(tiny), device="cpu")
    head = random_part(Eagle, model, draft_vocab_size=40)
    run, g_TW, found = Runner(model, head), torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), []
    for places in (range(5), range(7, 12), (0, 1, 2, 3, 9)):
        cache, batch = KVCache(1, 1, 64), PackedBatch()
        cache.reserve(cache.acquire(), 16)
        batch.add_chunk(0, 0, tokens_of(1, 5, 100), wanted=1)
        batch.positions[:] = places
        found.append(run.forward(batch, cache, g_TW, top=0)[0].logits_MV.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert float((found[0] - found[2]).nan_to_num(0).abs().max()) > 1e-3


# ------------------------------------------------------------------ folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good head of the target, with a vocabulary of its own."""
    return Path(untrained(Eagle, target(), tmp_path / "head", draft_vocab_size=512))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_part_is_loaded(shape: str, tiny: Path, tmp_path: Path) -> None:
    head = random_part(Eagle, load(str(tiny), device="cpu"), **SHAPES[shape])
    head.save(tmp_path)
    again = Eagle.load(tmp_path)
    assert again.config == head.config
    ours, theirs = again.tensors(), head.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def published(folder: Path, model: LanguageModel, count: int, prefix: str = "layers.0.") -> dict[str, Any]:
    """A folder as others write it: no fingerprint, a head and an embedding of its own, the library's extra fields."""
    text = model.config.get_text_config()
    width, inner, vocab, mlp = text.hidden_size, text.num_attention_heads * text.head_dim, text.vocab_size, 96
    kv = text.num_key_value_heads * text.head_dim
    settings = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": count,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 2],
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/their-model"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "head_dim": text.head_dim,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": mlp,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": text.num_attention_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": text.num_key_value_heads,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "vocab_size": vocab,
        },
        "transformers_version": "4.56.1",
    }
    shapes = {
        "fc.weight": (width, 3 * width),
        f"{prefix}hidden_norm.weight": (width,),
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}post_attention_layernorm.weight": (width,),
        f"{prefix}self_attn.q_proj.weight": (inner, 2 * width),
        f"{prefix}self_attn.k_proj.weight": (kv, 2 * width),
        f"{prefix}self_attn.v_proj.weight": (kv, 2 * width),
        f"{prefix}self_attn.o_proj.weight": (width, inner),
        f"{prefix}mlp.gate_proj.weight": (mlp, width),
        f"{prefix}mlp.up_proj.weight": (mlp, width),
        f"{prefix}mlp.down_proj.weight": (width, mlp),
        "norm.weight": (width,),
        "lm_head.weight": (count, width),
        "embed_tokens.weight": (vocab, width),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    ids_K = torch.arange(count) * (vocab // count)
    tensors["d2t"] = ids_K - torch.arange(count)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids_K, True)
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS)
    return settings


@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer."])
def test_a_folder_of_the_published_schema_drafts(prefix: str, tmp_path: Path) -> None:
    published(tmp_path / "theirs", target(), 512, prefix)
    recipe = {"method": "eagle", "head": str(tmp_path / "theirs"), "probe": False}  # its weights are random
    llm = with_config({**recipe, "num_speculative_tokens": 3})
    drafter = compose.build(recipe, target()).drafter
    assert "no fingerprint" in drafter.explanation
    assert "someone/their-model" in drafter.explanation
    assert drafter.needs.hidden_layers is not None
    assert drafter.needs.hidden_layers.depths == (1, 2)
    params = SamplingParams(max_tokens=12)
    prompts = [{"prompt_token_ids": prompt_ids(text)} for text in PROMPTS[:2]]
    expected, found = base().generate(prompts, params), llm.generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.metrics.num_draft_tokens for each in found) > 3


def test_neutral_values_of_unsupported_fields_change_nothing(folder: Path) -> None:
    plain = Eagle.load(folder).config
    edit_block(layer_types=["full_attention"], sliding_window=None, use_sliding_window=False, max_window_layers=28)(
        folder
    )
    edit_block(partial_rotary_factor=1.0, rope_scaling=None)(folder)
    compose.build({"method": "eagle", "head": str(folder)}, target())
    assert Eagle.load(folder).config == plain


def test_the_layers_that_an_older_folder_counts_are_its_targets(tmp_path: Path) -> None:
    """Of EAGLE-1/2 one layer is built whatever the config says: it may be the whole target's."""
    folder = Path(untrained(Eagle, target(), tmp_path / "head", algorithm="eagle"))
    edit_block(num_hidden_layers=12)(folder)
    compose.build({"method": "eagle", "head": str(folder)}, target())
    edit(transformer_layer_architecture="GemmaDecoderLayer")(folder)
    with pytest.raises(ModelError, match="transformer_layer_architecture='GemmaDecoderLayer': known is Llama"):
        compose.build({"method": "eagle", "head": str(folder)}, target())


def test_what_we_write_says_what_the_schema_wants(folder: Path) -> None:
    settings, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    assert settings["speculators_model_type"] == settings["speculators_config"]["algorithm"] == "eagle3"
    assert settings["architectures"] == ["Eagle3Speculator"]
    owner = settings["speculators_config"]
    assert owner["default_proposal_method"] == owner["proposal_methods"][0]["proposal_type"]
    assert owner["verifier"]["name_or_path"] == "zoo:base"
    block = settings["transformer_layer_config"]
    assert (block["model_type"], block["num_hidden_layers"], block["vocab_size"]) == ("llama", 1, 8192)
    assert settings["draft_vocab_size"] == 512
    assert torch.equal(torch.arange(512) + tensors["d2t"], tensors["t2d"].nonzero().flatten())
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (384, 768)
    assert tensors["fc.weight"].shape == (384, 3 * 384)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_llama_3_s_positions_are_those_of_the_library(place: str, tmp_path: Path) -> None:
    """In either place where a folder says them; and a folder of ours says them again."""
    folder = Path(untrained(Eagle, target(), tmp_path / "head"))
    plain = Eagle.load(folder).rates()[0]
    said = {place: {**LLAMA3, "rope_theta": 10000.0}}
    edit_block(**{"rope_parameters": ..., **said})(folder)
    found = Eagle.load(folder)
    config = LlamaConfig(head_dim=found.config.head_dim, rope_parameters={**LLAMA3, "rope_theta": 10000.0})
    wanted, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(found.rates()[0].float(), wanted, rtol=1e-5, atol=0)
    assert factor == 1
    assert not torch.allclose(found.rates()[0], plain)
    found.save(tmp_path / "again")
    assert Eagle.load(tmp_path / "again").config == found.config


# ------------------------------------------------------------------ refusals


def edit_block(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        block = json.loads((folder / CONFIG).read_text())["transformer_layer_config"]
        changed = {key: value for key, value in {**block, **changes}.items() if value is not ...}
        edit(transformer_layer_config=changed)(folder)

    return change


def owner(**verifier: Any) -> dict[str, Any]:
    return {"algorithm": "eagle3", "verifier": {"name_or_path": "zoo:base", **verifier}}


DAMAGE: dict[str, tuple[Change, type[ForetokenError], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), ModelError, "no EAGLE head for"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelError, "has no EAGLE head"),
    "half the weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]) and None,
        ModelError,
        "cannot be read",
    ),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{") and None, ModelError, "cannot be read"),
    "another algorithm": (edit(speculators_model_type="dflash"), ModelError, "speculators_model_type='dflash'"),
    "another layout": (
        edit(speculators_model_type=...),
        ModelError,
        "transformer_layer_config is there, but speculators_model_type is missing",
    ),
    "two algorithms": (
        edit(speculators_config={**owner(), "algorithm": "mtp"}),
        ModelError,
        "speculators_config.algorithm='mtp'",
    ),
    "no verifier": (edit(speculators_config={"algorithm": "eagle3"}), ModelError, "speculators_config.verifier"),
    "no block": (edit(transformer_layer_config=...), ModelError, "transformer_layer_config=None"),
    "no vocabulary size": (edit(draft_vocab_size=...), ModelError, "draft_vocab_size is missing"),
    "a vocabulary in words": (edit(draft_vocab_size="many"), ModelError, "draft_vocab_size='many'"),
    "a larger vocabulary": (edit(draft_vocab_size=9000), ModelError, "draft_vocab_size=9000 is above"),
    "another vocabulary size": (edit(draft_vocab_size=500), ModelError, "d2t is [512] of torch.int64: integers, [500]"),
    "a layer more": (edit_block(num_hidden_layers=2), ModelError, "layers.1.input_layernorm.weight is missing"),
    "layers in words": (edit_block(num_hidden_layers="two"), ModelError, "layers='two'"),
    "another block": (edit_block(model_type="mamba"), ModelError, "transformer_layer_config.model_type='mamba'"),
    "another activation": (edit_block(hidden_act="gelu"), ModelError, "hidden_act='gelu'"),
    "other positions": (edit_block(rope_parameters={"rope_type": "longrope"}), ModelError, "rope_type='longrope'"),
    "no factor": (edit_block(rope_parameters={"rope_type": "yarn"}), ModelError, "rope_parameters.factor is missing"),
    "positions in parts": (
        edit_block(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        ModelError,
        "transformer_layer_config.rope_scaling.low_freq_factor is missing",
    ),
    "positions that cannot be": (
        edit_block(rope_scaling={**LLAMA3, "factor": "8"}),
        ModelError,
        "transformer_layer_config.rope_scaling.factor='8'",
    ),
    "two kinds of positions": (edit_block(rope_scaling=LLAMA3), ModelError, "rope_scaling={'rope_type': 'llama3'"),
    "positions in words": (edit_block(rope_scaling="linear"), ModelError, "rope_scaling='linear': an object"),
    "two rates": (edit_block(rope_theta=500.0), ModelError, "rope_theta=500.0, but rope_parameters.rope_theta=10000.0"),
    "positions by kind of layer": (
        edit_block(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500.0}}),
        ModelError,
        "transformer_layer_config.rope_parameters.full_attention",
    ),
    "a part of each head": (
        edit_block(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
        ModelError,
        "transformer_layer_config.rope_parameters.partial_rotary_factor=0.25",
    ),
    "a part of each head, as before": (
        edit_block(partial_rotary_factor=0.5),
        ModelError,
        "transformer_layer_config.partial_rotary_factor=0.5",
    ),
    "a window of no size": (
        edit_block(layer_types=["sliding_attention"], sliding_window=None),
        ModelError,
        "transformer_layer_config.sliding_window=None",
    ),
    "windows of more layers": (
        edit_block(layer_types=["sliding_attention"] * 2, sliding_window=512),
        ModelError,
        "transformer_layer_config.layer_types has 2 entries for num_hidden_layers=1",
    ),
    "a layer of another kind": (
        edit_block(layer_types=["linear_attention"]),
        ModelError,
        "transformer_layer_config.layer_types=['linear_attention']",
    ),
    "no width": (edit_block(hidden_size=...), ModelError, "transformer_layer_config.hidden_size is missing"),
    "no heads": (edit_block(num_attention_heads=0), ModelError, "num_attention_heads=0"),
    "other heads": (edit_block(num_attention_heads=4), ModelError, "o_proj.weight is [384, 384], but [384, 256]"),
    "depths in words": (edit(eagle_aux_hidden_state_layer_ids="all"), ModelError, "eagle_aux_hidden_state_layer_ids"),
    "depth 0": (edit(eagle_aux_hidden_state_layer_ids=[0, 4, 7]), ModelError, "eagle_aux_hidden_state_layer_ids"),
    "two depths": (edit(eagle_aux_hidden_state_layer_ids=[1, 4]), ModelError, "fc.weight is [384, 1152]"),
    "too deep": (edit(eagle_aux_hidden_state_layer_ids=[1, 4, 9]), MismatchError, "[1, 4, 9], but 'zoo:base' has 8"),
    "another width": (edit(target_hidden_size=512), ModelError, "fc.weight is [384, 1152], but [384, 1536]"),
    "another target": (
        edit(speculators_config=owner(fingerprint="0" * 64)),
        MismatchError,
        "the head was trained for other weights, those of 'zoo:base': its first drafts agree",
    ),
    "a fingerprint of nothing": (edit(speculators_config=owner(fingerprint=None)), ModelError, "target_fingerprint"),
    "rounded weights": (
        retensor(fc__weight=lambda each: each.to(torch.int8)),
        ModelError,
        "fc.weight is torch.int8: bfloat16, float16 or float32 are known",
    ),
    "a missing tensor": (retensor(norm__weight=gone), ModelError, "the tensor norm.weight is missing"),
    "one tensor more": (retensor(extra=lambda each: torch.zeros(3)), ModelError, "the tensor extra is not of such"),
    "no maps": (retensor(d2t=gone, t2d=gone), ModelError, "d2t and t2d are missing"),
    "a mask of too few": (
        retensor(d2t=gone, t2d=lambda each: each & (torch.arange(len(each)) > 99)),
        ModelError,
        "but draft_vocab_size=512",
    ),
    "a map of floats": (retensor(d2t=lambda each: each.float()), ModelError, "d2t is [512] of torch.float32"),
    "a short map": (retensor(t2d=lambda each: each[:100]), ModelError, "t2d is [100]"),
    "a map that leads away": (retensor(d2t=lambda each: each + 9000), ModelError, "d2t leads to tokens 9000"),
    "a map that falls": (retensor(d2t=lambda each: each.flip(0)), ModelError, "do not increase"),
    "maps that differ": (retensor(t2d=lambda each: each.roll(1)), ModelError, "t2d marks other tokens"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_heads(kind: str, folder: Path) -> None:
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error) as caught:
        compose.build({"method": "eagle", "head": str(folder)}, target())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_published_folder_of_another_width_or_vocabulary(tmp_path: Path) -> None:
    other = load(save_model("llama", tmp_path / "other"), device="cpu")
    published(tmp_path / "theirs", other, 40)
    with pytest.raises(MismatchError, match=r"target_hidden_size is .* but that of 'zoo:base' is 384"):
        compose.build({"method": "eagle", "head": str(tmp_path / "theirs")}, target())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 0}, "max_depth=0"),
        ({"max_depth": 65}, "max_depth=65"),
        ({"width": 2.5}, "width=2.5"),
        ({"tree": "yes"}, "tree='yes'"),
        ({"head": 3}, "head=3"),
        ({"depth": 2}, "unknown option 'depth'"),
        ({"tree": True, "verifier": "ratio"}, "verifier='ratio' verifies chains"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.build({"method": "eagle", "head": str(folder), **options}, target())
    assert message in str(caught.value)


def test_the_command_line_says_it_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retensor(d2t=lambda each: each + 9000)(folder)
    command = ["generate", "x", "--method", "eagle", "--dtype", "float32", "--set", f"head={folder}"]
    assert main(command) == 1
    _, err = capsys.readouterr()
    progress = ("loading ", "checking ", "packing ")  # of a slow load
    (line,) = (each for each in err.splitlines() if not each.startswith(progress))
    assert line.startswith("error: ")
    assert "d2t leads to tokens" in line
