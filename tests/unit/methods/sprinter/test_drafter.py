"""The drafter `sprinter`: heads and their files, planted judges, rollback, batches, the meter on the real pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.core.draft import Approvals, Draft, Sampled
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.engine import compose
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.sprinter.drafter import SprinterDrafter
from foretoken.methods.sprinter.network import SprinterHead, facts_of
from foretoken.methods.sprinter.train import Watched
from foretoken.models.last_states import LastStates
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.heads import WIDTH, head, shelved_head
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, ids, prompt_ids, target, truth, with_config

NEVER, ALWAYS = -1e4, 1e4  # biases
LENGTH = 20


def sprinter(feature: str = "pre", bias: float = 0.0, spread: float = 0.0, **settings: Any) -> LLM:
    folder = shelved_head(feature, bias, spread)
    return with_config({"method": "sprinter", "model": "zoo:draft", "head": folder, **settings})


def plan(temperature: float = 0.0, seed: int = 1, length: int = LENGTH, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=temperature, seed=seed, ignore_eos=True, **options)


def drafter_of(llm: LLM) -> SprinterDrafter:
    drafter = llm.recipe.drafter
    assert isinstance(drafter, SprinterDrafter)
    return drafter


def noted(llm: LLM) -> list[tuple[Draft, tuple[int, ...]]]:
    """Every draft that is judged from now on, and the path that stands."""
    rule: Any = llm.recipe.verifier
    judge, found = rule.verify_within, []

    def noting(draft: Draft, *arguments: Any) -> Any:
        verdict = judge(draft, *arguments)
        found.append((draft, verdict.path))
        return verdict

    rule.verify_within = noting
    return found


# ------------------------------------------------------------------ planted judges


@pytest.mark.parametrize("feature", ["pre", "post"])
def test_always_reject_is_plain_decoding_and_window_1(feature: str) -> None:
    llm = sprinter(feature, NEVER)
    exact = with_config({"method": "draft_model", "model": "zoo:draft", "tree": "chain", "verifier": "ratio",
                         "num_speculative_tokens": 1})  # fmt: skip
    assert ids(llm.generate(PROMPTS, plan())) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    for temperature in (0.7, 1.0):
        ours, theirs = (each.generate(PROMPTS, plan(temperature, top_p=0.9)) for each in (llm, exact))
        assert ids(ours) == ids(theirs)
        assert [each.metrics.num_steps for each in ours] == [each.metrics.num_steps for each in theirs]
        assert {each.metrics.distortion for each in ours} == {0.0}
    assert_idle(llm)


@pytest.mark.parametrize("feature", ["pre", "post"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_always_accept_drafts_up_to_the_cap_and_tests_the_last(feature: str, temperature: float) -> None:
    llm = sprinter(feature, ALWAYS, max_draft=5)
    found = noted(llm)
    (output,) = llm.generate(PROMPTS[0], plan(temperature, length=32))
    assert output.error is None
    for draft, path in found[:-1]:
        if len(draft) == 0:  # the prompt's own step
            continue
        assert len(draft) == 5
        assert len(path) >= 4
        assert draft.evidence is not None
        assert draft.evidence.approved == ((True,) * 4 + ((True,) if feature == "pre" else (None,)))
    assert output.metrics.distortion > 0
    assert output.metrics.num_steps <= 1 + 32 // 5 + 1


def test_the_head_s_word_on_every_token_is_that_on_each() -> None:
    rng = torch.Generator().manual_seed(4)
    found = head("drawn", bias=0.3, spread=0.2)
    hidden_MD, q_MV = torch.randn(3, WIDTH, generator=rng), torch.randn(3, 50, generator=rng).mul(3).softmax(dim=-1)
    q_MV[1, 7:] = 0.0
    q_MV /= q_MV.sum(dim=-1, keepdim=True)
    together_MV = found.judge_all(hidden_MD, q_MV)
    for token in range(50):
        facts = facts_of(q_MV, torch.full((3,), token))
        torch.testing.assert_close(together_MV[:, token], found.judge(torch.cat([hidden_MD, facts], dim=-1)))


@pytest.mark.parametrize("stop", ["drawn", "confidence"])
def test_a_draft_says_which_tokens_would_have_been_approved(stop: str) -> None:
    if stop == "drawn":
        llm = sprinter("drawn", 1.0, 0.05, max_draft=4)
    else:
        llm = with_config({"method": "sprinter", "model": "zoo:draft", "stop": stop, "threshold": 0.2, "max_draft": 4})
    found = noted(llm)
    ids(llm.generate(PROMPTS[:2], plan(1.0)))
    drafts = [draft for draft, _ in found if len(draft)]
    for draft in drafts:
        evidence = draft.evidence
        assert isinstance(evidence, Approvals)
        assert evidence.others_NV is not None
        assert isinstance(draft.law, Sampled)
        assert evidence.others_NV.shape == draft.law.q_KV.shape
        for node, token in enumerate(draft.tree.tokens):
            assert bool(evidence.others_NV[node, token]) == (node + 1 < len(draft))
            if stop == "confidence" and node + 1 < len(draft):
                assert torch.equal(evidence.others_NV[node], draft.law.q_KV[node] >= 0.2)
        assert not evidence.others_NV[3:].any()  # at the cap every token is tested
    assert any(len(draft) > 1 for draft in drafts)
    assert any(len(draft) < 4 for draft in drafts)


def test_a_budget_holds_for_a_head_that_sees_the_token() -> None:
    llm = sprinter("drawn", ALWAYS, max_draft=6, max_distortion=0.04)
    outputs = llm.generate(PROMPTS, plan(1.0, length=40))
    ids(outputs)
    assert max(output.metrics.distortion for output in outputs) <= 0.04 + 1e-9
    assert max(output.metrics.distortion for output in outputs) > 0.0


def oracle(llm: LLM) -> None:
    """A judge that knows what the target will say, instead of the head: greedy decoding, before the token is drawn."""
    known = {tuple(tokens): text for tokens, text in truth(PROMPTS, LENGTH + 30).items()}

    def judge(drafts: Sequence[Any], rows: Sequence[Any]) -> list[float]:
        found = []
        for draft, its in zip(drafts, rows, strict=True):
            context = draft.context
            text = known[tuple(context.tokens[: context.num_prompt])]
            place = len(context.tokens) - context.num_prompt + len(draft.tokens)
            found.append(float(place < len(text) and its.output.best[its.start] == text[place]))
        return found

    drafter_of(llm).judge = judge  # type: ignore[method-assign]


def test_an_oracle_gives_the_target_s_text_in_fewer_calls() -> None:
    llm = sprinter("pre")
    oracle(llm)
    exact = with_config({"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4})
    ours, theirs = llm.generate(PROMPTS, plan()), exact.generate(PROMPTS, plan())
    assert ids(ours) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert {each.metrics.distortion for each in ours} == {0.0}
    steps = [sum(output.metrics.num_steps for output in outputs) for outputs in (ours, theirs)]
    assert steps[0] < steps[1]


@cache
def library(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.path(name), dtype=torch.float32)


def reference(prompt: str, feature: str, judge: SprinterHead, cap: int, length: int) -> list[int]:
    """The loop of the specification at temperature 0, every forward from scratch with the library's own models."""
    big, small = map(library, ("base", "draft"))
    tokens = prompt_ids(prompt)

    def run(model: Any, ids_: list[int]) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids_]), output_hidden_states=True)

    def says(model: Any, ids_: list[int]) -> int:
        return int(run(model, ids_).logits[0, -1].argmax())

    begin = len(tokens)
    tokens.append(says(big, tokens))
    while len(tokens) < begin + length:
        drafted: list[int] = []
        most = min(cap, begin + length - len(tokens) - 1)
        while len(drafted) < most:
            output = run(small, tokens + drafted)
            x_1D, q_1V = output.hidden_states[-1][0, -1:], output.logits[0, -1:].softmax(-1)
            token = int(q_1V.argmax())
            if feature == "drawn":
                x_1D = torch.cat([x_1D, facts_of(q_1V, torch.tensor([token]))], dim=-1)
            v = float(q_1V[0, token]) if feature == "confidence" else float(judge.judge(x_1D))
            if feature == "post" and drafted and v < 0.5:
                break
            drafted.append(token)
            if feature != "post" and v < 0.5:
                break
        if drafted:
            tokens += drafted[:-1]
            if says(big, tokens) == drafted[-1]:
                tokens.append(drafted[-1])
        tokens.append(says(big, tokens))
    return tokens[begin : begin + length]


