"""Families with attention or a recurrence that a packed batch would get wrong are refused by name, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward.ssm import layout
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers import golden
from helpers.golden import Session
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, STATE_SPACE, VOCAB_SIZE, Family, load_eager, randomise, save_model

LLAMA = dict(FAMILIES["llama"].options)
LATENT = dict(FAMILIES["deepseek_v2"].options)
SMALL = {**LLAMA, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4}
OLD = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
INTERFACE = "does not go through the library's attention interface"

TUNED = {
    **SMALL,
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "layer_types": ["full_attention"] * 4,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": True,
}

PAIR = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "max_position_embeddings": 128,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
COUNTS = "its forward takes no 'position_ids': it counts positions by itself"
PHIMOE = Family("phimoe", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64})

REFUSED: dict[str, tuple[Family, str]] = {
    # position biases on the scores, from tables of their own
    "bloom": (Family("bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 2, "n_head": 4}), INTERFACE),
    "mpt": (Family("mpt", {"vocab_size": VOCAB_SIZE, "d_model": 48, "n_layers": 2, "n_heads": 4}), INTERFACE),
    "falcon": (Family("falcon", {**LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2}), INTERFACE),
    # attention written out in the model
    "openai-gpt": (Family("openai-gpt", OLD), INTERFACE),
    "gpt_neo": (
        Family(
            "gpt_neo",
            {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 48,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 5,
            },
        ),
        INTERFACE,
    ),
    # masks without a keyword
    "llama4_text": (
        Family(
            "llama4_text", {**SMALL, "attention_chunk_size": 5, "num_local_experts": 2, "intermediate_size_mlp": 64}
        ),
        "is not causal beyond 5 positions: serve no more, with max_model_len=5",
    ),
    # scores with a temperature that depends on the row's number in the batch
    "llama4_text_tuned": (
        Family("llama4_text", {**TUNED, "floor_scale": 8192, "max_position_embeddings": 2**15}),
        "around position 8190 it counts the rows of the batch instead of reading the positions given: serve no more, "
        "with max_model_len=8190",
    ),
    "llama4_text_tuned_late": (
        Family("llama4_text", {**TUNED, "floor_scale": 2**14, "max_position_embeddings": 2**15}),
        "around position 32764 it counts the rows of the batch",
    ),
    "llama4_text_tuned_early": (
        Family("llama4_text", {**TUNED, "floor_scale": 16}),
        "around position 124 it counts the rows of the batch",
    ),
    "gemma3_both_ways": (
        Family("gemma3_text", {**FAMILIES["gemma3_text"].options, "use_bidirectional_attention": True}),
        "attention mask is not causal",
    ),
    "phimoe": (PHIMOE, "is not causal beyond 64 positions: serve no more, with max_model_len=64"),
    # positions that cannot be given
    "bart": (Family("bart", PAIR), COUNTS),
    "bart_uneven": (Family("bart", {**PAIR, "encoder_layers": 3}), COUNTS),
    "trocr": (Family("trocr", PAIR), COUNTS),
    "pegasus": (Family("pegasus", PAIR), COUNTS),
    "bert_encoder": (Family("bert", {**LLAMA, "num_hidden_layers": 2}), "attention mask is not causal"),
    "doge": (Family("doge", {**SMALL, "num_hidden_layers": 2}), "builds an attention mask of its own"),
    # more than one attention per layer
    "diffllama": (Family("diffllama", SMALL), "attends more than once"),
    # recurrences of other kinds
    "rwkv": (
        Family(
            "rwkv", {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "attention_hidden_size": 48}
        ),
        INTERFACE,
    ),
    "recurrent_gemma": (Family("recurrent_gemma", {**SMALL, "lru_width": 64}), "layer 0 is of type 'linear_attention'"),
    "minimax": (
        Family("minimax", {**SMALL, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2}),
        "layer 0 is of type 'linear_attention'",
    ),
    "kimi_linear": (
        Family(
            "kimi_linear",
            {
                **LATENT,
                "layer_types": ["linear_attention", "full_attention"],
                "num_hidden_layers": 2,
                "linear_head_dim": 16,
                "linear_num_heads": 4,
                "num_local_experts": 4,
            },
        ),
        "layer 0, KimiLinearDeltaAttention: its states decay by the output of its KimiLinearForgetGate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_family_is_refused(name: str, tmp_path: Path) -> None:
    family, reason = REFUSED[name]
    save_model(family, tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="model '") as caught:
        load(tmp_path, device="cpu")
    message = str(caught.value)
    assert reason in message
    assert family.model_type.split("_")[0].replace("-", "") in message.lower().replace(str(tmp_path).lower(), "")


def test_a_mixer_with_renamed_parts_is_refused() -> None:
    options = STATE_SPACE["olmo_hybrid"].options
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo_hybrid", **options))
    mixer = model.model.layers[0].linear_attn
    mixer.gate_of_output = mixer._modules.pop("g_proj")
    with pytest.raises(UnsupportedArchitecture, match="layer 0, OlmoHybridGatedDeltaNet: its projections have names"):
        layout.mixers(model)


def test_llama_4_is_served_up_to_the_end_of_its_first_chunk(tmp_path: Path) -> None:
    sizes = {"attention_chunk_size": 64, "floor_scale": 64, "intermediate_size_mlp": 64, "num_local_experts": 2}
    save_model(Family("llama4_text", {**SMALL, **sizes}), tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="with max_model_len=64"):
        load(tmp_path, device="cpu")
    model = load(tmp_path, device="cpu", max_length=63)
    assert golden.worst(Session(model), load_eager(tmp_path), "chain", VOCAB_SIZE) < 6e-5


@pytest.mark.parametrize(("window", "length"), [(64, 64), (64, 20), (128, None), (4096, None)], ids=str)
def test_a_window_that_is_never_reached_does_not_matter(window: int, length: int | None, tmp_path: Path) -> None:
    """PhiMoE's masks have a window that its layers do not announce; its checkpoints set it to their context."""
    save_model(PHIMOE, tmp_path, sliding_window=window)
    model = load(tmp_path, device="cpu", max_length=length)
    assert golden.worst(Session(model), load_eager(tmp_path), "chain", VOCAB_SIZE) < 6e-5


