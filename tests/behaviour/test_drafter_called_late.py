"""A drafter that is first called in the middle of a request catches up, and proposes the same as if called earlier."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.draft import NO_DRAFT
from foretoken.core.needs import HiddenLayers, Needs
from foretoken.core.protocols import Features
from foretoken.drafting import draft_runner
from foretoken.engine.features import feature_backlog
from foretoken.methods.kangaroo import drafter as kangaroo
from foretoken.options.sampling import SamplingParams
from foretoken_lab.testing import Stub
from helpers.asking import Always, asked_when
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, prompt_ids, with_config, with_drafter

LENGTH = 16
RECIPES = {
    "draft_model": {"method": "draft_model", "model": "zoo:draft"},
    "tree": {"method": "draft_model", "model": "zoo:draft", "tree": "topk"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "kangaroo": {"method": "kangaroo", "adapter": "random:2"},
    "del": {"method": "del", "exit_layer": 4, "cost": "layers"},
}


def params(**more: object) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gaps", ["late", "now and then"])
def test_the_text_stays_and_drafts_are_made(recipe, gaps):
    llm = with_config(RECIPES[recipe])
    asked_when(llm, (lambda done: done >= 8) if gaps == "late" else (lambda done: done % 5 < 2))
    outputs = llm.generate(PROMPTS[:4], params())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS[:4]]
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    assert_idle(llm)


@pytest.mark.parametrize("recipe", ["draft_model", "ngram", "suffix", "kangaroo"])
def test_a_late_call_proposes_the_same_draft(recipe, monkeypatch):
    """After a text of more than one chunk, and after tokens that it has not seen; so the drafts are the same."""
    monkeypatch.setattr(draft_runner, "CHUNK_ROWS", 32)
    monkeypatch.setattr(kangaroo, "_CHUNK_ROWS", 32)
    long = (prompt_ids(PROMPTS[0]) * 60)[:100]
    proposed = []
    for asks in (lambda done: True, lambda done: done == 0 or done >= 12):
        llm = with_config(RECIPES[recipe])
        asked_when(llm, asks)
        drafter, drafts = llm.recipe.drafter, {}
        propose = drafter.propose

        def watched(contexts, budgets, propose=propose, drafts=drafts):
            found = propose(contexts, budgets)
            drafts.update({len(each.tokens): draft.tree.tokens for each, draft in zip(contexts, found, strict=True)})
            return found

        drafter.propose = watched
        (output,) = llm.generate({"prompt_token_ids": long}, params())
        assert output.error is None
        proposed.append(drafts)
    both = [at for at in proposed[0] if at >= len(long) + 12 and at in proposed[1]]
    assert both
    assert any(proposed[0][at] for at in both)
    assert all(proposed[0][at] == proposed[1][at] for at in both)


def test_an_uncalled_draft_model_reads_nothing():
    llm = with_config(RECIPES["draft_model"])
    drafter = llm.recipe.drafter
    asked_when(llm, lambda done: False)
    before = drafter.flops
    outputs = llm.generate(PROMPTS, params())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert drafter.flops == before
    assert_idle(llm)


def test_an_uncalled_adapter_reads_nothing():
    llm = with_config(RECIPES["kangaroo"])
    drafter = llm.recipe.drafter
    asked_when(llm, lambda done: False)
    drafter._head.forward = None  # would be a TypeError
    (output,) = llm.generate(PROMPTS[0], params())
    assert output.error is None
    assert_idle(llm)


def test_rows_for_drafts_go_to_requests_that_draft():
    """Eight rows for four requests: one of them may draft four tokens where the others draft none."""
    llm = with_config(RECIPES["ngram"], max_num_seqs=4, max_rows_per_step=8)
    first = prompt_ids(PROMPTS[2])

    def choose(requests, num_requests, *, queued):
        return [Always() if each.tokens[: each.num_prompt] == first else None for each in requests]

    llm.engine.controller.choose = choose
    outputs = llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]], params())
    assert len(outputs[1].metrics.drafted_at) == 4
    assert [sum(output.metrics.drafted_at) > 0 for output in outputs] == [False, True, False, False]


def test_accepted_tokens_are_weighed_and_waiting_requests_are_counted():
    """Three requests for two places: the third waits until one of the first two has ended."""
    llm = with_config(RECIPES["ngram"], max_num_seqs=2)
    gained, queues, asked = [], [], []

    def choose(requests, num_requests, *, queued):
        queues.append(queued)
        asked[:] = requests
        for each in requests:
            each.ledger.weight = 3.0
        return [Always() for _ in requests]

    controller = llm.engine.controller
    controller.choose = choose
    controller.measure = lambda **times: gained.extend(each.ledger.gained for each in asked)
    (same,) = prompt_ids("7")[-1:]  # forced again and again, so it can be guessed whatever the model prefers
    outputs = llm.generate([PROMPTS[2]] * 3, params(logit_bias={same: 100.0}))
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert accepted > 0
    assert sum(gained) == pytest.approx(3.0 * accepted)
    assert queues == sorted(queues, reverse=True)
    assert set(queues) == {True, False}


def test_seeded_requests_that_depend_on_the_draft_always_draft():
    llm = with_config(RECIPES["draft_model"])
    steps = asked_when(llm, lambda done: False)
    seeded = [params(temperature=0.8, seed=3), params()]
    drafted = [output.metrics.num_draft_tokens for output in llm.generate(PROMPTS[:2], seeded)]
    assert drafted[0] > 0
    assert drafted[1] == 0
    assert steps


@pytest.mark.parametrize(
    ("config", "weighed"),
    [
        ({"method": "ngram"}, True),
        ({"method": "ngram", "num_speculative_tokens": 4}, False),
        ({"method": "kangaroo", "adapter": "random:2"}, True),
        ({"method": "kangaroo", "adapter": "random:2", "num_speculative_tokens": 4}, False),
        ({"method": "del"}, True),
        ({"method": "sprinter", "model": "zoo:draft", "head": "random:pre"}, False),
        ({"method": "sprinter", "model": "zoo:draft", "head": "random:pre", "verifier": "block"}, True),
        ({"method": "none"}, False),
    ],
)
def test_requests_that_are_weighed_against_plain_decoding(config, weighed):
    """A requested number of tokens is drafted, and a lossy rule's text must not depend on times."""
    assert with_config(config).recipe.may_skip_drafting is weighed


