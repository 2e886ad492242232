"""Counted FLOPs against torch's own counter over the library's model, and what an evaluation makes of them."""

from __future__ import annotations

import pytest

from foretoken.options.sampling import SamplingParams
from foretoken_lab.tasks.catalog import Setting, find
from foretoken_lab.tasks.evaluate import evaluate
from foretoken_lab.testing import Oracle
from helpers.zoo_llms import base, with_config, with_drafter


def sizes_of(model):
    return model.sizes


def figures(llm, max_tokens=24):
    task = find("json")
    return evaluate(llm, task, task.examples(2, Setting()), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def row(model):
    """Of one row through all of a model."""
    return sizes_of(model).flops(model.num_layers, 1)


def test_a_token_of_plain_decoding_is_one_row():
    assert figures(base()).flops_per_token == row(base().target)


def test_a_drafted_token_is_rows_of_both_models():
    llm = with_config({"method": "draft_model", "model": "zoo:draft", "tree": "chain", "num_speculative_tokens": 3})
    found = figures(llm)
    target, draft = llm.target, llm.recipe.drafter.model
    metrics = found.metrics
    theirs = (metrics.num_steps + metrics.num_draft_tokens) * row(target)
    # the draft reads every root and draft token, but the last of a draft; and after a whole draft that stood, that one
    # too, which needs no head: never more than one row a step
    least = metrics.num_draft_tokens * row(draft)
    most = least + metrics.num_steps * row(draft)
    assert theirs + least <= found.flops <= theirs + most
    assert found.fields()["flops_per_token"] == found.flops / metrics.num_tokens


def test_copying_costs_rows_of_the_target_only():
    found = figures(with_config({"method": "ngram", "num_speculative_tokens": 4}))
    metrics = found.metrics
    assert found.flops == (metrics.num_steps + metrics.num_draft_tokens) * row(base().target)


@pytest.mark.parametrize("config", [{"method": "kangaroo"}, None])
def test_uncounted_flops_are_not_given(config):
    """An adapter's network does not count itself, and of a drafter of one's own nothing is known."""
    llm = with_config(config) if config else with_drafter(Oracle({}))
    assert figures(llm, 4).flops_per_token is None
