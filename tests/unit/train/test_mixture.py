"""Mixtures: shares, order, resuming, held-out documents, and what a killed run leaves."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from foretoken.core.errors import ConfigError, InputError
from foretoken.train import mixture as module
from foretoken.train.mixture import Mixture, Source, TokenStream, is_held_out

BLOCK = 16


def encode(documents):
    """One token a character."""
    return [[ord(character) for character in document] for document in documents]


def source(name, share=1.0, letter=None, documents=400, length=20):
    """Documents that differ, all of them words of one letter."""
    letter = letter or name

    def read():
        return (f"{letter}{number:04d}".ljust(length, letter) for number in range(documents))

    return Source(name, share, read)


@pytest.fixture
def make(tmp_path):
    def build(*sources, seed=0, block=BLOCK, vocabulary=256, folder="tokens"):
        return Mixture(sources, encode, tmp_path / folder, block, vocabulary, seed)

    return build


@pytest.fixture
def small_steps(monkeypatch):
    """Tokenise a hundred characters at a time, so that files grow often."""
    monkeypatch.setattr(module, "GROW_CHARACTERS", 100)
    monkeypatch.setattr(module, "GROW_HELD_OUT", 20)
    monkeypatch.setattr(module, "GROW_WRITTEN", 40)


def text(blocks):
    return ["".join(map(chr, row)) for row in blocks.tolist()]


def test_shares_are_respected(make):
    shares = {"a": 5.0, "b": 3.0, "c": 2.0}
    mixture = make(*(source(name, share) for name, share in shares.items()))
    count = 4000
    found = Counter(Counter(row).most_common(1)[0][0] for row in text(mixture.next(count)))
    # a letter's own blocks hold more of it than of digits; chi-square with 2 degrees of freedom, p = 0.001
    statistic = sum((found[n] - count * share / 10) ** 2 / (count * share / 10) for n, share in shares.items())
    assert sum(found.values()) == count
    assert statistic < 13.8
    swapped = {"a": 5.0, "b": 2.0, "c": 3.0}
    assert sum((found[n] - count * share / 10) ** 2 / (count * share / 10) for n, share in swapped.items()) > 13.8


def test_the_same_seed_gives_the_same_blocks_and_another_seed_others(make):
    sources = [source("a"), source("b", 2.0)]
    first = make(*sources, folder="1").next(50)
    assert torch.equal(first, make(*sources, folder="2").next(50))
    assert not torch.equal(first, make(*sources, seed=1, folder="3").next(50))
    assert first.dtype == torch.int64
    assert first.shape == (50, BLOCK)


@pytest.mark.usefixtures("small_steps")
def test_a_resumed_run_reads_what_an_uninterrupted_one_would_have_read(make):
    sources = [source("a"), source("b", 2.0)]
    whole = make(*sources, folder="whole").next(60)
    first = make(*sources, folder="cut")
    assert torch.equal(first.next(17), whole[:17])
    state = json.loads(json.dumps(first.state()))
    first.next(20)  # read, but no checkpoint was written: read again
    second = make(*sources, folder="cut")
    second.resume(state)
    assert torch.equal(second.next(43), whole[17:])


@pytest.mark.usefixtures("small_steps")
def test_a_source_is_read_as_far_as_requested(make):
    read = []

    def documents():
        for number in itertools.count():
            read.append(number)
            yield f"{number:020d}"

    mixture = make(Source("a", 1.0, documents), Source("b", 1e-9, documents))
    mixture.next(10)
    assert len(read) < 20
    assert (mixture.report()[0]["passes"], mixture.report()[1]["tokens"]) == (None, 0)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("torn", ["tokens beyond the index", "no index", "tokens lost"])
def test_token_files_of_a_killed_run_are_repaired(make, tmp_path, torn):
    expected = make(source("a"), folder="whole").next(40)
    make(source("a")).next(20)
    tokens, index = tmp_path / "tokens" / "a.tokens", tmp_path / "tokens" / "a.json"
    if torn == "tokens beyond the index":
        with tokens.open("ab") as file:
            file.write(b"\x07" * 33)  # written after the index was: an odd number of bytes
    elif torn == "no index":
        index.unlink()
    else:  # the power went before the tokens were on the disk
        with tokens.open("rb+") as file:
            file.truncate(50)
    assert torch.equal(make(source("a")).next(40), expected)


def test_a_small_source_begins_again_with_the_same_blocks(make):
    mixture = make(source("a", documents=3))
    rows = "".join(text(mixture.next(12)))
    once = "".join(document for document in source("a", documents=3).documents() if not is_held_out(document))
    whole = once[: len(once) // BLOCK * BLOCK]
    assert 0 < len(whole) < len(once)
    assert rows == (whole * 20)[: len(rows)]
    assert mixture.report()[0]["passes"] == round(12 * BLOCK / len(once), 2)


def test_a_source_shorter_than_a_block_fills_it(make):
    short = Source("a", 1.0, lambda: iter(["ab"]))
    assert not is_held_out("ab")
    assert text(make(short).next(2)) == ["ab" * 8] * 2


@pytest.mark.usefixtures("small_steps")
def test_held_out_documents_are_never_trained_on(make):
    words = ["".join(random.Random(n).choices("abcdefgh", k=BLOCK)) for n in range(3000)]
    kept = {word for word in words if is_held_out(word)}
    assert 10 < len(kept) < 60
    mixture = make(Source("a", 1.0, lambda: iter(words)))
    held_out = text(mixture.held_out(8))
    trained = text(mixture.next(4000))
    assert set(held_out) <= kept
    assert not set(trained) & kept
    assert set(trained) == set(words) - kept  # the others are all trained on
    assert len(set(held_out)) == len(held_out) == 8
    assert text(mixture.held_out(8)) == held_out


def test_held_out_blocks_come_in_the_shares_of_the_sources(make):
    mixture = make(source("a", 3.0, documents=20_000), source("b", 1.0, documents=20_000))
    found = Counter("a" if "a" in row else "b" for row in text(mixture.held_out(16)))
    assert found == {"a": 12, "b": 4}


def test_a_source_with_nothing_held_out_is_left_out_and_a_broken_one_is_not_hidden(make):
    assert not is_held_out("one")
    small = Source("small", 1.0, lambda: iter(["one"]))
    assert make(small).held_out(4).shape == (0, BLOCK)
    assert {row[0] for row in text(make(small, source("b", documents=20_000), folder="2").held_out(4))} == {"b"}

    def broken():
        yield from ["one"] * 10
        raise InputError("x.jsonl:11: not valid JSON")

    with pytest.raises(InputError, match=r"x\.jsonl:11"):
        make(Source("broken", 1.0, broken), folder="3").held_out(4)


@pytest.mark.usefixtures("small_steps")
def test_the_held_out_blocks_of_costly_text_are_of_what_exists(make):
    """Text that a model writes while it is read: nothing is written for the held-out loss."""
    made = []

    def documents():
        for number in itertools.count():
            made.append(f"a{number:04d}".ljust(20, "a"))
            yield made[-1]

    costly = Source("a", 1.0, documents, kept=lambda: iter(list(made)))
    mixture = make(costly)
    assert len(mixture.held_out(4)) == 0
    assert not made
    mixture = make(costly, folder="2")
    mixture.next(400)
    count = len(made)
    assert count < 400 * BLOCK / 20 + module.GROW_WRITTEN / 20 + 20  # not far ahead of its use
    found = "".join(text(mixture.held_out(4)))
    assert "".join(document for document in made if is_held_out(document)).startswith(found)
    assert found
    assert len(made) == count


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_an_empty_corpus_is_refused(make, documents):
    with pytest.raises(InputError, match="corpus 'mine' is empty: it holds no document to train on"):
        make(Source("mine", 1.0, lambda: iter(documents))).next(1)


def test_two_sources_of_one_name_are_refused(make):
    """They would write into the same token file."""
    with pytest.raises(ConfigError, match="two sources are called 'a'"):
        make(source("a"), source("b"), source("a"))


@pytest.mark.parametrize(("vocabulary", "size"), [(65_536, 2), (65_537, 4)])
def test_a_large_vocabulary_has_wider_tokens(tmp_path, vocabulary, size):
    high = vocabulary - 1

    def highest(documents):
        return [[high] * len(document) for document in documents]

    mixture = Mixture([source("a", documents=5)], highest, tmp_path, BLOCK, vocabulary, 0)
    assert mixture.next(2).unique().tolist() == [high]
    assert (tmp_path / "a.tokens").stat().st_size == mixture._streams[0].length * size


def test_a_token_that_does_not_fit_is_an_error(tmp_path):
    """The negative control of the test above: it would not be cut to sixteen bits silently."""
    stream = TokenStream(source("a"), lambda texts: [[1 << 16] for _ in texts], tmp_path, np.uint16)
    with pytest.raises(OverflowError):
        stream.read(0, 1)


def test_no_more_than_the_limit_of_a_source_is_kept(make, monkeypatch):
    monkeypatch.setattr(module, "TOKEN_FILE_LIMIT", 300)
    monkeypatch.setattr(module, "GROW_CHARACTERS", 100)
    endless = Source("a", 1.0, lambda: (f"{number:020d}" for number in itertools.count()))
    mixture = make(endless)
    mixture.next(100)
    assert 300 <= mixture.report()[0]["tokens"] / mixture.report()[0]["passes"] < 450


def test_a_large_source_is_never_whole_in_memory(tmp_path, monkeypatch):
    """30 MB of text in 300 documents; a Python list of its tokens alone would take 240 MB."""
    line = "0123456789" * 10_000

    def quick(documents):
        return [[7] * len(document) for document in documents]

    large = Source("a", 1.0, lambda: (f"{number}{line}" for number in range(300)))
    mixture = Mixture([large], quick, tmp_path, 1 << 16, 1 << 20, 0)
    tracemalloc.start()
    for _ in range(450):
        mixture.next(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.tokens").stat().st_size > 100e6
    assert peak < 40e6


def test_the_record_names_every_file_with_its_hash(make, tmp_path):
    (tmp_path / "x.txt").write_bytes(b"Once")
    files = (tmp_path / "x.txt",)
    mixture = make(Source("x", 2.0, lambda: iter(["Once"] * 9), files), source("b", 6.0))
    [first, second] = mixture.report()
    known = "d88f6d8372f4d54ecfa210948ad8f8fccf83984881e298b673c8f1a941e2aa33"  # of sha256sum
    assert first["files"] == [{"name": "x.txt", "sha256": known}]
    assert (first["share"], second["share"], second["files"]) == (0.25, 0.75, [])
