"""Models that also read images, given text alone: the text part is run, and its tokens are the wrapper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from foretoken import LLM, SamplingParams
from foretoken.doctor import checkpoint
from foretoken.models.load import load
from foretoken.native import build
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, STATE_SPACE, VOCAB_SIZE, WINDOW, randomise, save_tokenizer

TEXT = {**FAMILIES["llama"].options, "head_dim": 16}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
}
CLIP, SIGLIP = ({**VISION, "model_type": f"{kind}_vision_model"} for kind in ("clip", "siglip"))
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


def text(model_type: str, **others: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **others}


# the model that runs, and the wrapper's configuration
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlamaForCausalLM", {"text_config": text("llama"), "vision_config": CLIP}),
    "llava_next": ("MistralForCausalLM", {"text_config": text("mistral"), "vision_config": CLIP}),
    "mistral3": (
        "MistralForCausalLM",
        {"text_config": text("mistral"), "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}},
    ),
    "idefics3": ("LlamaForCausalLM", {"text_config": text("llama"), "vision_config": VISION}),
    "smolvlm": ("LlamaForCausalLM", {"text_config": text("llama"), "vision_config": VISION}),
    "internvl": (
        "Qwen2ForCausalLM",
        {"text_config": text("qwen2"), "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "text_config": text("gemma3_text", sliding_window=WINDOW),
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "boi_token_index": 97,
            "eoi_token_index": 98,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "text_config": {**FAMILIES["gemma4_text"].options, "model_type": "gemma4_text"},
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
            "audio_config": None,
        },
    ),
    "aya_vision": ("AyaVisionForConditionalGeneration", {"text_config": text("cohere2"), "vision_config": SIGLIP}),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": text("qwen2_vl_text", rope_parameters=SECTIONS),
            "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**TEXT, "rope_parameters": SECTIONS}, "vision_config": TOWER},
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        {
            "text_config": {
                **STATE_SPACE["qwen3_5_text"].options,
                "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
            },
            "vision_config": TOWER,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**TOWER, "deepstack_visual_indexes": [0]},
        },
    ),
}
PROMPT, LENGTH = 6, 12


def save_wrapper(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    _, options = WRAPPERS[name]
    image = {"image_token_id": 99, "video_token_id": 98} if "qwen" in name else {"image_token_index": 99}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **options, **image)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", WRAPPERS)
def test_greedy_tokens_are_the_wrapper_s(name: str, tmp_path: Path) -> None:
    save_wrapper(name, tmp_path)
    prompt = tokens_of(0, PROMPT, 90)
    ids = torch.tensor([prompt])
    wrapper = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        found = wrapper.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=3,
            eos_token_id=None,
        )
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    plain = LLM(tmp_path, speculative_config=None, device="cpu")
    for llm in (plain, plain.with_method({"method": "ngram", "num_speculative_tokens": 4})):
        assert type(llm.target.model).__name__ == WRAPPERS[name][0]
        assert (llm.target.vocab_size, llm.target.max_length) == (VOCAB_SIZE, 128)
        (output,) = llm.generate([prompt], params)
        assert output.token_ids == found[0, PROMPT:].tolist()


@pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")
@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_the_text_part_has_the_fast_path_of_its_family_and_nothing_else(name: str, tmp_path: Path) -> None:
    model = load(save_wrapper(name, tmp_path, torch.bfloat16), device="cpu")
    assert model.native_decoder is not None
    assert model.dtype == torch.bfloat16
    assert model.source == str(tmp_path)
    assert not [name for name, _ in model.model.named_modules() if "vision" in name]
    (path,) = (each for each in checkpoint.check(str(tmp_path), None) if each.check == "path")
    assert path.found == f"native ({model.config.model_type})"
