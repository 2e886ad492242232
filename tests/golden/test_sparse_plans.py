"""Sparse MLPs and experts inside whole models: against the library's modules with the specification by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.feed_forward import routed_experts, swapped
from foretoken.methods.sparse.calibration import Calibration, Thresholds
from foretoken.methods.sparse.config import VerificationConfig
from foretoken.methods.sparse.feed_forward import ratios
from foretoken.methods.sparse.plan import SparseVerification
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.tiny_models import save_model
from helpers.zoo_llms import target

PROMPT = [11, 40, 41, 42, 11, 40, 43, 44, 60, 61, 11, 40]
TREE = TokenTree([41, 42, 50, 43], [-1, 0, 0, 1])
ROWS = 1 + len(TREE)
# family -> options; four experts a row out of eight where the family lets us
CHOSEN = {"num_experts": 8, "num_experts_per_tok": 4}
EXPERTS = {
    "qwen3_moe": CHOSEN,
    "qwen3_moe_normalised": {**CHOSEN, "norm_topk_prob": True},
    "olmoe": CHOSEN,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 4},
    "qwen2_moe": CHOSEN,
    "deepseek_v3": {"n_routed_experts": 8, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5},
}


@cache
def model(name: str) -> LanguageModel:
    folder = save_model(name.removesuffix("_normalised"), shelf() / f"sparse-{name}", **EXPERTS[name])
    return load(folder, dtype="float32")


def calibrated(name: str, beta: float | list[float]) -> str:
    """A calibration of a tiny model with the same thresholds in every layer; its path."""
    found = model(name)
    values = [beta] * 3 if isinstance(beta, float) else beta
    layers = [each.layer for each in routed_experts(found.model)]
    path = shelf() / f"sparse-{name}-{values}.json"
    Calibration(
        model=name,
        fingerprint=fingerprint_of(found.source),
        num_tokens=1,
        moe=Thresholds(num_chosen=4, beta=dict.fromkeys(layers, values)),
    ).save(path)
    return str(path)


def verify(found: LanguageModel, make, *, beside: bool = False, native: bool = True) -> Tensor:
    """Logits of a root and its tree after a prompt; ``beside``: after a prompt's chunk in the same batch."""
    tokens_cache = found.new_cache(2)
    slot, other = tokens_cache.acquire(), tokens_cache.acquire()
    tokens_cache.reserve(slot, len(PROMPT))
    batch = PackedBatch()
    batch.add_chunk(slot, 0, PROMPT[:-1], wanted=0)
    found.forward(batch, DensePlan(tokens_cache, batch))
    tokens_cache.commit(slot, range(len(PROMPT) - 1))
    batch = PackedBatch()
    if beside:
        tokens_cache.reserve(other, len(PROMPT))
        batch.add_chunk(other, 0, PROMPT, wanted=len(PROMPT))
    tokens_cache.reserve(slot, ROWS)
    batch.add_tree(slot, len(PROMPT) - 1, PROMPT[-1], TREE)
    plan = make(tokens_cache, batch)
    if not native:
        plan.native = None
    return found.forward(batch, plan).logits_MV.clone()


def sparse(found: LanguageModel, **settings) -> SparseVerification:
    return SparseVerification(VerificationConfig(**settings), found)


def skipping_by_hand(found: LanguageModel, beta: float, m: int, renormalise: bool):
    """The library's own experts, called with weights from which the specification has taken some (rule nested)."""
    forwards = {}
    for experts in routed_experts(found.model):
        own = experts.module.forward

        def forward(x, chosen, weights, own=own):
            rows = []
            for row in weights.tolist():
                order = sorted(range(len(row)), key=lambda place: -row[place])
                w = [row[place] for place in order]
                i = 0
                while i < m and sum(w[len(w) - i - 1 :]) / sum(w[: len(w) - i - 1]) < beta:
                    i += 1
                kept = [0.0 if place in order[len(w) - i :] else row[place] for place in range(len(w))]
                scale = sum(row) / sum(kept) if renormalise else 1.0
                rows.append([each * scale for each in kept])
            return own(x, chosen, torch.tensor(rows, dtype=weights.dtype))

        forwards[experts.module] = forward
    return swapped(forwards)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("name", EXPERTS)
