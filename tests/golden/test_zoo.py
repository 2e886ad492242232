"""The bundled models are ordinary Hugging Face folders: transformers loads them alone, and they have learnt English."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from foretoken import zoo

BUNDLED = [model.name for model in map(zoo.find, zoo.MODELS) if model.bundled]
CHAT = [{"role": "user", "content": "Tom has 12 marbles. He buys 30 more. How many has he now?"}]
TEXT = "The man went to the house and said that he had seen the horse in the field."


def load(name):
    kind = AutoModelForMaskedLM if name == "diffusion" else AutoModelForCausalLM
    return kind.from_pretrained(zoo.path(name), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", BUNDLED)
def test_transformers_loads_it_alone(name):
    model, tokenizer = load(name), AutoTokenizer.from_pretrained(zoo.path(name))
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        logits = model(**{key: ids[key] for key in ("input_ids", "attention_mask")}).logits
    assert logits.shape[-1] == len(tokenizer) == 8192
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", [name for name in BUNDLED if name != "diffusion"])
def test_plain_english_is_likelier_than_its_words_backwards(name):
    model, tokenizer = load(name), AutoTokenizer.from_pretrained(zoo.path(name))

    def loss(text):
        ids = tokenizer("<|bos|>" + text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))

    forwards, backwards = loss(TEXT), loss(" ".join(reversed(TEXT.split())))
    assert forwards < math.log(8192) - 3
    assert forwards < backwards - 0.5


def test_diffusion_fills_a_mask_better_than_by_chance():
    model, tokenizer = load("diffusion"), AutoTokenizer.from_pretrained(zoo.path("diffusion"))
    ids = tokenizer("<|bos|>" + TEXT, return_tensors="pt")["input_ids"]
    masked = ids.clone()
    masked[0, -3:] = tokenizer.mask_token_id
    with torch.inference_mode():
        logits = model(masked).logits[0, -3:].float()
    assert float(torch.nn.functional.cross_entropy(logits, ids[0, -3:])) < math.log(8192) - 2


@pytest.mark.parametrize("name", [name for name in BUNDLED if name not in ("base",)])
def test_the_record_says_how_it_was_made(name):
    record = json.loads((zoo.path(name) / "training.json").read_text(encoding="utf-8"))
    assert record["recipe"] == zoo.path(name).name
    assert record["tokens"] > 0
    assert record["minutes"] > 0
    assert record["mixture"]
    assert record["provenance"]["command"].startswith("foretoken train")
