"""Greedy text does not depend on how it was computed: every drafter under every lossless verifier that fits.

Collected from the catalogue: a new entry is tested the day it is listed. By default every variant runs, and every
method and kind of draft under every rule; with ``--all-variants`` every variant under every rule and draft length.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import catalog, zoo
from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.drafter import FeatureDrafter
from foretoken.drafting.level_tree import DRAWN
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from helpers import zoo_llms
from helpers.pairwise import in_pairs, pairwise
from helpers.small_llms import PROMPTS, assert_idle, config_of, greedy, ids, over, prompt_ids, truth, with_drafter
from helpers.variants import WITH_PARTS, Case, cases, lossless_rules

LENGTH, LONGER = 9, 12
_COUNTS: tuple[int | str, ...] = (5, "auto")


@dataclass(frozen=True)
class Combination:
    """A recipe that one could write: a variant of a drafter, a rule, and a draft length.

    Attributes:
        case: the variant.
        rule: a lossless rule; None: the one that is chosen for it.
        count: ``num_speculative_tokens``.
    """

    case: Case
    rule: str | None
    count: int | str

    def __str__(self) -> str:
        return "-".join([self.case.label, *([self.rule] if self.rule else []), str(self.count)])

    @property
    def factors(self) -> tuple[Hashable, ...]:
        return self.case.entry.name, self.case.kind, self.rule, self.count

    @property
    def variant(self) -> tuple[str, ...]:
        return (self.case.label,)

    @property
    def fits(self) -> bool:
        return self.rule is None or self.case.fits(self.rule)

    @property
    def llm(self) -> LLM:
        made: LLM = over(self.case).with_config(config_of(self.case, self.rule, self.count))
        return made


def combinations() -> list[Combination]:
    """Every variant under every rule, the default one first; under that alone where a variant asks for one rule."""
    return [
        Combination(case, rule, count)
        for rule in (None, *lossless_rules())
        for case in cases()
        for count in _COUNTS
        if rule is None or not case.variant.one_rule
    ]


ALL = combinations()
FITTING = [each for each in ALL if each.fits]
OF_DEFAULT_RULE = [each for each in FITTING if each.rule is None]
LEFT_OUT = list({each.factors: each for each in ALL if not each.fits and each.count == _COUNTS[0]}.values())
# an adaptive length drafts little in texts as short as these: once under every rule, and once for every method
FIXED = [each for each in FITTING if each.count == _COUNTS[0]]
ADAPTIVE = [each for each in FITTING if each.count != _COUNTS[0]]
BY_FACTORS = {"factors": lambda each: each.factors, "once": lambda each: each.variant}
BY_METHOD_AND_RULE = {"factors": lambda each: (), "once": lambda each: (each.case.entry.name, each.rule)}
PAIRS = pairwise(FIXED, **BY_FACTORS) + pairwise(ADAPTIVE, **BY_METHOD_AND_RULE)


def one_each(combinations: list[Combination]) -> list[Any]:
    """Every method, kind of draft and draft length once by default."""
    return in_pairs(combinations, lambda each: (), lambda each: each.factors)


@cache
def llm_of(combination: str) -> LLM:
    return next(each for each in FITTING if str(each) == combination).llm


def test_labels_of_recipes_are_unique():
    assert len({str(each) for each in ALL}) == len(ALL)


def test_drafters_with_a_learned_part_have_rows_that_contain_their_declared_variants():
    declared = {each.name: each.load().declared for each in catalog.entries("drafter")}
    assert {name for name, each in declared.items() if each.learned_part is not None} == set(WITH_PARTS)
    cases_of = {name: [case for case in cases() if case.entry.name == name] for name in WITH_PARTS}
    for name, rows in cases_of.items():
        for variant in declared[name].variants:
            wanted = Case(rows[0].entry, variant)
            found = [row for row in rows if row.kind == wanted.kind]
            assert any(variant.options.items() <= row.variant.options.items() for row in found), (name, variant)


def test_every_variant_and_every_rule_runs_without_the_full_product():
    assert {each.case.label for each in PAIRS} == {case.label for case in cases()}
    for rule in lossless_rules():
        assert {each.count for each in PAIRS if each.rule == rule} == set(_COUNTS), rule
        fitting = {each.case.entry.name for each in FITTING if each.rule == rule}
        assert {each.case.entry.name for each in PAIRS if each.rule == rule} == fitting, rule


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_a_variant_proposes_its_declared_drafts(case):
    drafter = over(case).with_config(config_of(case, None, 5)).recipe.drafter
    assert drafter.laws == case.laws
    assert drafter.branches == case.branches


@pytest.mark.parametrize("method", sorted({each.case.entry.name for each in LEFT_OUT}))
def test_recipes_that_do_not_fit_are_refused(method):
    for each in LEFT_OUT:
        if each.case.entry.name != method:
            continue
        verifier = catalog.find(each.rule, "verifier").load()
        head = issubclass(each.case.entry.load(), FeatureDrafter)
        if head and verifier.trees and each.case.branches and set(DRAWN.values()) & set(verifier.laws):
            assert each.llm.recipe.drafter.laws != each.case.laws  # its tree is drawn for a rule of drawn trees
            continue
        with pytest.raises(ConfigError, match=r"verifies chains|not valid for drafts of kind"):
            _ = each.llm


@pytest.mark.parametrize(
    "combination", in_pairs(FIXED, **BY_FACTORS) + in_pairs(ADAPTIVE, **BY_METHOD_AND_RULE), ids=str
)
def test_every_lossless_recipe_gives_the_plain_greedy_tokens(combination):
    """Ragged lengths, fewer slots than requests, so that requests join and leave; then one alone."""
    llm = llm_of(str(combination))
    lengths = (LENGTH, 5, 8, 1, LENGTH - 3)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    greedy = over(combination.case).greedy
    expected = [greedy(prompt, LENGTH)[:length] for prompt, length in zip(PROMPTS, lengths, strict=True)]
    assert ids(llm.generate(PROMPTS, params)) == expected
    assert ids(llm.generate(PROMPTS[0], params[1])) == [expected[0][: lengths[1]]]
    assert_idle(llm)


@pytest.mark.parametrize("combination", one_each(OF_DEFAULT_RULE), ids=str)
def test_requests_that_join_late_and_leave_early_get_the_same_tokens(combination):
    llm = llm_of(str(combination))
    first = llm.stream(PROMPTS[0], SamplingParams(max_tokens=LONGER, ignore_eos=True))
    got = [*next(first).token_ids, *next(first).token_ids]
    second = llm.stream(PROMPTS[1], SamplingParams(max_tokens=LONGER, ignore_eos=True))
    third = llm.stream(PROMPTS[2], SamplingParams(max_tokens=LONGER, ignore_eos=True))
    late = list(next(second).token_ids)
    next(third)
    third.close()  # cancelled in the middle
    for chunk in first:
        got += chunk.token_ids
    for chunk in second:
        late += chunk.token_ids
    greedy = over(combination.case).greedy
    assert got == greedy(PROMPTS[0], LONGER)
    assert late == greedy(PROMPTS[1], LONGER)
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
    assert zoo_llms.greedy(prompt, LENGTH, ignore_eos=False) == expected


@pytest.mark.parametrize("combination", one_each(OF_DEFAULT_RULE), ids=str)
def test_logprobs_do_not_depend_on_the_method(combination):
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3)
    plain = plain_logprobs(over(combination.case))
    for ours, reference in zip(llm_of(str(combination)).generate(PROMPTS[:3], params), plain, strict=True):
        assert ours.logprobs is not None
        assert [each.token_id for each in ours.logprobs] == [each.token_id for each in reference]
        for mine, theirs in zip(ours.logprobs, reference, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


@cache
def plain_logprobs(llms):
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3)
    return [llms.base().generate(prompt, params)[0].logprobs for prompt in PROMPTS[:3]]


@pytest.mark.covering(1)
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
