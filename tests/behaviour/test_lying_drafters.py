"""A drafter that is wrong about its distribution, and a rule that raises: one request ends with the reason, the others
go on.
"""

from __future__ import annotations

import re

import pytest
import torch

from foretoken.core.draft import NO_DRAFT, Coupled, Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Offers
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.naive import NaiveVerifier
from foretoken_lab import testing as stubs
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, ids, prompt_ids, target, with_drafter

CULPRIT = 2


def plan(**params: object) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, **params)  # type: ignore[arg-type]


def is_culprit(context) -> bool:
    return list(context.tokens[: context.num_prompt]) == prompt_ids(PROMPTS[CULPRIT])


class Table(stubs.Stub):
    """Draws one token from the same flat q every time; for the culprit, whatever ``wrong`` makes of that draft."""

    laws = (Sampled,)

    def __init__(self, wrong=None) -> None:
        self.wrong = wrong
        self.q_1V = torch.full((1, target().vocab_size), 1.0 / target().vocab_size)

    def draft(self, context, budget):
        if not budget.max_nodes:
            return NO_DRAFT
        token = context.streams.categorical("draft", self.q_1V[0])
        good = Draft(TokenTree([token]), Sampled(self.q_1V, (0,)))
        return self.wrong(good) if self.wrong is not None and is_culprit(context) else good


class Proposing(stubs.Stub):
    """Returns a given object, whatever it is."""

    def __init__(self, given) -> None:
        self.given = given

    def propose(self, contexts, budgets):
        return self.given


CHAIN = Draft(TokenTree([5]), PointMass())


@pytest.mark.parametrize(
    "given",
    [None, [None], [], [CHAIN, CHAIN], [5], [TokenTree([5])], [Draft([5], PointMass())], iter([CHAIN]), "x"],
    ids=["None", "no draft", "none", "two", "int", "tree", "no tree", "iterator", "text"],
)
def test_a_wrong_list_of_drafts_is_refused_with_a_message(given):
    (output,) = with_drafter(Proposing(given), num_nodes=2).generate(PROMPTS[:1], plan())
    assert "drafter 'stub' gave" in output.error
    assert "a list of one Draft for each of 1 requests" in output.error


def test_a_q_that_is_no_tensor_is_refused_with_a_message():
    draft = Draft(TokenTree([5]), Sampled([[1.0]], (0,)))
    (output,) = with_drafter(Table(lambda good: draft), num_nodes=2).generate([PROMPTS[CULPRIT]], plan(temperature=1.0))
    assert "q is a list, not a tensor" in output.error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("laws", 5, "laws=5: a tuple of kinds of q"),
        ("laws", (), "a tuple of kinds of q"),
        ("laws", ("PointMass",), "a tuple of kinds of q"),
        ("needs", 5, "needs=5: an instance of core.needs.Needs"),
        ("offers", None, "an instance of core.needs.Offers"),
        ("declared", 5, "an instance of core.needs.Declared"),
    ],
)
@pytest.mark.parametrize(("key", "kind"), [("method", stubs.Empty), ("verifier", NaiveVerifier)])
def test_members_of_the_wrong_kind_are_refused(key, kind, name, value, message):
    own = type("Own", (kind,), {name: value})()
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM.from_target(target(), speculative_config={"method": "ngram", key: own})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda draft: Draft(draft.tree, Sampled(draft.law.q_KV * 0.5, (0,))), "row 0 of q sums to 0.5, not to 1"),
        (lambda draft: Draft(draft.tree, Sampled(draft.law.q_KV * float("nan"), (0,))), "NaN or infinite"),
        (lambda draft: Draft(draft.tree, Sampled(draft.law.q_KV[:, :-1], (0,))), "q has the shape"),
        (lambda draft: Draft(draft.tree, Sampled(draft.law.q_KV, (1,))), "row_of goes from 1 to 1"),
        (lambda draft: Draft(draft.tree, PointMass()), "kind PointMass, but declares Sampled"),
        (lambda draft: Draft(draft.tree, Coupled()), "kind Coupled, but declares Sampled"),
    ],
    ids=["sum", "nan", "vocabulary", "row", "point mass", "coupled"],
)
def test_an_impossible_distribution_ends_its_request_only(wrong, message):
    llm = with_drafter(Table(wrong), num_nodes=2)
    outputs = llm.generate(PROMPTS, [plan(temperature=1.0, seed=seed) for seed in range(len(PROMPTS))])
    assert [bool(output.error) for output in outputs] == [index == CULPRIT for index in range(len(PROMPTS))]
    assert message in outputs[CULPRIT].error
    assert "drafter 'stub'" in outputs[CULPRIT].error
    assert all(len(output.token_ids) == 12 for output in outputs if not output.error)
    assert_idle(llm)


def test_at_temperature_0_the_kind_does_not_matter():
    llm = with_drafter(Table(lambda draft: Draft(draft.tree, PointMass())), num_nodes=2)
    assert ids(llm.generate(PROMPTS, plan())) == [greedy(prompt, 12) for prompt in PROMPTS]


def test_empty_drafts_need_no_kind():
    class Silent(Table):
        def draft(self, context, budget):
            return NO_DRAFT

    assert ids(with_drafter(Silent()).generate(PROMPTS, plan(temperature=1.0)))


@pytest.mark.parametrize("batched", [True, False])
def test_a_rule_that_raises_ends_its_request_only(batched, caplog):
    class Poisoned(NaiveVerifier):
        def verify(self, draft, target, rng):
            if rng.seed == CULPRIT:
                raise ZeroDivisionError("the rule broke")
            return super().verify(draft, target, rng)

        def verify_batch(self, drafts, targets, rngs):
            if len(rngs) > 1:
                sizes.append(len(rngs))
            if any(rng.seed == CULPRIT for rng in rngs):
                raise ZeroDivisionError("the rule broke")
            return super().verify_batch(drafts, targets, rngs)

    sizes: list[int] = []
    rule = Poisoned()
    if not batched:
        rule.offers = Offers(batches=False)
    params = [plan(temperature=1.0, seed=seed) for seed in range(len(PROMPTS))]
    llm = with_drafter(Table(), num_nodes=2, verifier=rule)
    outputs = llm.generate(PROMPTS, params)
    assert outputs[CULPRIT].error == "the rule broke"
    assert "the rule broke" in caplog.text
    assert (max(sizes) > 1) if batched else not sizes
    calm = with_drafter(Table(), num_nodes=2, verifier=NaiveVerifier()).generate(PROMPTS, params)
    for index, output in enumerate(outputs):
        if index != CULPRIT:
            assert output.error is None
            # one by one, no other request's random numbers were used
            assert batched or output.token_ids == calm[index].token_ids
    assert_idle(llm)