def test_skipping_experts_is_the_specification_inside_the_model(name, m):
    found, beta = model(name), 0.45
    renormalise = name in ("qwen3_moe_normalised", "mixtral", "deepseek_v3")
    ours = verify(found, sparse(found, moe=m, calibration=calibrated(name, beta)))
    with skipping_by_hand(found, beta, m, renormalise):
        theirs = verify_rows_only(found)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - verify(found, DensePlan)).abs().max() > 1e-2, "nothing was left out"


def verify_rows_only(found: LanguageModel) -> Tensor:
    """As :func:`verify`, under whatever is swapped, but with a prompt that was read without it."""
    swaps = {module: vars(module)["forward"] for module in found.model.modules() if "forward" in vars(module)}
    for module in swaps:
        del module.forward

    def make(tokens_cache, batch):
        plan = DensePlan(tokens_cache, batch)
        plan.native, plan.swaps = None, swaps
        return plan

    return verify(found, make)


@pytest.mark.parametrize("name", EXPERTS)
def test_thresholds_of_zero_leave_nothing_out(name):
    found = model(name)
    ours = verify(found, sparse(found, moe=3, calibration=calibrated(name, 0.0)))
    torch.testing.assert_close(ours, verify(found, DensePlan), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"moe": 3}, {"ffn": 0.3}, {"moe": 2, "ffn": 0.3}], ids=str)
def test_a_prompt_in_the_same_batch_stays_dense(settings):
    found = model("qwen2_moe")  # with shared experts: gated MLPs next to the routed ones
    if "moe" in settings:
        settings = {**settings, "calibration": calibrated("qwen2_moe", 9.0)}
    mixed = verify(found, sparse(found, **settings), beside=True)
    dense = verify(found, DensePlan, beside=True)
    torch.testing.assert_close(mixed[: len(PROMPT)], dense[: len(PROMPT)], rtol=1e-4, atol=1e-4)
    alone = verify(found, sparse(found, **settings))
    torch.testing.assert_close(mixed[len(PROMPT) :], alone, rtol=1e-4, atol=1e-4)
    assert (alone - dense[len(PROMPT) :]).abs().max() > 1e-2


def test_the_shared_expert_is_never_dropped(monkeypatch):
    found = model("qwen2_moe")
    calls = []
    shared = found.model.model.layers[0].mlp.shared_expert
    hook = shared.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    verify(found, sparse(found, moe=3, calibration=calibrated("qwen2_moe", 99.0)))
    hook.remove()
    assert calls[-1] == ROWS


def test_different_experts_are_counted():
    found = model("mixtral")
    counts = {}
    for beta in (0.0, 99.0):
        plan = None

        def make(tokens_cache, batch, beta=beta):
            nonlocal plan
            plan = sparse(found, moe=3, calibration=calibrated("mixtral", beta))(tokens_cache, batch)
            return plan

        verify(found, make)
        counts[beta] = plan.num_experts
    assert 1 <= counts[99.0] < counts[0.0] <= 8
    settings = {"verification": {"moe": 3, "calibration": calibrated("mixtral", 99.0)}}
    llm = LLM.from_target(found, speculative_config=settings, max_num_seqs=4, max_rows_per_step=64, seed=0)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[2:]}]
    for output in llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True)):
        assert output.error is None
        # with one expert a row left, two requests need one or two between them
        assert 1 <= output.metrics.experts_per_step <= 2
        assert output.metrics.experts_steps == output.metrics.num_steps - 1  # the first step reads the prompt


def test_swaps_are_undone_after_an_error_in_a_forward(monkeypatch):
    found = model("olmoe")
    before = verify(found, DensePlan)
    broken = sparse(found, moe=1, calibration=calibrated("olmoe", 1.0))

    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(broken._experts[1], "skip", fail)
    with pytest.raises(ZeroDivisionError):
        verify(found, broken)
    assert not any("forward" in vars(module) for module in found.model.modules())
    assert torch.equal(verify(found, DensePlan), before)


