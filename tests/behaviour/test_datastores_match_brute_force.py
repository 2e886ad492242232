"""Datastores against brute force, and their state after interruptions or damage of files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError, ForetokenError, InputError, MismatchError
from foretoken.drafting.datastore.build import append, build, suffixes_of
from foretoken.drafting.datastore.layout import MANIFEST, Manifest, damaged_files, read_manifest
from foretoken.drafting.datastore.search import Datastore

SMALL = Manifest(vocab_size=5, vocabulary="mine", model="tiny")
WIDE = Manifest(vocab_size=70_000, vocabulary="mine", model="wide")

documents = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=8)


def longest_match(corpus, context, longest):
    """The longest end of the context that occurs, and the token after each place, by looking everywhere."""
    for n in range(min(longest, len(context)), 0, -1):
        end = context[-n:]
        found = [
            tuple(document[at + n :])
            for document in corpus
            for at in range(len(document) - n + 1)
            if document[at : at + n] == end
        ]
        if found:
            return n, sorted(found)
    return 0, []


def looked_up(store, context, longest, depth=100, most=10_000):
    match = store.find(context, 1, longest)
    if match is None:
        return 0, []
    found = store.continuations(match, depth, most)
    assert match.count == len(found) or len(found) == most
    return match.length, sorted(map(tuple, found))


@settings(max_examples=60, deadline=None)
@given(documents, st.lists(st.integers(0, 4), min_size=1, max_size=10), st.integers(1, 8), st.integers(4, 40))
def test_matches_equal_brute_force(tmp_path_factory, corpus, context, longest, segment_tokens):
    """In one segment or in many: documents are cut where a segment is full, so only whole ones are compared."""
    segment_tokens = max(segment_tokens, 2 + max(map(len, corpus)))
    out = tmp_path_factory.mktemp("store") / "store"
    build(corpus, out, SMALL, segment_tokens=segment_tokens)
    assert looked_up(Datastore(out), context, longest) == longest_match(corpus, context, longest)


@settings(max_examples=15, deadline=None)
@given(documents, documents, documents, st.lists(st.integers(0, 4), min_size=1, max_size=6))
@example([[0]] * 7, [[0]] * 3, [[0]], [0])  # 15, 7 and 3 tokens with their separators: all stay
def test_appending_is_building_of_all(tmp_path_factory, first, second, third, context):
    out = tmp_path_factory.mktemp("store") / "store"
    build(first, out, SMALL)
    for more in (second, third):
        append(more, out)
    corpus = [*first, *second, *third]
    assert looked_up(Datastore(out), context, 8) == longest_match(corpus, context, 8)
    manifest = read_manifest(out)
    assert manifest.documents == len(corpus)
    sizes = [segment.tokens for segment in manifest.segments]  # neighbours of like size are sorted together
    assert all(older > 2 * newer for older, newer in itertools.pairwise(sizes)), sizes
    assert not damaged_files(out, manifest)


def test_ids_beyond_two_bytes_keep_their_order(tmp_path):
    corpus = [[66_000, 1, 65_537, 2], [1, 65_537, 69_999], [66_000, 1, 65_537, 300]]
    build(corpus, tmp_path / "store", WIDE)
    store = Datastore(tmp_path / "store")
    assert looked_up(store, [1, 65_537], 4) == longest_match(corpus, [1, 65_537], 4)
    assert looked_up(store, [66_000, 1, 65_537], 4) == (3, [(2,), (300,)])


def test_all_equal_tokens(tmp_path):
    corpus = [[3] * 300]
    build(corpus, tmp_path / "store", SMALL)
    length, found = looked_up(Datastore(tmp_path / "store"), [3] * 20, 16)
    assert length == 16
    assert len(found) == 300 - 16 + 1


def test_many_places_are_read_evenly_so_high_ids_are_seen(tmp_path):
    corpus = [[0, follower] for follower in (1, 2, 3, 4) for _ in range(50)]
    build(corpus, tmp_path / "store", SMALL, segment_tokens=120)  # several segments
    store = Datastore(tmp_path / "store")
    assert len(store.manifest.segments) > 1
    match = store.find([0], 1, 4)
    assert match.count == 200
    found = store.continuations(match, 5, 20)
    assert len(found) == 20
    assert {tuple(each) for each in found} == {(1,), (2,), (3,), (4,)}


def test_an_id_that_the_vocabulary_lacks_ends_the_context(tmp_path):
    build([[0, 1, 2, 3]], tmp_path / "store", SMALL)
    store = Datastore(tmp_path / "store")
    assert looked_up(store, [0, 77, 1, 2], 8) == (2, [(3,)])
    assert looked_up(store, [1, 77], 8) == (0, [])
    assert looked_up(store, [5, 1, 2], 8) == (2, [(3,)])  # the separator's id is none of the vocabulary


def test_contexts_below_the_shortest_are_not_found(tmp_path):
    build([[0, 1, 2, 3]], tmp_path / "store", SMALL)
    store = Datastore(tmp_path / "store")
    assert store.find([4, 1], 2, 8) is None
    assert store.find([4, 1], 1, 8).length == 1
    assert store.find([], 1, 8) is None


@pytest.mark.parametrize("token_bytes", [2, 4])
def test_suffixes_are_in_order(token_bytes):
    tokens = np.random.default_rng(0).integers(0, 300, 200).astype(f">u{token_bytes}")
    order = suffixes_of(tokens).tolist()
    assert order == sorted(range(200), key=lambda at: tokens[at:].tolist())


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("corpus", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path, corpus):
    with pytest.raises(InputError, match="corpus is empty"):
        build(corpus, tmp_path / "store", SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", [5, -1])
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path, token):
    with pytest.raises(InputError, match="vocabulary has 5 entries"):
        build([[1, 2], [token]], tmp_path / "store", SMALL)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path):
    build([[1, 2]], tmp_path / "store", SMALL)
    with pytest.raises(ConfigError, match="extend it with append"):
        build([[3, 4]], tmp_path / "store", SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="something else is there"):
        build([[3, 4]], tmp_path / "mine", SMALL)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def failing(corpus):
    yield from corpus
    raise OSError(28, "No space left on device")


def test_a_build_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ForetokenError, match="No space left"):
        build(failing([[1, 2]]), tmp_path / "store", SMALL)
    assert not list(tmp_path.iterdir())


def test_an_append_that_fails_leaves_the_store_as_it_was(tmp_path):
    out = tmp_path / "store"
    build([[1, 2, 3]], out, SMALL)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ForetokenError, match="No space left"):
        append(failing([[4, 4]] * 40), out, segment_tokens=30)
    with pytest.raises(InputError, match="vocabulary has 5"):
        append([[9]], out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


KILLED = """
import os, sys
from pathlib import Path
from foretoken.drafting.datastore import build
from foretoken.drafting.datastore.layout import Manifest

