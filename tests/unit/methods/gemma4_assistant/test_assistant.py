"""Assistants of Gemma 4 against transformers' own, with planted faults; their folders; drafts over a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError, MismatchError, ModelError
from foretoken.drafting.published.probe import probe_tokens
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.methods.gemma4_assistant.assistant import Gemma4Assistant, TargetKeys
from foretoken.methods.gemma4_assistant.drafter import Gemma4AssistantDrafter
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers import gguf_files
from helpers.adapters import shelf
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, WINDOW, load_eager, save_model
from helpers.untrained import random_part, untrained

KINDS = ("sliding_attention", "sliding_attention", "full_attention")
DEPTH = 4
PROMPT = tokens_of(3, 17, VOCAB_SIZE)  # longer than the windows
ROOT = 9
# 101 tokens are no multiple of clusters
CENTROIDS = {"vocab_size": 104, "vocab_size_per_layer_input": 104}


@cache
def folder_of_target(centroids: bool) -> Path:
    return save_model("gemma4_text", shelf() / f"assistants-{centroids}", **(CENTROIDS if centroids else {}))


@cache
def target_of(centroids: bool = False) -> LanguageModel:
    return load(folder_of_target(centroids), device="cpu")


@cache
def part(centroids: int = 0) -> Gemma4Assistant:
    found = random_part(Gemma4Assistant, target_of(centroids > 0), kinds=KINDS, centroids=centroids)
    assert isinstance(found, Gemma4Assistant)
    return found


def theirs(own: Gemma4Assistant, monkeypatch: pytest.MonkeyPatch, centroids: int) -> Tensor:
    """Logits [4, V] of a draft by transformers' classes, the target's and the assistant's."""
    # transformers 5.23 makes no model of layers that all share
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(lambda text: ["reuse"] * text.num_hidden_layers))
    config = AutoConfig.for_model(**own.config.settings)
    config._attn_implementation = "eager"
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.load_state_dict({**own.tensors(), "lm_head.weight": own.tensors()["model.embed_tokens.weight"]})
    monkeypatch.undo()
    target = load_eager(folder_of_target(centroids > 0))
    found = []
    with torch.inference_mode():
        read = target.model(torch.tensor([PROMPT]), use_cache=False, return_shared_kv_states=True)
        shared = {
            kind: tuple(each[:, :, -WINDOW if kind == "sliding_attention" else 0 :] for each in pair)
            for kind, pair in read.shared_kv_states.items()
        }
        token, f = torch.tensor([[ROOT]]), read.last_hidden_state[:, -1:]
        for _ in range(DEPTH):
            output = assistant(
                inputs_embeds=torch.cat([target.model.embed_tokens(token), f], dim=-1),
                position_ids=torch.tensor([[len(PROMPT)]]),
                shared_kv_states=shared,
            )
            found.append(output.logits[0, 0])
            token, f = output.logits.argmax(dim=-1), output.last_hidden_state
    return torch.stack(found)


class Reading:
    """A draft by our network after a prompt, with what a fault may change."""

    def __init__(self, own: Gemma4Assistant, target: LanguageModel) -> None:
        self.own, self.target = own, target
        cache, layers = target.new_cache(2), target.num_layers
        slot, batch = cache.acquire(), PackedBatch()
        cache.reserve(slot, len(PROMPT))
        batch.add_chunk(slot, 0, PROMPT, wanted=1)
        output = target.forward(batch, DensePlan(cache, batch), span=Span(0, layers, taps=(layers,)))
        cache.commit(slot, range(len(PROMPT)))
        self.state = output.hidden[layers][-1:]
        self.normed = True
        self.layers = own.layers_of(target, cache)
        self.cache, self.rows, self.position = cache, [(slot, len(PROMPT))], len(PROMPT)
        self.scale = 1.0

    def logits(self) -> Tensor:
        with torch.inference_mode():
            f = self.target.model.model.norm(self.state) if self.normed else self.state
            token, found = torch.tensor([ROOT]), []
            keys = TargetKeys(self.cache, self.layers, self.rows)
            for _ in range(DEPTH):
                e = self.scale * self.target.model.get_input_embeddings()(token)
                logits, f = self.own.read(e, f, torch.tensor([self.position]), keys)
                token = logits.argmax(dim=-1)
                found.append(logits[0])
        return torch.stack(found)


def error(ours: Tensor, expected: Tensor) -> float:
    seen = ours.isfinite()
    return float((ours[seen] - expected[seen]).abs().max() / expected[seen].std())