# ------------------------------------------------------------------ its hidden states


class Watching(Stub):
    """Needs hidden states, drafts nothing by default, and records all states that it gets."""

    name = "watching"

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs(hidden_layers=HiddenLayers((2, 5)))
        self.calls = 0
        self.shown: dict[int, list[Features]] = {}

    def on_forward(self, features):
        self.calls += 1
        for each in features:
            self.shown.setdefault(each.context.request_id, []).append(each)

    def propose(self, contexts, budgets):
        return [NO_DRAFT] * len(contexts)


def seen_by(asks) -> tuple[Watching, list[list[int]]]:
    watching = Watching()
    llm = with_drafter(watching, adaptive=True)
    asked_when(llm, asks)
    outputs = llm.generate(PROMPTS[:3], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (24, 9, 24)])
    assert_idle(llm)
    return watching, [[*output.prompt_token_ids, *output.token_ids] for output in outputs]


def test_kept_features_are_replayed_in_order_and_unchanged(monkeypatch):
    monkeypatch.setattr(feature_backlog, "_MOST", 7)
    late, texts = seen_by(lambda done: done == 17)
    always, same = seen_by(lambda done: True)
    assert texts == same
    assert late.calls < always.calls  # else nothing was kept
    for number in (0, 2):  # the other ended before the next call
        at = 0
        for each in late.shown[number]:
            rows = len(each.hidden[2])
            assert each.begin == at
            assert rows == len(each.hidden[5])
            at += rows
            if each.begin >= each.context.num_prompt:
                assert list(each.best) == texts[number][each.begin + 1 : at + 1]
        assert at > len(texts[number]) - 10
        for depth in (2, 5):
            found, expected = (
                torch.cat([each.hidden[depth] for each in watching.shown[number]]) for watching in (late, always)
            )
            both = min(len(found), len(expected))
            torch.testing.assert_close(found[:both], expected[:both])


def test_features_of_an_ended_request_are_not_replayed():
    watching, texts = seen_by(lambda done: done >= 12)
    (prompt,) = watching.shown[1]  # its prompt, and none of its nine tokens
    assert len(prompt.hidden[2]) == len(texts[1]) - 9


@pytest.mark.parametrize("hopeless", [True, False])
def test_a_request_without_hope_is_neither_shown_nor_drafted_for(hopeless):
    watching = Watching()
    llm = with_drafter(watching, adaptive=True)
    asked_when(llm, lambda done: True)
    llm.engine.controller.hopeless = lambda request, num_requests: hopeless
    watched: list[int] = []
    propose = watching.propose
    watching.propose = lambda contexts, budgets: (
        watched.append(sum(each.max_nodes for each in budgets)),
        propose(contexts, budgets),
    )[1]
    outputs = llm.generate(PROMPTS[:2], params())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS[:2]]
    assert bool(watching.shown) is not hopeless
    assert any(watched) is not hopeless


def test_a_drafter_that_looks_at_tokens_alone_never_gives_a_request_up():
    llm = with_config(RECIPES["ngram"])
    asked_when(llm, lambda done: True)
    llm.engine.controller.hopeless = lambda request, num_requests: True
    outputs = llm.generate(PROMPTS[:4], params())
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