def documents():
    for number in range(1000):
        if number == 60:
            os.kill(os.getpid(), 9)
        yield [number % 5] * 7

out = Path(sys.argv[1])
if sys.argv[2] == "append":
    build.append(documents(), out, segment_tokens=100)
else:
    build.build(documents(), out, Manifest(5, "mine", "tiny"), segment_tokens=100)
"""


def listed_files(out):
    return {path for each in read_manifest(out).segments for path in each.paths(out)}


@pytest.mark.parametrize("what", ["build", "append"])
def test_a_kill_in_the_middle_changes_nothing(tmp_path, what):
    out = tmp_path / "store"
    if what == "append":
        build([[1, 2, 3]], out, SMALL)
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), what], capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    if what == "build":
        with pytest.raises(InputError, match="not a datastore"):
            Datastore(out)
        build([[1, 2, 3]], out, SMALL)  # nothing is in the way
    else:
        assert set(out.glob("segment-*")) > listed_files(out)  # it had written some of its own
    assert looked_up(Datastore(out), [1, 2], 4) == (2, [(3,)])
    append([[4, 2, 1]], out)
    assert set(out.glob("segment-*")) == listed_files(out)  # what the killed one left is gone
    assert looked_up(Datastore(out), [4, 2], 4) == (2, [(1,)])


def test_a_reader_is_not_disturbed_by_an_append(tmp_path):
    out = tmp_path / "store"
    build([[1, 2, 3]], out, SMALL)
    reader = Datastore(out)
    append([[1, 2, 4]], out)  # sorts both together and removes the old segment
    assert looked_up(reader, [1, 2], 4) == (2, [(3,)])
    assert looked_up(Datastore(out), [1, 2], 4) == (2, [(3,), (4,)])


def test_two_appends_do_not_mix(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "store"
    build([[1, 2, 3]], out, SMALL)
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(ForetokenError, match="another append"):
            append([[4]], out)
    finally:
        os.close(other)


def test_another_vocabulary_is_refused(tmp_path):
    build([[1, 2]], tmp_path / "store", SMALL)
    store = Datastore(tmp_path / "store")
    store.check("mine", "other-name")
    with pytest.raises(MismatchError, match="tokens of 'tiny'"):
        store.check("theirs", "gpt")


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda out: cut(out / "segment-000001.tokens"), "instead of"),
        (lambda out: cut(out / "segment-000001.suffixes"), "instead of"),
        (lambda out: (out / "segment-000001.tokens").unlink(), "is missing"),
        (lambda out: (out / MANIFEST).write_text("{"), "damaged"),
        (lambda out: (out / MANIFEST).write_text("[]"), "damaged"),
        (lambda out: (out / MANIFEST).unlink(), "not a datastore"),
        (lambda out: (out / MANIFEST).write_text(json.dumps({"format": "x", "version": 1})), "another format"),
    ],
)
def test_a_torn_datastore_is_refused(tmp_path, spoil, says):
    out = tmp_path / "store"
    build([[1, 2, 3]], out, SMALL)
    spoil(out)
    with pytest.raises(InputError, match=says):
        Datastore(out)


def test_changed_content_is_found_by_its_checksum(tmp_path):
    out = tmp_path / "store"
    build([[1, 2, 3]], out, SMALL)
    path = out / "segment-000001.tokens"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert damaged_files(out, read_manifest(out)) == [path]
    assert looked_up(Datastore(out), [1, 2], 4)[1] in ([], [()])  # and whatever it says is no id beyond the vocabulary
