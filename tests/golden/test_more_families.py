"""Greedy tokens equal to the library's ``generate`` for families that no other test builds, each a few layers small.

One set of sizes serves all of them: a config takes the fields that it knows. What the library can build at this size
and we cannot run is refused with a reason (tests/golden/test_refused.py), never computed wrongly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from foretoken import LLM, SamplingParams
from foretoken.models.load import load
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, Family, load_eager, save_model

SIZES = {
    **FAMILIES["llama"].options,
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# of their own: heads of two parts; config and model must agree on the rotary one
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
PLAIN = (
    *("afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "codegen", "cohere2_moe", "ctrl", "cwm", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt-sw3", "gptj", "granitemoeshared"),
    *("helium", "hunyuan_v1_dense", "jais2", "jetmoe", "minimax_m2", "ministral"),
    *("ministral3", "modernbert-decoder", "moshi", "nanochat", "olmo", "persimmon", "phimoe", "seed_oss", "solar_open"),
    "vaultgemma",
)
LATENT_TYPES = ("glm4_moe_lite", "minicpm3", "youtu", "longcat_flash")
PROMPT, LENGTH = 6, 6


def family_of(model_type: str) -> Family:
    sizes: dict[str, Any] = {**SIZES, **(LATENT if model_type in LATENT_TYPES else {})}
    if model_type == "longcat_flash":
        sizes = {**sizes, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24}
        sizes |= {"zero_expert_num": 2}
    config = CONFIG_MAPPING[model_type]
    known = {each.name for each in dataclasses.fields(config)} | set(config.attribute_map)
    return Family(model_type, {name: value for name, value in sizes.items() if name in known})


@pytest.mark.parametrize("model_type", [*PLAIN, *LATENT_TYPES])
def test_greedy_tokens_are_the_library_s(model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    save_model(family_of(model_type), tmp_path)
    prompt = tokens_of(0, PROMPT, VOCAB_SIZE)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = load_eager(tmp_path).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=3,
            eos_token_id=None,
        )[0, PROMPT:]
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    target = load(tmp_path, device="cpu")
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        (output,) = LLM.from_target(target, speculative_config=config).generate([prompt], params)
        assert output.error is None
        assert output.token_ids == expected.tolist()
