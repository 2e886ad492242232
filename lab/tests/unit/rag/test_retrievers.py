"""Results of retrievers do not depend on the number of requested ones, and cached passages have the same order."""

from __future__ import annotations

import random
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from foretoken.core.errors import ConfigError, InputError, MismatchError, ModelError
from foretoken_lab.rag.config import WIDTH
from foretoken_lab.rag.encoders import FolderEncoder, TargetEncoder
from foretoken_lab.rag.passages import Passage, read_passages
from foretoken_lab.rag.retrievers import Bm25Retriever, DenseRetriever, words
from foretoken_lab.rag.vectors import vectors_of
from helpers.knowledge import QUESTIONS, passages
from helpers.tiny_models import save_model
from helpers.zoo_llms import target

SIZE, WIDE = 300, 32


class Hashed:
    """An encoder without a model: random vectors, by the text."""

    name = "hashed"

    def encode(self, text):
        vector = np.random.default_rng(crc32(text.encode())).standard_normal(WIDE).astype(np.float32)
        return vector / np.linalg.norm(vector)


def vectors(seed=0):
    """Unit vectors, among them exact ties."""
    made = np.random.default_rng(seed).standard_normal((SIZE, WIDE)).astype(np.float32)
    made[40:60] = made[3]
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def dense(name, **options):
    return DenseRetriever(name, vectors(), Hashed(), **options)


def queries(count):
    rows = vectors(1)[:count]
    rows[0] = vectors()[3]  # the best passages are tied
    return list(rows)


@pytest.mark.parametrize("name", ["flat", "hnsw"])
def test_a_search_finds_the_same_alone_and_among_others(name):
    found = dense(name)
    alone = [found.search([query])[0] for query in queries(40)]
    for size in (8, 40):
        assert found.search(queries(size)) == alone[:size]
    assert all(len(each) == WIDTH for each in alone)
    assert alone[0][:3] == [3, 40, 41] if name == "flat" else alone[0][0] in (3, *range(40, 60))


@pytest.mark.parametrize("noise", [0.0, 6e-8])
def test_more_ties_than_results_are_ordered_alike_alone_and_among_others(noise):
    """Copies of one passage, and passages that differ by one rounding."""
    rng = np.random.default_rng(3)
    stored = vectors()
    tied = rng.permutation(SIZE)[:200]
    stored[tied] = stored[3] + noise * rng.choice([-1.0, 0.0, 1.0], (200, WIDE))
    found = DenseRetriever("flat", stored, Hashed())
    asked = list((stored[3] + 0.3 * rng.standard_normal((24, WIDE)) / WIDE**0.5).astype(np.float32))
    for query, together in zip(asked, found.search(asked), strict=True):
        scores = [float(np.dot(vector, query)) for vector in stored]
        assert together == sorted(range(SIZE), key=lambda number: (-scores[number], number))[:WIDTH]
        assert found.search([query]) == [together]


def test_flat_is_exact():
    stored = vectors()
    for query, found in zip(queries(20)[1:], dense("flat").search(queries(20))[1:], strict=True):
        scores = stored @ query
        np.testing.assert_allclose(scores[found], np.sort(scores)[::-1][:WIDTH], atol=1e-6)
        assert len(set(found)) == WIDTH


@pytest.mark.parametrize("make", [lambda: dense("flat"), lambda: dense("hnsw"), lambda: Bm25Retriever(passages(200))])
def test_the_best_of_some_is_the_first_of_all_where_that_is_among_them(make):
    found, rng = make(), random.Random(0)
    asked = (
        queries(12) if isinstance(found, DenseRetriever) else [found.query(" ".join(_words(rng))) for _ in range(12)]
    )
    for query, ranked in zip(asked, found.search(asked), strict=True):
        for first in (0, 3, 7):
            some = ranked[first:]
            rng.shuffle(some)
            assert found.best_of(query, some) == ranked[first]


def _words(rng):
    return [rng.choice(words(each.text)) for each in passages(rng.randint(1, 9), seed=rng.randint(0, 9))]


def test_bm25_scores_of_single_passages_are_those_of_the_search_to_the_bit():
    found, rng = Bm25Retriever(passages(200)), random.Random(1)
    for _ in range(10):
        query = found.query(" ".join(_words(rng)))
        scores = found._bm25.get_scores_from_ids(query)
        assert [np.float32(found.score(query, number)) for number in range(200)] == list(scores)
        ranked = sorted(range(200), key=lambda number: (-scores[number], number))
        assert found.search([query])[0] == ranked[:WIDTH]


