"""Mixtures of experts in the native decoder: a row's experts depend on the row alone, bit for bit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.core.tree import TokenTree
from foretoken.forward.feed_forward import routed_experts
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.models.adoption import fit
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.native.layout import Block, Experts, Layout
from foretoken.native.tiled_experts import TiledExperts
from foretoken_lab import testing as stubs
from helpers.golden import PARENTS, LayerPlan, Session, tokens_of
from helpers.native_models import error, make, plain, text, twins
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model
from helpers.zoo_llms import PROMPTS, ids

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

MANY = "qwen3_moe, many experts"  # 8 of 40
BETWEEN = "qwen3_moe, dense layers between"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (MANY, torch.bfloat16),
        ("mixtral, window", torch.float32),
        ("granitemoe", torch.bfloat16),
        (BETWEEN, "int4"),
        ("qwen2_moe", torch.bfloat16),
        ("deepseek_v3", torch.bfloat16),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_rows_that_share_its_experts(family: str, dtype: torch.dtype | str) -> None:
    model, _ = make(family, dtype)
    tokens = text(60)
    one = Session(model)
    slot = one.cache.acquire()
    single = torch.cat([one.chunk(slot, [token]) for token in tokens])
    before = torch.get_num_threads()
    try:
        for threads, edges in ((1, [0, 60]), (3, [0, 13, 30, 31, 60]), (2, [0, 5, 10, 60])):
            torch.set_num_threads(threads)
            other = Session(model)
            slot = other.cache.acquire()
            chunked = torch.cat([other.chunk(slot, tokens[a:b]) for a, b in itertools.pairwise(edges)])
            assert torch.equal(chunked, single)
    finally:
        torch.set_num_threads(before)

    tree = TokenTree(text(len(PARENTS), 2), PARENTS)
    session, alone = Session(model), Session(model)
    slot, single_slot = session.cache.acquire(), alone.cache.acquire()
    for each, at in ((session, slot), (alone, single_slot)):
        each.chunk(at, tokens[:50])
    rows = session.draft(slot, tokens[50], tree)
    for node in range(-1, len(tree)):
        path = [tokens[50], *(tree.tokens[i] for i in tree.path_to(node))]
        assert torch.equal(torch.cat([alone.chunk(single_slot, [token]) for token in path])[-1], rows[node + 1])
        alone.cache.rollback(single_slot, 50)


@pytest.mark.parametrize("family", ["mixtral", MANY])
def test_bfloat16_is_as_close_to_exact_as_the_library_is(family: str) -> None:
    """By the median row: where a choice is close, the two sides may choose other experts."""
    model, reference = make(family, torch.bfloat16)
    tokens = text(60)
    session = Session(model)
    ours = session.chunk(session.cache.acquire(), tokens)
    theirs = plain(reference, tokens)
    exact = plain(reference.float(), tokens)
    ours_R, theirs_R = ((each - exact).square().mean(dim=1).sqrt().median() for each in (ours, theirs))
    assert ours_R <= 1.1 * theirs_R


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_damaged_row_keeps_to_itself(dtype: torch.dtype) -> None:
    """Its choice of experts means nothing; their other rows keep their bits."""
    model, _ = make("mixtral", dtype)
    bad = 5
    tokens = [token + (token == bad) for token in text(40)]
    whole = Session(model)
    expected = whole.chunk(whole.cache.acquire(), tokens)
    with torch.no_grad():
        model.model.model.embed_tokens.weight[bad] = torch.nan
    for place in (1, 16, 39):
        session = Session(model)
        rows = session.chunk(session.cache.acquire(), [*tokens[:place], bad, *tokens[place + 1 :]])
        assert torch.equal(rows[:place], expected[:place])
        assert rows[place].isnan().all()


def test_a_router_that_is_no_number_shows_in_the_logits() -> None:
    """One damaged expert's score makes every share none, as the library's softmax does."""
    for family in ("mixtral", "olmoe"):
        model, _ = make(family, torch.float32)
        session = Session(model)
        fused = model.native_decoder
        assert fused is not None
        experts = fused._model.layers[1].experts.contents
        router = next(each for each in fused._keep if getattr(each, "data_ptr", int)() == experts.router.tiles)
        router[0, :, 3] = torch.nan
        assert session.chunk(session.cache.acquire(), text(5)).isnan().all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_experts_have_the_bits_of_their_definition_and_are_given_back(dtype: str) -> None:
    twin, reference = twins("qwen2_moe", dtype)
    own = twin.model.layers[0].mlp.experts
    defined = [(gate_up.dense(), down.dense()) for gate_up, down in own.weights]
    adoption = fit.Adoption(twin, 256)
    generator = torch.Generator().manual_seed(2)
    x_RD, chosen_Rk = torch.randn(7, 96, generator=generator), torch.randint(5, (7, 2), generator=generator)
    shares_Rk = torch.rand(7, 2, generator=generator)
    found = twin.model.layers[0].mlp.experts
    assert isinstance(found, TiledExperts)
    assert torch.equal(
        found(x_RD, chosen_Rk, shares_Rk), reference.model.layers[0].mlp.experts(x_RD, chosen_Rk, shares_Rk)
    )
    adoption.undo()
    given_back = twin.model.layers[0].mlp.experts
    assert isinstance(given_back, QuantisedExperts)
    for before, after in zip(defined, given_back.weights, strict=True):
        assert torch.equal(before[0], after[0].dense())
        assert torch.equal(before[1], after[1].dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_library_s_modules_still_work_and_are_given_back(dtype: torch.dtype) -> None:
    model, reference = make(BETWEEN, dtype)
    tokens = text(30)
    session = Session(model, plan=LayerPlan)
    ours, theirs = session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)
    assert float((ours - theirs).square().mean(dim=1).sqrt().median() / theirs.std()) < (
        1e-5 if dtype.itemsize > 2 else 0.05
    )
    assert all(isinstance(each.module, TiledExperts) for each in routed_experts(model.model))

    twin, _ = twins(BETWEEN, dtype)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    kinds = {name: type(module) for name, module in twin.named_modules()}
    adoption = fit.Adoption(twin, 256)
    for index, layer in enumerate(twin.model.layers):
        if isinstance(getattr(layer.mlp, "experts", None), TiledExperts):
            name = f"model.layers.{index}.mlp.experts"
            assert torch.equal(layer.mlp.experts.gate_up_proj, before[f"{name}.gate_up_proj"])
            assert torch.equal(layer.mlp.experts.down_proj, before[f"{name}.down_proj"])
    adoption.undo()
    assert fit.misfit(twin) is None
    assert {name: type(module) for name, module in twin.named_modules()} == kinds
    after = twin.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


Change = Callable[[Experts], Experts]
FAULTS: dict[str, tuple[str, Change]] = {
    "an expert fewer": ("mixtral", lambda x: replace(x, chosen=x.chosen - 1)),
    "shares over all experts": ("qwen3_moe", lambda x: replace(x, normed=False)),
    "shares over the chosen ones": (BETWEEN, lambda x: replace(x, normed=True)),
    "the router of others": ("granitemoe", lambda x: replace(x, router_ED=x.router_ED.roll(1, dims=0))),
    "an MLP next to them that counts whole": ("qwen2_moe", lambda x: replace(x, opening_D=None)),
}
SEEN_THROUGH_ROUNDING = ("an expert fewer", "the router of others")  # of these wide weights


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, torch.float32) for fault in FAULTS), *((fault, torch.bfloat16) for fault in SEEN_THROUGH_ROUNDING)],
    ids=str,
)
def test_a_mistaken_layer_is_detected(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family, change = FAULTS[fault]
    right = fit.layout_of

    def wrong(*given: Any) -> Layout:
        layout = right(*given)
        blocks = [each for each in layout.blocks if isinstance(each, Block)]
        mistaken = [each if each.experts is None else replace(each, experts=change(each.experts)) for each in blocks]
        return replace(layout, blocks=mistaken)

    monkeypatch.setattr(fit, "layout_of", wrong)
    twin, reference = twins(family, dtype)
    with caplog.at_level(logging.WARNING):
        model = LanguageModel(twin, None, name=family)
    assert model.native_decoder is None
    assert "other logits than the model's own modules" in caplog.text
    if dtype == torch.float32:
        tokens = text(20)
        session = Session(model)
        assert error(session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)) < 1e-4


def a_hook(model: Any) -> None:
    model.model.layers[1].mlp.experts.register_forward_hook(lambda module, args, output: 2 * output)


def a_bias_of_the_router(model: Any) -> None:
    model.model.layers[2].mlp.gate.register_parameter("e_score_correction_bias", nn.Parameter(torch.zeros(5)))


def a_weight_of_another_dtype(model: Any) -> None:
    model.model.layers[0].mlp.experts.double()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (a_hook, "'model.layers.1.mlp.experts' (MixtralExperts) has a hook"),
        (a_bias_of_the_router, "the experts of layer 2 have 'e_score_correction_bias' next to their weights"),
        (a_weight_of_another_dtype, "the experts of layer 0 have no plain 'gate_up_proj' of torch.float32"),
    ],
    ids=["hook", "bias", "dtype"],
)
def test_experts_that_are_not_their_weights_make_the_model_unfit(change: Callable[[Any], None], reason: str) -> None:
    twin, _ = twins("mixtral", torch.float32)
    change(twin)
    assert reason in (fit.misfit(twin) or "")


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 24}, "are 24 wide, no multiple of 32"),
        ("olmoe", {"clip_qkv": 4.0}, "are clipped"),
        ("mixtral", {"hidden_act": "quick_gelu"}, "activation is 'quick_gelu'"),
    ],
)
def test_other_mixtures_take_the_general_path(
    kind: str, options: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(save_model(kind, tmp_path, **options), device="cpu").native_decoder is None
    assert reason in caplog.text


SERVED: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": [1], "norm_topk_prob": True}, "mixtral": {}}


@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_the_library_s(name: str, tmp_path: Path) -> None:
    """Plain, with chains that mostly fail, and with trees that do."""
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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_trained_mixture_says_the_same_with_and_without_drafts(dtype: str) -> None:
    target = load("zoo:moe", dtype=dtype, device="cpu")
    assert target.native_decoder is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = ids(LLM.from_target(target, max_num_seqs=2).generate(PROMPTS[:2], params))
    for method in ("ngram", stubs.Random(target.vocab_size, tree=True)):
        config = {"method": method, "num_speculative_tokens": 6}
        llm = LLM.from_target(target, speculative_config=config, max_num_seqs=2)
        assert ids(llm.generate(PROMPTS[:2], params)) == expected
