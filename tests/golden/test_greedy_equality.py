"""Greedy text does not depend on how it was computed: every drafter under every lossless verifier that fits.

Collected from the catalogue: a new entry is tested the day it is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import catalog, zoo
from foretoken import testing as stubs
from foretoken.core.draft import Coupled, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.sampling import SamplingParams
from foretoken.engine.llm import LLM
from helpers.zoo_llms import PROMPTS, assert_idle, base, greedy, ids, prompt_ids, truth, with_config, with_drafter

LENGTH = 40


@dataclass(frozen=True)
class Shape:
    """A shape that a drafter should be seen in: its options, and what it then proposes.

    Attributes:
        laws, branches: None takes those of its class, for drafters that propose the same under all options.
        one_rule: nothing about the law differs from an earlier shape, so the default rule is enough.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    laws: tuple[type[Law], ...] | None = None
    branches: bool | None = None
    one_rule: bool = False


TREES = {
    "chain": (Sampled, False),
    "coupled": (Coupled, False),
    "topk": (PointMass, True),
    "sampled": (Sampled, True),
    "sampled_without_replacement": (WithoutReplacement, True),
    "top_then_sampled": (TopThenSampled, True),
    "hub": (HubPair, True),
}
EARLY, TREE = ((Sampled,), False), ((PointMass,), True)
# What an entry needs beside the target, and the shapes that it should be seen in; absent: its defaults.
SHAPES: dict[str, list[Shape]] = {
    "draft_model": [
        Shape({"model": "zoo:draft", "tree": tree}, (law,), branches) for tree, (law, branches) in TREES.items()
    ],
    "suffix": [Shape({}, *TREE), Shape({"tree": False}, (PointMass,), False)],
    "kangaroo": [
        Shape({"adapter": "random:1", "threshold": 0.2}, *EARLY),
        Shape({"adapter": "random:2", "threshold": 0.1, "tree": True, "width": 4}, *TREE),
        Shape({"adapter": "random:3", "threshold": 0}, *EARLY, one_rule=True),
    ],
    "del": [
        Shape({}, *EARLY),
        Shape({"exit_layer": 3, "draft_length": 3}, *EARLY, one_rule=True),
        Shape({"draft_length": "planned", "head_cost": 0}, *EARLY, one_rule=True),
        Shape({"exit_layer": 2, "reread_every": 2}, *EARLY, one_rule=True),
    ],
    "sprinter": [
        Shape({"model": "zoo:draft", "head": "random:pre"}),
        Shape({"model": "zoo:draft", "head": "random:post"}, one_rule=True),
    ],
}
LOSSLESS = [None, *(entry.name for entry in catalog.entries("verifier") if entry.promise != "approximate")]


def combinations() -> list[tuple[dict[str, object], bool]]:
    """Every recipe that one could write, and whether its rule fits the drafts."""
    return [
        (
            {
                "method": entry.name,
                **shape.options,
                # its own rule is a lossy one: "auto" is none
                **({"verifier": rule} if rule else {"verifier": "auto"} if entry.name == "sprinter" else {}),
                "num_speculative_tokens": count,
            },
            fits(entry, shape, rule),
        )
        for entry in catalog.entries("drafter")
        for shape in SHAPES.get(entry.name, [Shape()])
        for rule in (LOSSLESS[:1] if shape.one_rule else LOSSLESS)
        for count in (5, "auto")
    ]


def fits(entry: catalog.Entry, shape: Shape, rule: str | None) -> bool:
    """Whether a rule takes trees where there are any, and every kind of law. No model is loaded to find out."""
    if rule is None:
        return True
    drafter, verifier = entry.load(), catalog.find(rule, "verifier").load()
    laws = drafter.laws if shape.laws is None else shape.laws
    branches = drafter.branches if shape.branches is None else shape.branches
    return (verifier.trees or not branches) and set(laws) <= set(verifier.laws)


def configs() -> list[dict[str, object]]:
    return [config for config, fit in combinations() if fit]


def label(config: dict[str, object]) -> str:
    return "-".join(str(value) for key, value in config.items() if key not in ("model", "head_cost"))


def of_default_rule(config: dict[str, object]) -> bool:
    return config.get("verifier", "auto") == "auto"


@cache
def _llm(key: str) -> LLM:
    return with_config(next(config for config in configs() if label(config) == key))


def llm_of(config: dict[str, object]) -> LLM:
    return _llm(label(config))


