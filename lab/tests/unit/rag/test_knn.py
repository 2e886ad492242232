"""kNN-LM: neighbours and distribution against brute force, and speculation that never changes a token."""

from __future__ import annotations

import random
import time
from functools import cache

import numpy as np
import pytest

from foretoken import LLM
from foretoken.core.errors import InputError
from foretoken.options.sampling import SamplingParams
from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.knn import KnnRun, KnnStore, unit
from foretoken_lab.rag.passages import Passage
from foretoken_lab.rag.system import Rag
from helpers.knowledge import QUESTIONS, passages
from helpers.small_llms import greedy, target
from helpers.threads import one_thread  # noqa: F401  (a fixture)

LENGTH = 16
OPTIONS = {"weight": 0.6, "neighbours": 8}


def rag(method, **options):
    return Rag(target(), passages(12), retriever="knn", method=method, config=RagConfig(**{**OPTIONS, **options}))


def answers(system):
    return list(system.generate(QUESTIONS, max_tokens=LENGTH, ignore_eos=True))


@cache
def baseline():
    return answers(rag("sequential"))


@pytest.mark.parametrize("stride", [1, 3, 8, "auto"])
@pytest.mark.parametrize("locality", [0, 10])
def test_the_text_is_the_baseline_s(monkeypatch, stride, locality):
    rng, search = random.Random(str(stride)), KnnStore.search

    def late(self, queries, count):
        time.sleep(rng.choice([0.0, 0.002]))
        return search(self, queries, count)

    monkeypatch.setattr(KnnStore, "search", late)
    found = answers(rag("ralmspec", stride=stride, locality=locality))
    assert [each.token_ids for each in found] == [each.token_ids for each in baseline()]
    assert all(each.counts.retrievals <= LENGTH for each in found)
    if stride == 8:
        assert sum(each.counts.retrievals for each in found) < len(found) * LENGTH
        assert sum(each.counts.rollbacks for each in found)


def test_the_vote_changes_the_text():
    alone = answers(rag("sequential", weight=0.0))
    assert [each.token_ids for each in alone] != [each.token_ids for each in baseline()]
    assert baseline()[0].counts.retrievals == LENGTH


def test_without_weight_the_model_writes_alone():
    system = rag("ralmspec", weight=0.0)
    found = answers(system)
    layout = system._layout
    for question, each in zip(QUESTIONS, found, strict=True):
        assert each.token_ids == greedy((*layout.head(None, 1), *layout.question(question)), LENGTH)


def test_without_verification_the_text_is_another(monkeypatch):
    """Planted: every guess is taken for right."""
    monkeypatch.setattr(KnnRun, "_judge", lambda self, session, steps, found: len(steps))
    found = answers(rag("ralmspec", stride=8, locality=0))
    assert [each.token_ids for each in found] != [each.token_ids for each in baseline()]


@pytest.mark.parametrize("method", ["sequential", "ralmspec"])
def test_a_failed_search_ends_its_own_request_or_it_goes_on(monkeypatch, method):
    search, calls = KnnStore.search, []

    def broken(self, queries, count):
        calls.append(len(queries))
        if len(calls) == 3:
            raise OSError("gone")
        return search(self, queries, count)

    monkeypatch.setattr(KnnStore, "search", broken)
    found = answers(rag(method, stride=2))
    assert found[0].completion.finish_reason == "error"
    written = found[0].token_ids
    assert written == baseline()[0].token_ids[: len(written)]
    assert found[1].token_ids == baseline()[1].token_ids
    calls.clear()
    found = answers(rag(method, stride=2, on_failure="fallback"))
    assert found[0].completion.error is None
    assert found[0].completion.promise == "approximate"
    assert len(found[0].token_ids) == LENGTH
    assert found[0].token_ids[: len(written)] == written
    assert found[1].token_ids == baseline()[1].token_ids


# ---------------------------------------------------------------- the store


def store(size=200, seed=0):
    rng = np.random.default_rng(seed)
    keys = unit(rng.standard_normal((size, 16)))
    keys[50:60] = keys[7]
    return KnnStore(keys, rng.integers(0, 30, size))


