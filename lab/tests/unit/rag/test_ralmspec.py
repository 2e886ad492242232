"""The text of RaLMSpec is the sequential baseline's, whatever is guessed and however late a search ends."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest

from foretoken.core.errors import ConfigError, InputError
from foretoken.models.load import load
from foretoken_lab.rag import ralmspec
from foretoken_lab.rag.config import WIDTH, RagConfig
from foretoken_lab.rag.encoders import TargetEncoder
from foretoken_lab.rag.passages import Passage
from foretoken_lab.rag.retrievers import Bm25Retriever, DenseRetriever
from foretoken_lab.rag.system import Rag
from foretoken_lab.rag.vectors import vectors_of
from helpers.knowledge import passages
from helpers.small_llms import target
from helpers.threads import one_thread  # noqa: F401  (a fixture)

NAMES = ("flat", "hnsw", "bm25")
# what the model says to these is nearest to one passage and then another, by every retriever
QUESTIONS = ("Is the winter cold in the forest?", "coffee, banana, cotton, cattle,")
LENGTH = 16
SHAPES = [
    {"stride": 1, "prefetch": 1},
    {"stride": 2, "prefetch": 20, "asynchronous": False},
    {"stride": 3, "prefetch": 1},
    {"stride": 8, "prefetch": 20},
    {"stride": 8, "prefetch": 1, "asynchronous": False},
    {"stride": "auto", "prefetch": 20},
]
FREQUENT = {"every": 2, "query_tokens": 12}


@cache
def retriever(name):
    if name == "bm25":
        return Bm25Retriever(passages())
    encoder = TargetEncoder(target())
    return DenseRetriever(name, vectors_of(passages(), encoder, None), encoder)


class Through:
    """A retriever with something between it and whoever asks."""

    def __init__(self, inner):
        self.inner, self.name, self.size, self.searches = inner, inner.name, inner.size, 0

    def query(self, text):
        return self.inner.query(text)

    def search(self, queries):
        self.searches += 1
        return self.inner.search(queries)

    def best_of(self, query, numbers):
        return self.inner.best_of(query, numbers)


def rag(found, method="ralmspec", **options):
    config = RagConfig(**{**FREQUENT, **options})
    return Rag(target(), passages(), retriever=found, method=method, config=config)


def answers(system, questions=QUESTIONS, length=LENGTH, **options):
    return list(system.generate(questions, max_tokens=length, ignore_eos=True, **options))


@cache
def baseline(name):
    return answers(rag(retriever(name), "sequential"))


def check_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.completion.error is None
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert ours.counts.passages == theirs.counts.passages


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_baseline_s_whatever_the_delays(name, shape):
    rng = random.Random(str(shape))

    class Late(Through):
        def search(self, queries):
            time.sleep(rng.choice([0.0, 0.001, 0.012]))
            return super().search(queries)

        def best_of(self, query, numbers):
            time.sleep(rng.choice([0.0, 0.002]))
            return super().best_of(query, numbers)

    check_equal(answers(rag(Late(retriever(name)), **shape)), baseline(name))


def test_the_passage_changes_and_guesses_are_wrong_now_and_then():
    """Else nothing above would be tested."""
    for name in NAMES:
        assert any(len(set(each.counts.passages)) > 2 for each in baseline(name))
        found = answers(rag(retriever(name), stride=3, prefetch=1))
        assert sum(each.counts.rollbacks for each in found)
        assert sum(each.counts.right_guesses for each in found)
        assert sum(each.counts.retrievals for each in found) < sum(each.counts.retrievals for each in baseline(name))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_guesses_that_are_always_wrong_cost_time_only(asynchronous):
    class Wrong(Through):
        def best_of(self, query, numbers):
            return (self.inner.search([query])[0][0] + 1) % self.size

    found = answers(rag(Wrong(retriever("bm25")), stride=3, asynchronous=asynchronous))
    check_equal(found, baseline("bm25"))
    for each in found:
        assert each.counts.right_guesses == 0
        assert each.counts.rollbacks == len(each.counts.passages) - 1  # every round keeps one step
        assert each.counts.recomputed_rows > 0


def test_guesses_that_are_always_right_recompute_nothing_more():
    class Knowing(Through):
        def best_of(self, query, numbers):
            return self.inner.search([query])[0][0]

    found = answers(rag(Knowing(retriever("flat")), stride=3, asynchronous=False))
    check_equal(found, baseline("flat"))
    for ours, theirs in zip(found, baseline("flat"), strict=True):
        assert ours.counts.rollbacks == ours.counts.discarded_tokens == 0
        assert ours.counts.recomputed_rows == theirs.counts.recomputed_rows


def test_without_verification_the_text_is_another(monkeypatch):
    """Planted: every guess is taken for right."""

    def believe(self, guesses, found, extra, written):
        self.verified = guesses[-1].passage
        return None if self._session.finished else [] if extra is None else [extra]

    monkeypatch.setattr(ralmspec._Run, "_judge", believe)
    found = answers(rag(retriever("bm25"), stride=4, prefetch=1))
    assert any(ours.token_ids != theirs.token_ids for ours, theirs in zip(found, baseline("bm25"), strict=True))


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_the_limit_may_lie_anywhere_in_a_step(length):
    expected = [each.token_ids[:length] for each in answers(rag(retriever("bm25"), "sequential", every=4), length=8)]
    for stride in (1, 3, 8):
        found = answers(rag(retriever("bm25"), stride=stride, every=4), length=length)
        assert [each.token_ids for each in found] == expected
        assert all(each.completion.finish_reason == "length" for each in found)


def test_an_end_of_text_in_a_step_that_is_thrown_away_does_not_end_the_answer():
    class Wrong(Through):
        def best_of(self, query, numbers):
            return (self.inner.search([query])[0][0] + 1) % self.size

    ends = list(rag(retriever("bm25"), "sequential").generate(QUESTIONS, max_tokens=60))
    assert any(each.completion.finish_reason == "stop" for each in ends)
    for stride in (2, 8):
        found = list(rag(Wrong(retriever("bm25")), stride=stride).generate(QUESTIONS, max_tokens=60))
        check_equal(found, ends)
        assert [each.completion.finish_reason for each in found] == [each.completion.finish_reason for each in ends]


# ---------------------------------------------------------------- failures


class Breaking(Through):
    """Fails at one of its searches."""

    def __init__(self, inner, at, seconds=None):
        super().__init__(inner)
        self.at, self.seconds = at, seconds

    def search(self, queries):
        found = super().search(queries)
        if self.searches == self.at:
            if self.seconds is None:
                raise OSError("the index is gone")
            time.sleep(self.seconds)
        return found


@pytest.mark.parametrize("method", ["sequential", "ralmspec"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(("seconds", "says"), [(None, "the index is gone"), (0.5, "longer than timeout=0.1")])
def test_a_failed_search_ends_its_own_request(method, at, seconds, says):
    system = rag(Breaking(retriever("bm25"), at, seconds), method, timeout=0.1, stride=2)
    found = answers(system)
    assert found[0].completion.finish_reason == "error"
    assert says in found[0].completion.error
    written = len(found[0].token_ids)
    assert found[0].token_ids == baseline("bm25")[0].token_ids[:written]  # only verified text is left
    assert (written == 0) == (at == 1)
    check_equal(found[1:], baseline("bm25")[1:])


@pytest.mark.parametrize("method", ["sequential", "ralmspec"])
@pytest.mark.parametrize("at", [1, 3])
def test_or_it_goes_on_without_searches_and_says_so(method, at):
    system = rag(Breaking(retriever("bm25"), at), method, on_failure="fallback", stride=1, asynchronous=False)
    found = answers(system)
    assert found[0].completion.error is None
    assert found[0].completion.promise == "approximate"
    assert "the index is gone" in found[0].counts.failed
    assert len(found[0].token_ids) == LENGTH
    kept = 2 * (at - 1)
    assert found[0].token_ids[:kept] == baseline("bm25")[0].token_ids[:kept]
    check_equal(found[1:], baseline("bm25")[1:])
    assert found[1].completion.promise == "same text"


def test_both_methods_fall_back_to_the_same_text():
    texts = [
        answers(rag(Breaking(retriever("bm25"), 3), method, on_failure="fallback", stride=1, asynchronous=False))[0]
        for method in ("sequential", "ralmspec")
    ]
    assert texts[0].token_ids == texts[1].token_ids


# ---------------------------------------------------------------- bad input


@cache
def short():
    """The target with a context of a hundred tokens."""
    return load("zoo:base", dtype="float32", device="cpu", max_length=100)


def test_a_question_too_long_for_the_context_ends_alone():
    system = Rag(short(), passages(), retriever="bm25", config=RagConfig())
    found = list(system.generate(["word " * 90, QUESTIONS[0]], max_tokens=4))
    assert found[0].completion.finish_reason == "error"
    assert "leave no tokens for a passage" in found[0].completion.error
    assert found[1].completion.error is None


def test_a_long_passage_is_cut_to_the_context():
    system = Rag(short(), [Passage("long", "river " * 500)], retriever="bm25", config=RagConfig(document_tokens=60000))
    (answer,) = system.generate([QUESTIONS[0]], max_tokens=8, ignore_eos=True)
    assert answer.completion.error is None
    assert answer.counts.rows == 100 - 1  # the last token is not read


@pytest.mark.parametrize("name", [*NAMES, "knn"])
def test_no_passages_are_refused(name):
    with pytest.raises(InputError, match="index is empty"):
        Rag(target(), [], retriever=name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every=0"),
        ({"stride": "fast"}, "stride='fast'"),
        ({"stride": 99}, "stride=99"),
        ({"prefetch": WIDTH + 1}, "prefetch=25"),
        ({"timeout": -1}, "timeout=-1"),
        ({"on_failure": "ignore"}, "on_failure='ignore'"),
        ({"asynchronous": 1}, "asynchronous=1"),
        ({"weight": 2}, "weight=2"),
        ({"temperature": 0}, "temperature=0"),
        ({"locality": -1}, "locality=-1"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        RagConfig(**options)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'hnsw'"):
        Rag(target(), passages(), retriever="hsnw")
    with pytest.raises(ConfigError, match="did you mean 'ralmspec'"):
        Rag(target(), passages(), retriever="bm25", method="ralmspc")
    with pytest.raises(ConfigError, match="max_tokens=0"):
        list(rag(retriever("bm25")).generate(QUESTIONS, max_tokens=0))
