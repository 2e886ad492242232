"""MTP drafting: the text is plain decoding's, drafts stand where the layer knows, and a swapped projection is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.methods.mtp.drafter import MtpDrafter
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.mtp_models import FAMILIES, VOCABULARY, WIDTH, named, reconfig, retensor, save_mtp
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.zoo_llms import assert_idle, with_config

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "before the norm": {"norm_output": False},
    "tree": {"tree": True, "width": 3, "max_depth": 3},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(str(save_mtp(request.param, tmp_path_factory.mktemp(request.param))), device="cpu")


def run(config: dict[str, Any], model: Any, temperature: float = 0.0) -> list[Any]:
    llm = with_config(config, target=model, max_num_seqs=3)
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=4, ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens_of(seed, 4 + 7 * seed, VOCABULARY)} for seed in range(4)]
    outputs = llm.generate(prompts, params)
    assert_idle(llm)
    assert all(output.error is None for output in outputs)
    return outputs


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_plain_decoding(shape: str, model: Any) -> None:
    """In a batch, at temperature 0; seeded at temperature 1 under the rule that keeps the stream."""
    config = {"method": "mtp", "num_speculative_tokens": 5, **SHAPES[shape]}
    found = run(config, model)
    assert [each.token_ids for each in found] == [each.token_ids for each in run({"method": "none"}, model)]
    assert sum(each.metrics.num_draft_tokens for each in found) > 60
    if shape == "tree":  # chains are drawn, and so another rule's
        sampled = run({**config, "verifier": "match"}, model, 1.0)
        assert [each.token_ids for each in sampled] == [
            each.token_ids for each in run({"method": "none", "verifier": "match"}, model, 1.0)
        ]
    else:
        assert all(len(each.token_ids) == 20 for each in run(config, model, 1.0))


def test_in_bfloat16_experts_are_chosen_in_float32(tmp_path: Path) -> None:
    model = load(str(save_mtp("deepseek_v3", tmp_path)), device="cpu", dtype="bfloat16")
    layer = MtpDrafter(MtpDrafter.Config(), model)._runner._net  # type: ignore[attr-defined]
    assert {each.dtype for each in layer.parameters()} == {torch.bfloat16}
    assert layer.layer.mlp.gate.e_score_correction_bias.dtype == torch.float32
    found = run({"method": "mtp", "num_speculative_tokens": 3}, model)
    assert sum(each.metrics.num_draft_tokens for each in found) > 30


@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_that_is_rounded_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    """Its head is made dense anew, in float32; what the layer gives is in the dtype that the target computes in."""
    folder = save_mtp(name, tmp_path)
    retensor(folder, lambda tensors: tensors.update({key: value.bfloat16() for key, value in tensors.items()}))
    reconfig(folder, dtype="bfloat16")
    rounded = load(str(folder), device="cpu", dtype="int8")
    found = run({"method": "mtp", "num_speculative_tokens": 3}, rounded)
    assert [each.token_ids for each in found] == [each.token_ids for each in run({"method": "none"}, rounded)]
    assert sum(each.metrics.num_draft_tokens for each in found) > 30


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_layer_knows_stands(name: str, tmp_path: Path) -> None:
    """The distribution is that of the last token alone: all drafts stand. Planted: token and feature swapped, and few
    do.
    """
    folder = save_mtp(name, tmp_path, knowing=True)
    knowing = load(str(folder), device="cpu")
    config = {"method": "mtp", "num_speculative_tokens": 3}
    for temperature in (0.0, 1.0):
        metrics = [each.metrics for each in run(config, knowing, temperature)]
        drafted = sum(each.num_draft_tokens for each in metrics)
        assert drafted > 30
        assert sum(each.num_accepted_tokens for each in metrics) / drafted > 0.98
    retensor(folder, lambda tensors: swap(tensors, named(name, "eh_proj.weight")))
    metrics = [each.metrics for each in run(config, load(str(folder), device="cpu"))]
    assert sum(each.num_accepted_tokens for each in metrics) / sum(each.num_draft_tokens for each in metrics) < 0.6


def swap(tensors: dict[str, Any], projection: str) -> None:
    """The projection as if the feature came first."""
    tensors[projection] = tensors[projection].roll(WIDTH, 1)