@pytest.mark.covering(1)
@pytest.mark.parametrize("feature", ["pre", "drawn", "post", "confidence"])
def test_text_is_that_of_the_specification_s_loop_from_scratch(feature: str) -> None:
    """Caches, rollback and hidden states: nothing of a round may leak into the next."""
    if feature == "confidence":
        judge = head()  # not called
        llm = with_config({"method": "sprinter", "model": "zoo:draft", "stop": "confidence", "max_draft": 6})
    else:
        judge = head(feature, spread=0.1)
        llm = sprinter(feature, 0.0, 0.1, max_draft=6)
    found = noted(llm)
    for prompt in PROMPTS[:2]:
        (output,) = llm.generate(prompt, plan(length=24))
        assert output.token_ids == reference(prompt, feature, judge, 6, 24)
    assert len({len(draft) for draft, _ in found}) > 2  # it did stop here and there
    assert any(len(path) < len(draft) for draft, path in found)  # and was refused


@pytest.mark.covering(1)
@pytest.mark.parametrize("feature", ["pre", "drawn", "post"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_of_a_batch_stop_one_by_one(feature: str, temperature: float) -> None:
    llm = sprinter(feature, 0.0, 0.1)
    params = [plan(temperature, seed, 10 + 5 * seed) for seed in range(len(PROMPTS))]
    together = ids(llm.generate(PROMPTS, params))
    alone = [ids(llm.generate(prompt, each))[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert_idle(llm)


def test_threshold_and_cap() -> None:
    drafted = []
    for threshold in (0.0, 0.5, 1.0):
        llm = sprinter("pre", 0.0, 0.1, threshold=threshold)
        drafted.append(sum(o.metrics.num_steps for o in llm.generate(PROMPTS, plan())))
    assert drafted[0] < drafted[1] < drafted[2]
    short = sprinter("pre", ALWAYS, max_draft=20, num_speculative_tokens=3)
    found = noted(short)
    ids(short.generate(PROMPTS[0], plan()))
    assert max(len(draft) for draft, _ in found) == 3


# ------------------------------------------------------------------ the meter on the real pair


@pytest.mark.parametrize("feature", ["pre", "drawn", "post"])
def test_the_charge_is_eta_fp_times_the_distance_of_the_pair(feature: str) -> None:
    llm = sprinter(feature, 0.0, 0.1, max_draft=64)
    rule = Watched(llm.recipe.verifier)
    llm = llm.with_method({"method": llm.recipe.drafter, "verifier": rule})
    outputs = llm.generate(PROMPTS, plan(1.0, length=60))
    ids(outputs)
    rates = rule.rates()
    charged = sum(output.metrics.distortion_sum for output in outputs)
    refused = rule.tokens - rule.accepted
    assert rates["eta_fp"] is not None
    assert 0.05 < rates["eta_fp"] < 0.95
    # approved tokens at the end of a request are tested all the same, and tokens that are cut off are not charged
    assert charged == pytest.approx(rates["eta_fp"] * refused, rel=0.1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_hold(temperature: float) -> None:
    llm = sprinter("pre", ALWAYS, max_draft=6, max_distortion=0.04)
    outputs = llm.generate(PROMPTS, plan(temperature, length=40))
    ids(outputs)
    assert max(output.metrics.distortion for output in outputs) <= 0.04 + 1e-9
    free = sprinter("pre", ALWAYS, max_draft=6).generate(PROMPTS, plan(temperature, length=40))
    assert max(output.metrics.distortion for output in free) > 0.04
    nothing = sprinter("pre", ALWAYS, max_draft=6, max_distortion=0)
    assert ids(nothing.generate(PROMPTS, plan())) == [greedy(prompt, LENGTH) for prompt in PROMPTS]


def test_tokens_that_the_filters_exclude_never_stand() -> None:
    """With one token left of each distribution whatever stands is the target's favourite, however much the head
    approves.
    """
    llm = sprinter("pre", ALWAYS, max_draft=6)
    outputs = llm.generate(PROMPTS, plan(1.0, top_k=1))
    assert ids(outputs) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert {output.metrics.distortion for output in outputs} == {0.0}


# ------------------------------------------------------------------ promises


def test_its_own_rule_is_the_default_and_auto_is_lossless() -> None:
    assert sprinter().recipe.promise == "approximate"
    for verifier in ("auto", "ratio", "block"):
        assert sprinter(verifier=verifier).recipe.promise == "same distribution"
    with pytest.raises(ConfigError, match="logprobs=2 with verifier='sprinter'"):
        sprinter().generate(PROMPTS[0], SamplingParams(max_tokens=2, logprobs=2))
    with pytest.raises(ConfigError, match="not valid for drafts of kind Sampled"):
        sprinter(verifier="spechub")


# ------------------------------------------------------------------ states


# fused, capped logits, LayerNorm and learnt positions, experts
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_the_state_is_what_the_library_calls_the_last_hidden_state(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path)
    ours = load(folder, device="cpu")
    tokens = tokens_of(1, 9, 100)
    batch, cache, states = PackedBatch(), ours.new_cache(1), LastStates(ours)
    cache.reserve(cache.acquire(), len(tokens))
    batch.add_chunk(0, 0, tokens, wanted=len(tokens))
    output = ours.forward(batch, DensePlan(cache, batch), span=states.span)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype)
    with torch.inference_mode():
        wanted = theirs(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]
    found = states.of(output, list(range(len(tokens))))
    torch.testing.assert_close(found, wanted.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("feature", ["pre", "post"])
def test_a_pair_of_the_general_path(feature: str, tmp_path: Path) -> None:
    """Not fused, and the draft is the target: whatever the head says, the text is the target's."""
    folder = save_model("exaone4", tmp_path / "model")
    judge = head(feature, spread=0.5, target=folder, draft=folder, width=64)
    judge.save(tmp_path / "head")
    config = {"method": "sprinter", "model": str(folder), "head": str(tmp_path / "head"), "max_draft": 4}
    prompts = [{"prompt_token_ids": [1, 7, 30, 12]}, {"prompt_token_ids": [1, 9, 9, 40, 41]}]
    plain, ours = (LLM(str(folder), dtype="float32", device="cpu", speculative_config=each) for each in (None, config))
    outputs = ours.generate(prompts, plan(length=20))
    assert ids(outputs) == ids(plain.generate(prompts, plan(length=20)))
    drawn = ours.generate(prompts, plan(1.0, length=20))
    ids(drawn)
    for output in (*outputs, *drawn):
        assert output.metrics.tokens_per_step > 1.5
        assert output.metrics.distortion < 1e-5


# ------------------------------------------------------------------ options and files


def build(**settings: Any) -> Any:
    return compose.build({"method": "sprinter", "model": "zoo:draft", **settings}, target()).drafter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -0.1}, "threshold=-0.1 must be"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"threshold": "high"}, "threshold='high'"),
        ({"threshold": True}, "threshold=True"),
        ({"max_draft": 0}, "max_draft=0 must be an integer between 1 and 256"),
        ({"max_draft": 2.5}, "max_draft=2.5"),
        ({"stop": "confidnce"}, "did you mean 'confidence'"),
        ({"stop": 1}, "stop=1 must be"),
        ({"stop": "confidence"}, "does nothing with stop=confidence"),
        ({"model": ""}, "model='' must be"),
        ({"head": 3}, "head=3 must be"),
        ({"head": "~nobody-of-that-name/head"}, "nobody-of-that-name"),
        ({"head": "nowhere"}, "no SPRINTER head for .*foretoken train sprinter --target"),
        ({"tresh": 1}, "unknown option 'tresh' .*did you mean 'threshold'"),
        ({"feature": "post"}, "unknown option 'feature'"),
        ({"max_distortion": 2}, "max_distortion=2 must be a number"),
        ({"max_distortion": 0.1, "verifier": "ratio"}, "unknown option 'max_distortion'.*'sprinter'"),
        ({"verifier": "greedy_draft"}, "not valid for drafts of kind Sampled"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError, match=message) as caught:
        build(**{"head": shelved_head(), **options})
    assert isinstance(caught.value, ConfigError | ModelError)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))

    return change


