"""Kneser-Ney by hand, rows that sum to one, and files that are no trigram models."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from foretoken.core.errors import ModelError
from foretoken.methods.diffuspec.trigram import FILE, Trigram

V = 12
TEXTS = [[random.Random(seed).choice([0, 1, 2, 3, 5, 8]) for _ in range(60)] for seed in range(4)]


def by_hand(texts: list[list[int]], u: int, v: int, w: int) -> float:
    """The definition, counted anew for every question."""
    triples = [tuple(text[i : i + 3]) for text in texts for i in range(len(text) - 2)]
    kinds = sorted(set(triples))
    pairs = sorted({kind[1:] for kind in kinds})

    def discount(counts: list[int]) -> float:
        once, twice = counts.count(1), counts.count(2)
        return once / (once + 2 * twice) if once else 0.5

    def share(own: int, total: int, fans: int, d: float, below: float) -> float:
        return below if not total else max(own - d, 0) / total + d * fans / total * below

    d3 = discount([triples.count(kind) for kind in kinds])
    d2 = discount([sum(kind[1:] == pair for kind in kinds) for pair in pairs])
    tokens = sorted({pair[1] for pair in pairs})
    widths = {token: sum(pair[1] == token for pair in pairs) for token in tokens}
    d1 = discount(list(widths.values()))
    single = share(widths.get(w, 0), len(pairs), len(tokens), d1, 1 / V)
    double = share(
        sum(kind[1:] == (v, w) for kind in kinds),
        sum(kind[1] == v for kind in kinds),
        len({kind[2] for kind in kinds if kind[1] == v}),
        d2,
        single,
    )
    return share(
        triples.count((u, v, w)),
        sum(kind[:2] == (u, v) for kind in triples),
        len({kind[2] for kind in kinds if kind[:2] == (u, v)}),
        d3,
        double,
    )


def test_it_is_kneser_ney() -> None:
    model = Trigram.fit(TEXTS, V)
    for u, v in ((0, 1), (5, 8), (3, 3), (7, 2), (7, 7), (0, 9)):
        row = model.row(u, v)
        for w in range(V):
            assert float(row[w]) == pytest.approx(by_hand(TEXTS, u, v, w), rel=1e-5)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_every_row_sums_to_one_also_after_unseen_tokens(least: int) -> None:
    model = Trigram.fit(TEXTS, V, least=least)
    for u in range(V):
        for v in range(V):
            row = model.row(u, v)
            assert float(row.sum()) == pytest.approx(1.0, abs=1e-5)
            assert float(row.min()) > 0
            assert model.logs(u, v, range(V)) == pytest.approx([math.log(float(p)) for p in row], abs=1e-4)


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = Trigram.fit(TEXTS, V, least=2)
    model.save(tmp_path)
    again = Trigram.load(tmp_path / FILE, V)
    assert again.row(0, 1).equal(model.row(0, 1))
    assert again.logs(5, 8, [2, 3]) == model.logs(5, 8, [2, 3])


def test_texts_do_not_run_into_each_other() -> None:
    met = [[1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6]]
    apart, joined = Trigram.fit(met * 2, V), Trigram.fit([[*met[0], *met[1]] * 2], V)
    assert float(apart.row(2, 3)[4]) < float(joined.row(2, 3)[4])


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no trigram model"):
        Trigram.load(tmp_path / FILE, V)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        Trigram.load(tmp_path / FILE, V)
    Trigram.fit(TEXTS, V).save(tmp_path)
    with pytest.raises(ModelError, match="over 12 tokens, the target has 13"):
        Trigram.load(tmp_path / FILE, V + 1)


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="three tokens"):
        Trigram.fit([[1, 2]], V)