# ---------------------------------------------------------------------- the native decoder


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0])
def test_the_fused_decoder_computes_the_same_sparse_mlp(tau, beside):
    found = target()
    assert found.native_decoder is not None or pytest.skip("no compiled decoder on this machine")
    native = verify(found, sparse(found, ffn=tau), beside=beside)
    torch.testing.assert_close(
        native, verify(found, sparse(found, ffn=tau), beside=beside, native=False), rtol=1e-3, atol=1e-3
    )
    assert (native - verify(found, DensePlan, beside=beside)).abs().max() > 1e-2


def test_the_fused_decoder_at_almost_no_threshold_is_dense_bit_for_bit():
    found = target()
    assert torch.equal(verify(found, sparse(found, ffn=1e-38)), verify(found, DensePlan))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_what_its_neighbours_keep(dtype):
    found = target() if dtype == "float32" else load("zoo:base")
    plan = sparse(found, ffn=0.6)
    together, mixed = verify(found, plan), verify(found, plan, beside=True)
    assert torch.equal(together, mixed[len(PROMPT) :])
    assert torch.equal(mixed[: len(PROMPT)], verify(found, DensePlan, beside=True)[: len(PROMPT)])


def test_nan_is_not_taken_for_a_gate_that_is_shut():
    """A broken model must be found out by its logits, not healed by a threshold."""
    for native in (True, False):
        found = load("zoo:draft", dtype="float32")
        with torch.no_grad():
            found.model.model.embed_tokens.weight[PROMPT[-1]] = torch.nan
            if found.native_decoder is not None:
                for kept in found.native_decoder._keep:
                    if isinstance(kept, Tensor) and kept.shape == found.model.model.embed_tokens.weight.shape:
                        kept[PROMPT[-1]] = torch.nan
        assert verify(found, sparse(found, ffn=0.3), native=native)[0].isnan().any()


# ---------------------------------------------------------------------- refusals


def test_what_a_mixture_of_experts_refuses():
    found = model("qwen3_moe")
    for settings, error, message in (
        ({"moe": 4}, ConfigError, "chooses 4 experts a row and must keep one: use at most 3"),
        ({"moe": 1}, ConfigError, "none lies next to its weights"),
        ({"moe": 1, "calibration": calibrated("olmoe", 0.5)}, MismatchError, "was made for 'olmoe'"),
    ):
        with pytest.raises(error, match=message):
            sparse(found, **settings)


def test_a_calibration_without_experts_or_of_other_ones_is_refused(tmp_path: Path):
    found = model("qwen3_moe")
    kwargs = {"model": "m", "fingerprint": fingerprint_of(found.source), "num_tokens": 1}
    path = tmp_path / "sparse.json"
    Calibration(**kwargs).save(path)
    with pytest.raises(ConfigError, match=r"has no thresholds for experts.*foretoken calibrate sparse"):
        sparse(found, moe=1, calibration=str(path))
    Calibration(**kwargs, moe=Thresholds(num_chosen=2, beta={0: (0.1,), 1: (0.1,), 2: (0.1,)})).save(path)
    with pytest.raises(MismatchError, match="are for 2 experts a row"):
        sparse(found, moe=1, calibration=str(path))


def test_ratios_are_those_that_the_thresholds_are_compared_with():
    """Turned upside down every threshold test would be the other way round."""
    assert ratios(torch.tensor([[0.9, 0.1]])).item() == pytest.approx(1 / 9)


def test_what_cannot_save_time_says_so():
    assert "saves no time" in sparse(model("qwen2_moe"), ffn=0.1).explanation
    assert target().native_decoder is None or "saves no time" not in sparse(target(), ffn=0.1).explanation
    assert sparse(model("qwen2_moe"), moe=1, calibration=calibrated("qwen2_moe", 0.1)).explanation == ""
    remark = sparse(model("olmoe"), moe=1, calibration=calibrated("olmoe", 0.1)).explanation
    assert ("costs time" in remark) == (model("olmoe").native_decoder is not None)