@pytest.mark.parametrize("centroids", [0, 8])
def test_drafts_equal_those_of_transformers(centroids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = part(centroids)
    expected = theirs(own, monkeypatch, centroids)
    found = Reading(own, target_of(centroids > 0)).logits()
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))
    assert error(found, expected) < 1e-3
    left_out = ~found.isfinite()
    assert left_out.sum(dim=-1).tolist() == [52 if centroids else 0] * DEPTH
    least = expected.where(~left_out, torch.inf).min(dim=-1, keepdim=True).values
    assert bool((expected < least)[left_out].all())


def shorter_by_one(reading: Reading) -> None:
    reading.rows = [(slot, length - 1) for slot, length in reading.rows]


def without_window(reading: Reading) -> None:
    for layer in reading.own.model.layers:
        layer.self_attn.sliding_window = None


def plain_embedding(reading: Reading) -> None:
    reading.scale = reading.target.width**-0.5


def offset_norms(reading: Reading) -> None:
    for name, weight in reading.own.named_parameters():
        if "norm" in name:
            weight.data += 1


FAULTS: dict[str, Callable[[Reading], Any]] = {
    "the state before the final norm": lambda reading: setattr(reading, "normed", False),
    "the next position": lambda reading: setattr(reading, "position", reading.position + 1),
    "the last key unseen": shorter_by_one,
    "no window": without_window,
    "embeddings without their scale": plain_embedding,
    "1 + w for w": offset_norms,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = random_part(Gemma4Assistant, target_of(), kinds=KINDS)
    expected = theirs(own, monkeypatch, 0)
    reading = Reading(own, target_of())
    FAULTS[fault](reading)
    assert error(reading.logits()[:1], expected[:1]) > 1e-3


# ------------------------------------------------------------------ folders


def saved(folder: Path, centroids: int = 0) -> Path:
    return Path(untrained(Gemma4Assistant, target_of(centroids > 0), folder, kinds=KINDS, centroids=centroids))


def test_a_folder_is_recognised_and_drafts_the_same_text(tmp_path: Path) -> None:
    llm = LLM(str(folder_of_target(False)), speculative_config={"model": str(saved(tmp_path)), "probe": False})
    plain = LLM(str(folder_of_target(False)), speculative_config={"method": "none"})
    accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, seed=1)
        ours, expected = (each.generate(["hello hello", "abcabc", "The"], params) for each in (llm, plain))
        assert temperature or [each.token_ids for each in ours] == [each.token_ids for each in expected]
        accepted += sum(each.metrics.num_accepted_tokens for each in ours)
    assert accepted > 0


def edited(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("post_projection.weight"), 'Missing key.* "post_projection.weight"'),
        (lambda tensors: tensors.update(more=torch.ones(1)), 'Unexpected key.* "more"'),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "size mismatch for model.norm.weight"),
    ],
)
def test_a_folder_that_its_config_contradicts_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        Gemma4Assistant.load(edited(saved(tmp_path), change))


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["num_hidden_layers"] = "two"
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="cannot be read"):
        Gemma4Assistant.load(folder)


def test_another_target_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "assistant")
    with pytest.raises(MismatchError, match=r"backbone_hidden_size is 64, for 101 tokens, but '.*' has 192"):
        Gemma4AssistantDrafter(Gemma4AssistantDrafter.Config(head=folder), load("zoo:draft", device="cpu"))
    narrow = load(save_model("gemma4_text", tmp_path / "narrow", global_head_dim=16), device="cpu")
    with pytest.raises(MismatchError, match="layer 2 of the Gemma 4 assistant has 4 heads of 32 elements, but layer 1"):
        Gemma4AssistantDrafter(Gemma4AssistantDrafter.Config(head=folder, probe=False), narrow)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_probe_counts_agreement_after_each_token(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the token after the next one are those of an assistant of another target, or read a token late."""
    target = target_of()
    tokens, batch, cache = probe_tokens(target), PackedBatch(), target.new_cache(1)
    cache.reserve(cache.acquire(), len(tokens))
    batch.add_chunk(0, 0, tokens, wanted=len(tokens))
    logits = target.forward(batch, DensePlan(cache, batch)).logits_MV[1:].roll(shift, 0)
    monkeypatch.setattr(Gemma4Assistant, "read", lambda own, e, f, positions, keys: (logits, f))
    config = Gemma4AssistantDrafter.Config(head=saved(tmp_path))
    if not shift:
        assert "agree with the target's greedy tokens at 100 %" in Gemma4AssistantDrafter(config, target).explanation
        return
    with pytest.raises(MismatchError, match=r"agree with the target's greedy tokens at . % of a short text only"):
        Gemma4AssistantDrafter(config, target)


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    file = gguf_files.vocabulary(tmp_path / "x.gguf", {"general.architecture": "gemma4-assistant"})
    with pytest.raises(ForetokenError, match="Gemma 4 assistant: it is not read from GGUF files: name its folder"):
        LLM(str(folder_of_target(False)), speculative_config={"model": str(file)})
