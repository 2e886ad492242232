"""A recipe's run: its files, the folders that it resumes, and the folders that it leaves unchanged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, LlamaConfig

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.data import documents as doc
from foretoken.models.load import load_network, load_tokenizer
from foretoken.train import mixture, muon, outputs
from foretoken.train.distil import special_ids
from foretoken.train.mixture import Source
from foretoken.train.recipe import Recipe, build, run
from foretoken.train.trainer import Bounds, Schedule
from foretoken_lab import recipes
from foretoken_lab.recipes.tokenizer import train_tokenizer
from helpers.disk import disk_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)


def tiny_config(tokenizer, **options):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(**{"vocab_size": len(tokenizer), **sizes, **options}, **special_ids(tokenizer))


RECIPE = Recipe(
    name="tiny",
    description="of the tests",
    config=tiny_config,
    sources=lambda root: [],
    block=16,
    schedule=Schedule(batch=2, micro_batch=2),
    tokenizer="zoo:draft",
)


BOUNDS = Bounds(tokens=2 * 2 * 16)
LIKE_BASE = ("base-tasks", "base-tasks-2", "base-tasks-3", "base-tasks-4")  # the same network on other text


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}.", "response": f"It is {n}."}) + "\n" for n in range(300)))
    return Source("mine", 1.0, lambda: doc.documents(path), (path,))


def test_a_full_disk_while_a_tokenizer_is_saved(tmp_path, corpus):
    recipe = replace(RECIPE, tokenizer=partial(train_tokenizer, size=300))
    with disk_of(5000), pytest.raises(ForetokenError, match=r"cannot be written \(File too large .*free space and run"):
        run(recipe, [corpus], tmp_path, bounds=BOUNDS)
    assert run(recipe, [corpus], tmp_path, bounds=BOUNDS)["steps"] == 2
    assert len(load_tokenizer(str(tmp_path))) > 256


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full_product if name in LIKE_BASE else ()) for name in recipes.NAMES]
)
def test_every_recipe_makes_a_model_that_transformers_loads(name, tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 500)
    monkeypatch.setattr(outputs, "BATCH", 4)
    monkeypatch.setattr(outputs, "LENGTH", 8)
    monkeypatch.setattr(muon, "_STEPS", 1)  # no weight is looked at, and five take most of the step
    recipe = recipes.find(name)
    small = replace(recipe, block=16, schedule=replace(recipe.schedule, batch=2, micro_batch=1))
    record = run(small, [corpus], tmp_path, bounds=Bounds(tokens=2 * 16), seed=1)
    loader = AutoModelForMaskedLM if name == "diffusion" else AutoModelForCausalLM
    model, found = loader.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template
    assert model.config.vocab_size == len(tokenizer)
    assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    if isinstance(recipe.tokenizer, str):  # with the vocabulary of the zoo
        for claimed in re.findall(r"([\d.]+) M parameters", recipe.description):
            assert float(claimed) == round(record["parameters"] / 1e6, 1)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.isfinite().all()
    assert not getattr(model.config, "output_router_logits", False)


def test_a_mixer_begins_as_the_attention_that_it_replaces():
    recipe = recipes.find("hybrid")
    model, start = build(recipe, load_tokenizer("zoo:base")), load_network("zoo:base", dtype="float32")
    ids = torch.arange(20, 52)[None]
    layer, source = model.model.layers[2], start.model.layers[2]
    mixer, attention = layer.mamba, source.self_attn
    hidden = torch.randn(1, 5, 384)
    gate, x, B, C, step = mixer.in_proj(hidden).split([384, 384, 384, 384, 6], dim=-1)
    keys, queries = attention.k_proj(hidden), attention.q_proj(hidden)
    for head in range(6):
        mine, shared = slice(64 * head, 64 * head + 64), slice(64 * (head // 3), 64 * (head // 3) + 64)
        scores = queries[0, :, mine] @ keys[0, :, shared].T * 64**-0.5
        torch.testing.assert_close(C[0, :, mine] @ B[0, :, mine].T, scores)
        torch.testing.assert_close(x[..., mine], attention.v_proj(hidden)[..., shared])
    assert not step.any()
    assert gate.any()
    for number in range(0, 8, 2):  # without what the mixers and their originals add both compute the same
        torch.nn.init.zeros_(model.model.layers[number].mamba.out_proj.weight)
        torch.nn.init.zeros_(start.model.layers[number].self_attn.o_proj.weight)
    torch.testing.assert_close(model(input_ids=ids).logits, start(input_ids=ids).logits, atol=1e-3, rtol=1e-4)


def test_experts_begin_as_the_mlps_that_they_were_cut_from():
    """For every token two that are different halves, whatever its router makes of it."""
    recipe = recipes.find("moe")
    model, start = build(recipe, load_tokenizer("zoo:base")), load_network("zoo:base", dtype="float32")
    hidden = torch.randn(1, 40, 384)
    for layer, source in zip(model.model.layers, start.model.layers, strict=True):
        _, _, chosen = layer.mlp.gate(hidden)
        assert (chosen.sum(1) % 2 == 1).all()
        assert len(chosen.unique()) == 4
        expected = source.mlp(hidden)
        assert (layer.mlp(hidden) - expected).norm() < 0.1 * expected.norm()
    ids = torch.arange(20, 52)[None]
    ours, theirs = (each(input_ids=ids).logits.log_softmax(-1) for each in (model, start))
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() < 0.02


def test_an_unknown_recipe():
    with pytest.raises(ConfigError, match="--recipe hybri: did you mean 'hybrid'"):
        recipes.find("hybri")
