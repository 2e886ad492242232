"""LayerNorms, parallel residuals, MLPs without a gate, biases, MLPs next to experts: checkpoints served natively.

Text is the library's ``generate``; with drafts, in company and in other dtypes it is that of plain decoding. What is
forgotten of such a family is found out when the model is tried.
"""

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
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.native.layout import Layout
from foretoken_lab import testing as stubs
from helpers.golden import LayerPlan, Session, tokens_of
from helpers.native_models import error, make, plain, text, twins
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, load_eager, save_model
from helpers.variants import cases
from helpers.zoo_llms import PROMPTS, ids, with_config

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

SERVED: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi": {},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {},
    "opt": {},
    "nemotron": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "qwen2_moe": {"moe_intermediate_size": 32},
}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def generated(target: LanguageModel, method: Any, prompts: list[Any]) -> list[list[int]]:
    config = None if method is None else {"method": method, "num_speculative_tokens": 6}
    return ids(LLM.from_target(target, speculative_config=config, max_num_seqs=2).generate(prompts, PARAMS))


@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_the_library_s(name: str, tmp_path: Path) -> None:
    """Plain, with chains that mostly fail, and with trees that do; in 8 bits that of its own plain decoding."""
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
    asked = [{"prompt_token_ids": each} for each in prompts]
    for dtype in ("float32", "int8"):
        target = load(tmp_path, dtype=dtype, device="cpu")
        assert target.native_decoder is not None
        for method in (None, "ngram", stubs.Random(VOCAB_SIZE, tree=True)):
            found = generated(target, method, asked)
            if dtype == "float32":
                assert found == expected
            elif method is None:
                alone = found
            else:
                assert found == alone


@cache
def small(name: str, dtype: str, folder: Path) -> LanguageModel:
    found = load(save_model(name, folder), dtype=dtype, device="cpu")
    assert found.native_decoder is not None
    return found


@pytest.mark.parametrize("method", ["eagle", "kangaroo", "del"])
def test_drafters_that_look_inside(method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """They read hidden states or leave early: between parallel layers, and before a head with a bias."""
    target = small("phi", "bfloat16", tmp_path_factory.getbasetemp() / "phi-inside")
    case = next(case for case in cases() if case.entry.name == method)
    expected = ids(with_config(None, target=target).generate(PROMPTS[:2], PARAMS))
    assert ids(with_config(case.config(target, None, 5), target=target).generate(PROMPTS[:2], PARAMS)) == expected


def test_rows_of_a_head_keep_their_biases() -> None:
    model, reference = make("phi", torch.float32)
    chosen = [5, 99, 17, 3]
    rows = HeadRows(model, chosen)
    rows.set_tail([40, 41])
    hidden_MD = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    found = model.score(hidden_MD, final_norm=False, head=rows).logits_MV
    with torch.inference_mode():
        expected = reference.lm_head(hidden_MD)[:, [*chosen, 40, 41]]
    assert torch.allclose(found, expected, atol=1e-4)


Change = Callable[[Layout], Layout]


def of_blocks(**changes: Any) -> Change:
    return lambda layout: replace(layout, blocks=[replace(each, **changes) for each in layout.blocks])


def one_gain_for_all_heads(layout: Layout) -> Layout:
    blocks = [replace(each, q_norm_d=each.q_norm_d[0]) for each in layout.blocks]
    return replace(layout, blocks=blocks)


FAULTS: list[tuple[str, str, Change]] = [
    ("gpt_neox", "one branch after the other", of_blocks(parallel=False)),
    ("gpt_neox, one after the other", "branches next to each other", of_blocks(parallel=True)),
    ("gpt_neox", "norms that add nothing", of_blocks(mlp_shift_D=None)),
    ("phi", "a last norm that adds nothing", lambda layout: replace(layout, final_shift_D=None)),
    ("phi", "a head without its bias", lambda layout: replace(layout, head=layout.head._replace(bias_O=None))),
    ("nemotron", "norms that are not centred", lambda layout: replace(layout, centred=False)),
    ("nemotron", "another activation", lambda layout: replace(layout, activation="relu")),
    (
        "opt",
        "positions that are one further",
        lambda layout: replace(layout, position_embedding_ND=layout.position_embedding_ND.roll(1, dims=0)),
    ),
    ("starcoder2", "another activation", lambda layout: replace(layout, activation="silu")),
    ("cohere", "halves, not neighbours", lambda layout: replace(layout, interleaved=False)),
    ("cohere", "logits as they are", lambda layout: replace(layout, logit_scale=1.0)),
    ("cohere2", "rotary in every layer", of_blocks(rotary=0)),
    ("cohere, heads normed", "one gain for all heads", one_gain_for_all_heads),
]


@pytest.mark.parametrize(("family", "fault", "change"), FAULTS, ids=[f"{each[0]}: {each[1]}" for each in FAULTS])
def test_a_forgotten_part_is_detected(
    family: str, fault: str, change: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = fit.layout_of
    monkeypatch.setattr(fit, "layout_of", lambda *given: change(right(*given)))
    twin, _ = twins(family, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert LanguageModel(twin, None, name=family).native_decoder is None, fault
    assert "other logits than the model's own modules" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, "int4"], ids=str)
@pytest.mark.parametrize("family", ["gpt_neox", "qwen2_moe", "llama, biased MLP"])
def test_the_library_s_modules_still_work_and_are_given_back(family: str, dtype: torch.dtype | str) -> None:
    model, reference = make(family, dtype)
    tokens = text(30)
    session = Session(model, plan=LayerPlan)
    ours, theirs = session.chunk(session.cache.acquire(), tokens), plain(reference, tokens)
    exact = plain(reference.float(), tokens)
    if family != "qwen2_moe":  # where a choice is close, the two sides may choose other experts
        assert error(ours, exact) <= max(1e-4, 1.5 * error(theirs, exact))
    twin, _ = twins(family, dtype)
    names = [name for name, each in twin.named_modules() if hasattr(each, "in_features")]
    before = {name: (each.weight.clone(), each.bias) for name in names for each in (twin.get_submodule(name),)}
    adoption = fit.Adoption(twin, 256)
    for name, (weight, _) in before.items():
        assert torch.equal(twin.get_submodule(name).weight.float(), weight.float()), name
    adoption.undo()
    assert fit.misfit(twin) is None
    for name, (weight, bias) in before.items():
        assert torch.equal(twin.get_submodule(name).weight, weight), name
        assert (bias is None) == (twin.get_submodule(name).bias is None)
        assert bias is None or torch.equal(twin.get_submodule(name).bias, bias)


def test_norms_of_heads_that_add_something_take_the_general_path() -> None:
    twin, _ = twins("phi", torch.float32)
    attention = twin.model.layers[0].self_attn
    attention.q_layernorm = torch.nn.LayerNorm(16)
    assert "norms of its queries and keys add something" in (fit.misfit(twin) or "")
