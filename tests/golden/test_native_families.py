"""Deviations of a family from the common anatomy are computed; a missing one is detected when a model is tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.models.adoption import fit
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.native.layout import Layout
from foretoken_lab import testing as stubs
from helpers.golden import LayerPlan, Session, tokens_of
from helpers.native_models import error, make, plain, text, twins
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model
from helpers.variants import Case, cases
from helpers.zoo_llms import PROMPTS, ids, with_config

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

Change = Callable[[Layout], Layout]


def of_all(**changes: Any) -> Change:
    return lambda layout: replace(layout, **changes)


def of_blocks(**changes: Any) -> Change:
    return lambda layout: replace(layout, blocks=[replace(each, **changes) for each in layout.blocks])


def without_offset(layout: Layout) -> Layout:
    return replace(layout, final_norm_D=layout.final_norm_D - 1)


def windows_of_others(layout: Layout) -> Layout:
    blocks = list(layout.blocks)
    windows = [each.window for each in (*blocks[1:], blocks[0])]
    return replace(layout, blocks=[replace(each, window=w) for each, w in zip(blocks, windows, strict=True)])


def norms_of_one_head(layout: Layout) -> Layout:
    d = layout.head_dim
    blocks = [replace(each, q_norm_d=each.q_norm_d[:d], k_norm_d=each.k_norm_d[:d]) for each in layout.blocks]
    return replace(layout, blocks=blocks)


def experts_of_all_groups(layout: Layout) -> Layout:
    blocks = [
        each if each.experts is None else replace(each, experts=replace(each.experts, groups=1, open_groups=1))
        for each in layout.blocks
    ]
    return replace(layout, blocks=blocks)


def compressed_rows_without_gain(layout: Layout) -> Layout:
    blocks = [
        replace(each, latent=replace(each.latent, norm_C=torch.ones_like(each.latent.norm_C)))
        for each in layout.blocks
        if each.latent is not None
    ]
    return replace(layout, blocks=blocks)


def of_another_layer(layout: Layout) -> Layout:
    blocks = [replace(each, kv_layer=0) if each.kv_layer == 2 else each for each in layout.blocks]
    return replace(layout, blocks=blocks)


def inputs_by_token(layout: Layout) -> Layout:
    assert layout.inputs is not None
    return replace(layout, inputs=layout.inputs._replace(gain_I=0 * layout.inputs.gain_I))


GEMMA4 = "gemma4, shared keys and inputs"
FAULTS: list[tuple[str, str, Change]] = [
    ("gemma2", "no cap of scores", of_all(score_cap=0.0)),
    ("gemma2", "no cap of logits", of_all(logit_cap=0.0)),
    ("gemma2", "windows of other layers", windows_of_others),
    ("gemma2", "no norm after attention", of_blocks(attention_end_norm_D=None)),
    ("gemma2", "no norm after the MLP", of_blocks(mlp_end_norm_D=None)),
    ("gemma3", "gain without its offset", without_offset),
    ("gemma3", "embeddings as they are", of_all(embedding_scale=1.0)),
    ("gemma3", "one rotary for all", of_blocks(rotary=1)),
    ("gemma3", "another activation", of_all(activation="silu")),
    ("gemma3", "heads not normed", of_blocks(q_norm_d=None, k_norm_d=None)),
    (GEMMA4, "values as they are", of_blocks(norm_values=False)),
    (GEMMA4, "layers without their factors", of_blocks(factor=1.0)),
    (GEMMA4, "keys of the first layer of the same kind", of_another_layer),
    (GEMMA4, "inputs of layers by their tokens alone", inputs_by_token),
    ("olmo2", "a norm before attention", lambda layout: of_blocks(attention_norm_D=layout.final_norm_D)(layout)),
    ("olmo2", "norms over each head", norms_of_one_head),
    ("smollm3", "rotary in every layer", of_blocks(rotary=0)),
    ("granite", "branches as they are", of_all(residual_scale=1.0)),
    ("granite", "logits as they are", of_all(logit_scale=1.0)),
    ("granite", "scores by the width of a head", of_all(scaling=32**-0.5)),
    ("glm4", "halves, not neighbours", of_all(interleaved=False)),
    ("glm4_moe, groups", "experts of all groups", experts_of_all_groups),
    ("deepseek_v2", "halves, not neighbours", of_all(interleaved=False)),
    ("deepseek_v3", "compressed keys without their gain", compressed_rows_without_gain),
    ("deepseek_v3", "neighbours, not halves", of_all(interleaved=True)),
]


@pytest.mark.parametrize(("family", "fault", "change"), FAULTS, ids=[f"{each[0]}: {each[1]}" for each in FAULTS])
def test_a_forgotten_part_is_detected(
    family: str, fault: str, change: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = fit.layout_of
    monkeypatch.setattr(fit, "layout_of", lambda *given: change(right(*given)))
    twin, reference = twins(family, torch.float32)
    with caplog.at_level(logging.WARNING):
        model = LanguageModel(twin, None, name=family)
    assert model.native_decoder is None
    windows = fault == "windows of other layers"
    assert ("attends to a window" if windows else "other logits than the model's own modules") in caplog.text
    tokens = text(30)
    session = Session(model)
    assert (
        error(session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)) < 1e-4
    )  # it got its modules back


@pytest.mark.parametrize("dtype", [torch.float32, "int8", "int4"], ids=str)
@pytest.mark.parametrize("family", ["phi3", "glm4", "deepseek_v3"])
def test_projections_in_one_still_work_and_are_given_back(family: str, dtype: torch.dtype | str) -> None:
    model, reference = make(family, dtype)
    tokens = text(30)
    session = Session(model, plan=LayerPlan)
    ours, theirs = session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)
    exact = plain(reference.float(), tokens)
    assert error(ours, exact) <= max(1e-4, 1.5 * error(theirs, exact))
    twin, _ = twins(family, dtype)
    before = {name: each.weight.clone() for name, each in twin.named_modules() if name.endswith("proj")}
    adoption = fit.Adoption(twin, 256)
    packed = {name: each.weight for name, each in twin.named_modules() if name.endswith("proj")}
    assert before.keys() == packed.keys()
    adoption.undo()
    assert fit.misfit(twin) is None
    for name, weight in before.items():
        assert torch.equal(packed[name].float(), weight.float())
        assert torch.equal(twin.get_submodule(name).weight, weight)


SERVED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 4.0},
    "gemma2": {},
    "gemma3_text": {},
    "glm4": {"head_dim": 16},
}


@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_the_library_s(name: str, tmp_path: Path) -> None:
    """Plain, with chains that mostly fail, and with trees that do; prompts are longer than the windows."""
    save_model(name, tmp_path, **SERVED[name])
    reference = load_eager(tmp_path)
    prompts = [tokens_of(count, count, VOCAB_SIZE) for count in (3, 17)]
    expected = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        with torch.inference_mode():
            output = reference.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=3,
                eos_token_id=None,
            )
        expected.append(output[0, len(prompt) :].tolist())
    target = load(tmp_path, device="cpu")
    assert target.native_decoder is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for method in (None, "ngram", stubs.Random(VOCAB_SIZE, tree=True)):
        config = None if method is None else {"method": method, "num_speculative_tokens": 6}
        llm = LLM.from_target(target, speculative_config=config, max_num_seqs=2)
        assert ids(llm.generate([{"prompt_token_ids": each} for each in prompts], params)) == expected


@cache
def small_gemma(dtype: str, folder: Path) -> LanguageModel:
    found = load(save_model("gemma3_text", folder), dtype=dtype, device="cpu")
    assert found.native_decoder is not None
    return found


def reading_within() -> list[Case]:
    """Drafters that read hidden states, leave early or read the target's keys: the first variant of each."""
    names = ("eagle", "dovetail", "kangaroo", "del")
    return [next(case for case in cases() if case.entry.name == name) for name in names]


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("case", reading_within(), ids=lambda case: case.label)
def test_drafters_that_look_inside(case: Case, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = small_gemma(dtype, tmp_path_factory.getbasetemp() / f"gemma-{dtype}")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = ids(with_config(None, target=target).generate(PROMPTS[:2], params))
    assert ids(with_config(case.config(target, None, 5), target=target).generate(PROMPTS[:2], params)) == expected
