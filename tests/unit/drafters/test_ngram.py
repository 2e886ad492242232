"""NgramDrafter against a naive rescan of the text, its budgets, and its learned rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.draft import NO_DRAFT, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Outcome
from foretoken.core.verdict import Verdict
from foretoken.drafters.agreement import AgreementRates
from foretoken.drafters.ngram import NgramDrafter

texts = st.lists(st.integers(0, 2), max_size=40)


@dataclass
class Text:
    """The part of a Context that lookup drafters read."""

    tokens: list[int]
    request_id: int = 0
    num_prompt: int = 0
    params: Any = None
    streams: Any = None
    laws: Any = None


@dataclass
class Refusing:
    """Accepts so many nodes, and records its calls."""

    accepts: int
    asked: list[tuple[float, float, int]] = field(default_factory=list)

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        self.asked.append((reach, confidence, num_nodes))
        return num_nodes < self.accepts


def drafter(**options: int) -> NgramDrafter:
    return NgramDrafter(NgramDrafter.Config(**options))


def propose_one(ngram: NgramDrafter, text: Text, nodes: int, depth: int | None = None, stop_rule: Any = None):
    (draft,) = ngram.propose([text], [Budget(nodes, nodes if depth is None else depth, stop_rule)])
    return draft


def rescanned(tokens: list[int], longest: int, shortest: int, limit: int) -> list[int]:
    """The definition: longest n first, then the most recent earlier occurrence; the copy runs over its own end."""
    end = len(tokens)
    for n in range(longest, shortest - 1, -1):
        for source in range(end - 1, n - 1, -1):
            if n < end and tokens[source - n : source] == tokens[end - n :]:
                copied = list(tokens)
                for i in range(limit):
                    copied.append(copied[source + i])
                return copied[end:]
    return []


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 5), max_size=12), st.integers(1, 5), st.integers(0, 4), st.integers(1, 9))
def test_equals_a_naive_rescan_however_the_text_grows(tokens, chunks, shortest, extra, limit):
    ngram = drafter(prompt_lookup_min=shortest, prompt_lookup_max=shortest + extra)
    text = Text(tokens=[])
    rest = list(tokens)
    for size in [*chunks, len(tokens) + 1]:
        text.tokens += rest[:size]
        del rest[:size]
        draft = propose_one(ngram, text, limit)
        assert list(draft.tree.tokens) == rescanned(text.tokens, shortest + extra, shortest, limit)
        assert draft.tree.is_chain
        assert isinstance(draft.law, PointMass)
        assert len(draft.confidence) == len(draft)
        assert all(0.0 < confidence <= 1.0 for confidence in draft.confidence)


def test_prefers_the_longest_match_to_a_more_recent_shorter_one():
    assert propose_one(drafter(), Text([1, 2, 7, 9, 2, 8, 1, 2]), 1).tree.tokens == (7,)
    assert propose_one(drafter(prompt_lookup_max=1), Text([1, 2, 7, 9, 2, 8, 1, 2]), 1).tree.tokens == (8,)


def test_a_copy_goes_on_over_the_end_of_a_periodic_text():
    assert propose_one(drafter(), Text([1, 2, 3, 1, 2, 3]), 7).tree.tokens == (1, 2, 3, 1, 2, 3, 1)


def test_proposes_nothing_when_nothing_repeats_or_the_match_is_too_short():
    assert propose_one(drafter(), Text([1, 2, 3]), 4) is NO_DRAFT
    assert propose_one(drafter(prompt_lookup_min=2), Text([1, 2, 3, 1]), 4) is NO_DRAFT
    assert propose_one(drafter(), Text([1]), 4) is NO_DRAFT
    assert propose_one(drafter(), Text([]), 4) is NO_DRAFT


def test_budgets_bound_the_chain_and_a_skipped_step_is_caught_up():
    ngram, text = drafter(), Text([1, 2, 1])
    assert propose_one(ngram, text, 0) is NO_DRAFT
    assert propose_one(ngram, text, 5, depth=0) is NO_DRAFT
    text.tokens += [2, 5, 1, 2]
    assert propose_one(ngram, text, 5, depth=1).tree.tokens == (5,)
    assert propose_one(ngram, text, 2, depth=9).tree.tokens == (5, 1)


def test_requests_of_one_batch_do_not_mix_and_release_clears_them():
    ngram = drafter()
    first, second, third = Text([1, 2, 1], 10), Text([], 11), Text([1, 3, 1, 4, 1], 12)
    drafts = ngram.propose([first, second, third], [Budget(1, 1), Budget(4, 4), Budget(2, 2)])
    assert [draft.tree.tokens for draft in drafts] == [(2,), (), (4, 1)]
    ngram.release(10)
    assert propose_one(ngram, Text([8, 1], 10), 4) is NO_DRAFT
    ngram.release(99)


def test_patience_decides_before_every_node_by_the_product_of_confidences():
    ngram, stop_rule = drafter(), Refusing(accepts=3)
    draft = propose_one(ngram, Text([1, 2, 3, 1, 2, 3]), 8, stop_rule=stop_rule)
    assert len(draft) == len(draft.confidence) == 3
    reach = 1.0
    for num_nodes, (asked_reach, confidence, asked_nodes) in enumerate(stop_rule.asked):
        assert (asked_reach, asked_nodes) == (pytest.approx(reach), num_nodes)
        reach *= confidence
    assert draft.confidence == tuple(confidence for _, confidence, _ in stop_rule.asked[:3])
    assert propose_one(ngram, Text([1, 1], 1), 8, stop_rule=Refusing(accepts=0)) is NO_DRAFT


def test_longer_agreement_is_trusted_more_beyond_the_ngram_too():
    short = propose_one(drafter(), Text([1, 2, 3, 4, 9, 1, 2, 3, 4]), 1)
    long = propose_one(drafter(), Text([5, 6, 1, 2, 3, 4, 9, 5, 6, 1, 2, 3, 4]), 1)
    assert long.confidence > short.confidence


def test_any_length_of_ngram_and_draft_has_confidences():
    period = list(range(50))
    draft = propose_one(drafter(prompt_lookup_max=45, prompt_lookup_min=40), Text(period * 3), 60)
    assert draft.tree.tokens == tuple(range(50)) + tuple(range(10))
    assert len(set(draft.confidence)) == 1


def test_learns_from_the_decided_nodes_only_and_across_requests():
    ngram, text = drafter(), Text([1, 2, 3, 1])
    before = propose_one(ngram, text, 3)
    for _ in range(200):
        draft = propose_one(ngram, text, 3)
        ngram.observe([Outcome(0, draft, Verdict((0,), 7), (2, 7))])
    ngram.release(0)
    after = propose_one(ngram, Text([1, 2, 3, 1], 1), 3)
    assert after.confidence[0] > 0.95 > before.confidence[0]
    assert after.confidence[1] < 0.05 < before.confidence[1]
    assert after.confidence[2] == before.confidence[2]


def test_observing_a_released_request_or_an_empty_draft_is_harmless():
    ngram = drafter()
    ngram.observe([Outcome(5, NO_DRAFT, Verdict((), 1), (1,))])
    propose_one(ngram, Text([1, 1], 5), 1)
    ngram.observe([Outcome(5, NO_DRAFT, Verdict((), 1), (1,))])
    assert ngram._rates.rates == AgreementRates(32).rates


def test_rates_follow_a_change_of_workload():
    rates = AgreementRates(4)
    for _ in range(5000):
        rates.learn(9, True)
    for _ in range(3000):
        rates.learn(4, False)
    assert rates.rates[4] < 0.15
    assert rates.rates[:4] == AgreementRates(4).rates[:4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ({"prompt_lookup_min": True}, "prompt_lookup_min=True"),
        ({"prompt_lookup_min": 1.5}, "prompt_lookup_min=1.5"),
        ({"prompt_lookup_min": 5}, "lower one or raise the other"),
    ],
)
def test_config_refuses_unsupported_values(options, message):
    with pytest.raises(ConfigError, match=message):
        NgramDrafter.Config(**options)