def test_neighbours_are_the_nearest_of_all_alone_and_among_others():
    found = store()
    queries = list(unit(np.random.default_rng(1).standard_normal((40, 16))))
    queries[0] = found.keys[7]
    together = found.search(queries, 12)
    for query, (numbers, distances) in zip(queries, together, strict=True):
        exact = np.square(found.keys - query).sum(1)
        order = np.lexsort((np.arange(len(exact)), exact))[:12]
        assert numbers.tolist() == order.tolist()
        np.testing.assert_array_equal(distances, exact[order])
        alone = found.search([query], 12)[0]
        assert alone[0].tolist() == numbers.tolist()
    assert together[0][0].tolist()[:4] == [7, 50, 51, 52]


def test_the_distribution_is_the_mixture():
    found = store()
    logits_V = np.random.default_rng(2).standard_normal(30)
    config = RagConfig(weight=0.4, temperature=0.3)
    neighbours = found.search([found.keys[3]], 5)[0]
    law = 0.6 * np.exp(logits_V) / np.exp(logits_V).sum()
    votes = np.exp(-neighbours[1] / 0.3)
    for number, vote in zip(neighbours[0], votes / votes.sum(), strict=True):
        law[found.values[number]] += 0.4 * vote
    assert found.token(logits_V, neighbours, config) == int(law.argmax())


def test_entries_are_in_the_order_of_the_corpus():
    texts = passages(3)
    found = KnnStore.of(target(), texts)
    expected = [token for each in texts for token in target().tokenizer(each.text)["input_ids"][1:]]
    assert found.values.tolist() == expected
    assert len(found) == len(found.keys)


def test_passages_of_one_token_hold_nothing():
    with pytest.raises(InputError, match="index is empty"):
        KnnStore(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))


@pytest.mark.parametrize("noise", [0.0, 6e-8])
@pytest.mark.parametrize("width", [16, 192])
def test_more_ties_than_candidates_are_found_alike_alone_and_among_others(width, noise):
    """As many equal contexts as a corpus of similar answers has; faiss rounds one query differently from many."""
    rng = np.random.default_rng(2)
    keys = unit(rng.standard_normal((400, width)))
    tied = rng.permutation(400)[:200]
    keys[tied] = keys[tied[0]] + noise * rng.choice([-1.0, 0.0, 1.0], (200, width))
    found = KnnStore(keys.astype(np.float32), rng.integers(0, 30, 400))
    queries = list(unit(keys[tied[0]] + 0.3 * rng.standard_normal((24, width)) / width**0.5))
    together = found.search(queries, 16)
    for query, (numbers, distances) in zip(queries, together, strict=True):
        (alone,) = found.search([query], 16)
        assert numbers.tolist() == alone[0].tolist()
        exact = np.square(found.keys - query).sum(1)
        assert numbers.tolist() == np.lexsort((np.arange(len(exact)), exact))[:16].tolist()
        np.testing.assert_array_equal(distances, exact[numbers])


def test_the_text_is_the_baseline_s_over_earlier_answers_with_equal_contexts():
    """Sixty earlier answers: of the ninth question one token was another, before ties were searched to their end."""
    llm = LLM("zoo:base", speculative_config=None)  # with the native decoder
    things = ("boy", "ball", "cake", "car", "song", "fish")
    animals = ("dog", "cat", "boat", "tree", "king", "girl", "bird", "house", "river", "star")
    asked = [f"Tell me about a {animal} and a {thing}." for animal in animals for thing in things]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=96))
    corpus = [Passage(text, f"{text} {output.text}") for text, output in zip(asked, outputs, strict=True)]
    config = RagConfig(weight=0.6, stride=8)
    made = [Rag(llm.target, corpus, retriever="knn", method=each, config=config) for each in ("sequential", "ralmspec")]
    questions = [*asked[:2], "What is the capital of Chad?"]
    first, second = (list(each.generate(questions, max_tokens=64)) for each in made)
    assert [each.token_ids for each in second] == [each.token_ids for each in first]