def disown(**fingerprints: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        owners = json.loads((folder / CONFIG).read_text())["speculators_config"]
        for role, value in fingerprints.items():
            owners[role]["fingerprint"] = value
        edit(speculators_config=owners)(folder)

    return change


def weights(**tensors: torch.Tensor) -> Callable[[Path], None]:
    from safetensors.torch import save_file

    return lambda folder: save_file(tensors, folder / WEIGHTS)


OTHER = "0" * 64
DAMAGE: dict[str, tuple[Callable[[Path], None], type[ForetokenError], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), ModelError, "no SPRINTER head for"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelError, "has no SPRINTER head"),
    "empty weights": (lambda folder: (folder / WEIGHTS).write_bytes(b""), ModelError, "cannot be read"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), ModelError, "cannot be read"),
    "no UTF-8": (lambda folder: (folder / CONFIG).write_bytes(b"\xff{}"), ModelError, "cannot be read"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[1]"), ModelError, "cannot be read"),
    "no feature": (edit(feature=...), ModelError, "cannot be read"),
    "another feature": (edit(feature="mid"), ModelError, "feature='mid'"),
    "a width in words": (edit(width="wide"), ModelError, "cannot be read"),
    "a wrong width": (edit(width=64), ModelError, "width=64 with weights"),
    "no fingerprint": (disown(draft=None), ModelError, "draft_fingerprint=None"),
    "NaN": (weights(weight=torch.full((WIDTH,), float("nan")), bias=torch.zeros(1)), ModelError, "NaN or infinite"),
    "no bias": (weights(weight=torch.zeros(WIDTH)), ModelError, "cannot be read"),
    "another target": (disown(verifier=OTHER), MismatchError, "trained for the target 'zoo:base' .fingerprint 0"),
    "another draft": (disown(draft=OTHER), MismatchError, "trained for the draft 'zoo:draft' .fingerprint 0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_heads(kind: str, tmp_path: Path) -> None:
    head().save(tmp_path)
    damage, error, message = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises(error, match=message) as caught:
        build(head=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_head_of_another_width(tmp_path: Path) -> None:
    head(width=64).save(tmp_path)
    with pytest.raises(MismatchError, match="the SPRINTER head reads 64 numbers, but 'zoo:draft' has states of 192"):
        build(head=str(tmp_path))


def test_the_confidence_stop_says_what_q_says() -> None:
    """At a temperature: v is q(y) of the processed distribution; a draft ends with the first token below the
    threshold.
    """
    llm = with_config({"method": "sprinter", "model": "zoo:draft", "stop": "confidence", "threshold": 0.4})
    found = noted(llm)
    ids(llm.generate(PROMPTS, plan(1.0, top_k=20)))
    drafts = [draft for draft, _ in found if len(draft)]
    for draft in drafts:
        rows = [float(draft.law.q_at(node)[token]) for node, token in enumerate(draft.tree.tokens)]  # type: ignore[union-attr]
        assert draft.confidence == pytest.approx(rows, abs=1e-6)
        assert draft.evidence.approved == tuple(q >= 0.4 for q in rows)  # type: ignore[union-attr]
        assert draft.evidence.saw_token  # type: ignore[union-attr]
    assert any(draft.evidence.approved[-1] is False for draft in drafts)  # type: ignore[union-attr]


@pytest.mark.parametrize("feature", ["pre", "drawn", "post"])
def test_a_saved_head_is_the_same(feature: str, tmp_path: Path) -> None:
    original = head(feature, bias=0.25, spread=1.0)
    original.save(tmp_path)
    loaded = SprinterHead.load(tmp_path)
    assert loaded.config == original.config
    assert torch.equal(loaded.unit.weight_D, original.unit.weight_D)
    assert loaded.unit.bias == original.unit.bias