def library_model(**options: Any) -> Any:
    config = AutoConfig.for_model("llama", **{**LLAMA, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="foretoken")
    randomise(model)
    return model.eval()


class Shift(torch.nn.Module):
    """What a short convolution, a token shift or a state space does: a row that sees the row before it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.2 * torch.roll(x, 1, dims=1)


@pytest.mark.parametrize("layer", [0, 2])
def test_mixing_outside_attention_is_refused(layer: int) -> None:
    """No layer type says so, and every layer calls attention: only the rows themselves give it away."""
    model = library_model()
    model.model.layers[layer].mlp = Shift(model.model.layers[layer].mlp)
    with pytest.raises(UnsupportedArchitecture, match=r"rows of a packed batch mix"):
        LanguageModel(model, None, name="shifted")


def test_positions_of_its_own_are_refused() -> None:
    model = library_model()
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1])[None])
    with pytest.raises(UnsupportedArchitecture, match="positions are not the given ones"):
        LanguageModel(model, None, name="counting")


def test_a_window_that_layers_do_not_announce_is_refused() -> None:
    """A mask with a window of 4096 next to layers that pass none: right for the first 4096 tokens, then silently
    not.
    """
    model = library_model(max_position_embeddings=8192)
    model.config.sliding_window = 4096
    module = __import__(type(model).__module__, fromlist=["create_causal_mask"])
    from transformers.masking_utils import create_sliding_window_causal_mask

    before = module.create_causal_mask
    module.create_causal_mask = create_sliding_window_causal_mask
    try:
        with pytest.raises(UnsupportedArchitecture, match="attention mask is not causal"):
            LanguageModel(model, None, name="hidden window")
    finally:
        module.create_causal_mask = before


def test_probing_removes_its_mask_function() -> None:
    """Every other forward runs without the library's masks."""
    from transformers import AttentionMaskInterface

    LanguageModel(library_model(), None, name="llama")
    assert "foretoken" not in AttentionMaskInterface._global_mapping