LEFT_OUT = [config for config, fit in combinations() if not fit and config["num_speculative_tokens"] == 5]


@pytest.mark.parametrize("method", sorted({str(config["method"]) for config in LEFT_OUT}))
def test_what_is_not_collected_here_is_refused(method):
    for config in LEFT_OUT:
        if config["method"] == method:
            with pytest.raises(ConfigError, match=r"verifies chains|not valid for drafts of kind"):
                with_config(config)


@pytest.mark.parametrize("config", configs(), ids=label)
def test_every_lossless_recipe_gives_the_plain_greedy_tokens(config):
    """Ragged lengths, fewer slots than requests, so that requests join and leave; then one alone."""
    llm = llm_of(config)
    lengths = (LENGTH, 7, 23, 1, LENGTH - 5)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    expected = [greedy(prompt, LENGTH)[:length] for prompt, length in zip(PROMPTS, lengths, strict=True)]
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert ids(llm.generate(PROMPTS[0], params[0])) == expected[:1]
    assert_idle(llm)


@pytest.mark.parametrize("config", [config for config in configs() if of_default_rule(config)], ids=label)
def test_requests_that_join_late_and_leave_early_get_the_same_tokens(config):
    llm = llm_of(config)
    first = llm.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    got = [*next(first).token_ids, *next(first).token_ids]
    second = llm.stream(PROMPTS[1], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    third = llm.stream(PROMPTS[2], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    late = list(next(second).token_ids)
    next(third)
    third.close()  # cancelled in the middle
    for chunk in first:
        got += chunk.token_ids
    for chunk in second:
        late += chunk.token_ids
    assert got == greedy(PROMPTS[0], LENGTH)
    assert late == greedy(PROMPTS[1], LENGTH)
    assert_idle(llm)


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_plain_greedy_is_the_library_s(prompt):
    model = AutoModelForCausalLM.from_pretrained(zoo.path("base"), dtype=torch.float32)
    tokens = prompt_ids(prompt)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            max_new_tokens=LENGTH,
            do_sample=False,
        )
    expected = output[0, len(tokens) :].tolist()
    assert greedy(prompt, LENGTH, ignore_eos=False) == expected


@pytest.mark.parametrize("config", [config for config in configs() if of_default_rule(config)], ids=label)
def test_logprobs_do_not_depend_on_the_method(config):
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=3)
    plain = [plain_logprobs(prompt) for prompt in PROMPTS]
    for ours, reference in zip(llm_of(config).generate(PROMPTS, params), plain, strict=True):
        assert ours.logprobs is not None
        assert [each.token_id for each in ours.logprobs] == [each.token_id for each in reference]
        for mine, theirs in zip(ours.logprobs, reference, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


@cache
def plain_logprobs(prompt):
    (output,) = base().generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True, logprobs=3))
    return output.logprobs


@pytest.mark.parametrize("max_rows", [3, 5, 17])
@pytest.mark.parametrize(
    "make",
    [
        lambda: stubs.Oracle(truth()),
        lambda: stubs.AlwaysWrong(truth()),
        lambda: stubs.Scripted(truth(), 0.6),
        lambda: stubs.OracleTree(truth()),
        lambda: stubs.Random(8192, tree=False),
        lambda: stubs.Random(8192, tree=True),
        lambda: stubs.Empty(),
    ],
    ids=["oracle", "wrong", "scripted", "oracle tree", "random chain", "random tree", "empty"],
)
def test_good_and_bad_drafts_under_any_budget_of_rows_give_the_same_tokens(make, max_rows):
    llm = with_drafter(make(), max_num_seqs=4, max_rows_per_step=max_rows)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert ids(llm.generate(PROMPTS, params)) == [greedy(prompt)[:24] for prompt in PROMPTS]
    assert_idle(llm)


def test_an_oracle_saves_exactly_the_steps_it_should():
    llm = with_drafter(stubs.Oracle(truth()), num_nodes=4)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=41, ignore_eos=True))
    metrics = output.metrics
    assert metrics.num_tokens == 41
    assert metrics.num_steps == 1 + 40 // 5  # the prompt's step emits one token, every other one four and the bonus
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens == 32
    assert metrics.acceptance_by_position == [1.0] * 4


def test_wrong_drafts_cost_no_extra_step():
    llm = with_drafter(stubs.AlwaysWrong(truth()), num_nodes=4)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.metrics.num_steps == 20
    assert output.metrics.num_accepted_tokens == 0
    assert output.metrics.tokens_per_step == 1.0