def test_bm25_without_a_known_word_finds_the_first_passages():
    found = Bm25Retriever(passages())
    assert found.search([found.query("zzz qqq")]) == [list(range(WIDTH))]
    assert found.best_of([], [9, 4, 7]) == 4


def test_few_passages_are_all_found():
    found = Bm25Retriever(passages(3))
    assert sorted(found.search([found.query("river coal")])[0]) == [0, 1, 2]
    small = DenseRetriever("flat", vectors()[:3], Hashed())
    assert sorted(small.search(queries(1))[0]) == [0, 1, 2]


# ---------------------------------------------------------------- on disk


def test_vectors_and_graph_are_kept_and_read_again(tmp_path):
    calls = []

    class Counting(Hashed):
        def encode(self, text):
            calls.append(text)
            return super().encode(text)

    first = vectors_of(passages(30), Counting(), tmp_path / "index")
    again = vectors_of(passages(30), Counting(), tmp_path / "index")
    assert np.array_equal(first, again)
    assert len(calls) == 30
    graph = tmp_path / "index" / "hnsw.faiss"
    made = DenseRetriever("hnsw", first, Hashed(), graph)
    assert graph.is_file()
    query = Hashed().encode("x")
    assert DenseRetriever("hnsw", first, Hashed(), graph).search([query]) == made.search([query])
    with pytest.raises(InputError, match="a graph of 30 vectors, but there are 7"):
        DenseRetriever("hnsw", first[:7], Hashed(), graph)
    graph.write_bytes(graph.read_bytes()[:40])
    with pytest.raises(InputError, match="damaged"):
        DenseRetriever("hnsw", first, Hashed(), graph)


def test_an_index_of_something_else_or_a_torn_one_is_refused(tmp_path):
    folder = tmp_path / "index"
    vectors_of(passages(30), Hashed(), folder)
    with pytest.raises(MismatchError, match="passages differs"):
        vectors_of(passages(30, seed=5), Hashed(), folder)
    other = Hashed()
    other.name = "another"
    with pytest.raises(MismatchError, match="encoder differs"):
        vectors_of(passages(30), other, folder)
    stored = folder / "vectors.npy"
    stored.write_bytes(stored.read_bytes()[:50])
    with pytest.raises(InputError, match="damaged"):
        vectors_of(passages(30), Hashed(), folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        vectors_of(passages(30), Hashed(), folder)
    with pytest.raises(ConfigError, match="this is a file"):
        vectors_of(passages(30), Hashed(), stored)


def test_an_interrupted_write_of_vectors_is_repeated(tmp_path):
    class Tired(Hashed):
        def encode(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vectors_of(passages(3), Tired(), tmp_path / "index")
    assert len(vectors_of(passages(3), Hashed(), tmp_path / "index")) == 3


def test_passages_are_read_with_their_titles_and_each_text_once(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{"text": "x"}\n{"text": "x", "title": "T"}\n')
    assert read_passages(path) == [Passage("a", "x"), Passage("2", "T\nx")]
    for content, says in (("", "no passages"), ('{"text": " "}\n', "non-empty string"), ('{"t": 1}\n', "'text'")):
        path.write_text(content)
        with pytest.raises(InputError, match=says):
            read_passages(path)


# ---------------------------------------------------------------- encoders


def test_the_target_s_mean_states_are_unit_vectors_of_the_text_alone():
    encoder = TargetEncoder(target())
    first = encoder.encode(QUESTIONS[0])
    encoder.encode("something else, and longer than the first one")
    assert np.array_equal(encoder.encode(QUESTIONS[0]), first)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert encoder.encode("").shape == first.shape


def test_a_folder_encoder_is_the_mean_of_its_last_states(tmp_path):
    import torch
    from transformers import AutoModel

    folder = save_model("llama", tmp_path / "encoder")
    encoder = FolderEncoder(folder)
    text = encoder._tokenizer.decode([7, 9, 30])
    ids = encoder._tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(encoder.encode(text), expected / np.linalg.norm(expected), atol=1e-5)
    with pytest.raises(ModelError, match="cannot be loaded"):
        FolderEncoder(tmp_path / "nowhere")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"foretoken-lab\[retrieval\]"):
        dense("flat")
    with pytest.raises(ConfigError, match=r"foretoken-lab\[retrieval\]"):
        Bm25Retriever([SimpleNamespace(text="x")])
