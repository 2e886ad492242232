"""RestDrafter's trees, budgets and rates over small datastores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.core.draft import NO_DRAFT, PointMass
from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import Manifest
from foretoken.methods.rest.drafter import RestDrafter
from foretoken.models.fingerprint import vocabulary_fingerprint

WORDS = {word: index for index, word in enumerate(["the", "cat", "sat", "on", "a", "mat", ".", "ran", "dog", "and"])}


class Tokenizer:
    def get_vocab(self):
        return WORDS


TARGET = SimpleNamespace(tokenizer=Tokenizer(), name="words")


def ids(text):
    return [WORDS[word] for word in text.split()]


@pytest.fixture
def made(tmp_path):
    """A drafter over these texts."""

    def make(*texts, **options):
        out = tmp_path / "store"
        build([ids(text) for text in texts], out, Manifest(len(WORDS), vocabulary_fingerprint(Tokenizer()), "words"))
        return RestDrafter(RestDrafter.Config(datastore=out, min_score=0.0, **options), TARGET)

    return make


def draft_of(drafter, text, request_id=0, nodes=8, depth=8, stop_rule=None, history_only=False):
    context = SimpleNamespace(tokens=ids(text), request_id=request_id, num_prompt=0)
    [draft] = drafter.propose([context], [Budget(nodes, depth, stop_rule, history_only=history_only)])
    return draft


def paths(draft):
    words = list(WORDS)
    tree = draft.tree
    return {" ".join(words[tree.tokens[each]] for each in tree.path_to(node)) for node in range(len(tree))}


def test_the_tree_holds_what_followed(made):
    draft = draft_of(made("the cat sat on a mat", "the cat sat .", "the cat ran"), "and the cat")
    assert isinstance(draft.law, PointMass)
    assert paths(draft) >= {"sat", "sat on", "sat .", "ran"}
    assert list(WORDS)[draft.tree.tokens[0]] == "sat"  # two places of three
    assert draft.confidence[0] > draft.confidence[list(draft.tree.tokens).index(WORDS["ran"])]


def test_the_longest_context_wins(made):
    draft = draft_of(made("dog sat on the mat", "cat sat on a mat"), "the cat sat on")
    assert paths(draft) == {"a", "a mat"}


def test_no_continuation_leaves_its_document(made):
    draft = draft_of(made("the cat sat", "ran ran ran"), "the cat")
    assert paths(draft) == {"sat"}


def test_a_chain_takes_the_most_frequent(made):
    drafter = made("the cat sat on", "the cat sat .", "the cat sat .", "the cat ran", tree=False)
    assert not drafter.branches
    assert paths(draft_of(drafter, "the cat")) == {"sat", "sat ."}


@pytest.mark.parametrize(("nodes", "depth"), [(0, 8), (8, 0), (1, 8), (8, 1), (3, 2)])
def test_budgets_are_kept(made, nodes, depth):
    draft = draft_of(made("the cat sat on a mat", "the cat ran and sat"), "the cat", nodes=nodes, depth=depth)
    assert len(draft) <= nodes
    assert all(len(draft.tree.path_to(node)) <= depth for node in range(len(draft)))
    assert (len(draft) == 0) == (nodes == 0 or depth == 0)


def test_too_short_matches_draft_nothing(made):
    drafter = made("the cat sat", min_match=3)
    assert draft_of(drafter, "a mat the cat") is NO_DRAFT


def test_rates_follow_the_hits(made):
    drafter = made("the cat sat on a mat")
    before = draft_of(drafter, "the cat").confidence
    for request_id in range(40):
        draft_of(drafter, "the cat", request_id)
        draft_of(drafter, "the cat ran", request_id)  # never the datastore's tokens
        drafter.release(request_id)
    after = draft_of(drafter, "the cat", 99).confidence
    assert after[0] < before[0] / 2


def test_tokens_that_were_not_drafted_teach_as_well(made):
    class Never:
        def worthwhile(self, reach, confidence, num_nodes):
            return False

    drafter = made("the cat sat on a mat")
    for request_id in range(40):
        assert draft_of(drafter, "the cat", request_id, stop_rule=Never()) is NO_DRAFT
        draft_of(drafter, "the cat sat", request_id, stop_rule=Never())
    assert draft_of(drafter, "the cat", 99).confidence[0] > 0.9


def test_a_seeded_request_learns_from_itself_alone(made):
    drafter = made("the cat sat on a mat")
    expected = draft_of(drafter, "the cat", 0, history_only=True).confidence
    for request_id in range(1, 40):
        draft_of(drafter, "the cat", request_id)
        draft_of(drafter, "the cat ran", request_id)
    assert draft_of(drafter, "the cat", 99, history_only=True).confidence == expected


def test_a_released_request_is_forgotten(made):
    drafter = made("the cat sat on a mat")
    draft_of(drafter, "the cat", 7)
    drafter.release(7)
    drafter.release(8)  # that never proposed
    assert not drafter._lookups


def test_places_that_come_back_are_not_confused(made):
    """An outcome without the node does not count for it, whatever its number would have been."""
    drafter = made("the cat sat on a mat", "the cat ran and sat")
    draft_of(drafter, "the cat", nodes=1)
    rates = [list(each.rates) for each in drafter._rates]
    draft_of(drafter, "the cat ran and", nodes=1)  # "ran" was counted after the root, but not drafted
    changed = sum(a != b for before, now in zip(rates, drafter._rates, strict=True)
                  for a, b in zip(before, now.rates, strict=True))  # fmt: skip
    assert changed == 1
    assert ROOT == -1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datastore": None}, "datastore=None"),
        ({"datastore": ""}, "datastore=''"),
        ({"datastore": 3}, "datastore=3"),
        ({"datastore": "x", "hits": 0}, "hits=0"),
        ({"datastore": "x", "min_match": 9, "max_match": 3}, "min_match=9"),
        ({"datastore": "x", "min_score": 1.0}, "min_score=1.0"),
        ({"datastore": "x", "tree": 1}, "tree=1"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        RestDrafter.Config(**options)


def test_invalid_and_foreign_datastores_are_refused(made, tmp_path):
    with pytest.raises(InputError, match="not a datastore"):
        RestDrafter(RestDrafter.Config(datastore=tmp_path), TARGET)
    made("the cat")

    class Other:
        def get_vocab(self):
            return {**WORDS, "bird": len(WORDS)}

    config = RestDrafter.Config(datastore=tmp_path / "store")
    with pytest.raises(MismatchError, match="holds tokens of 'words'"):
        RestDrafter(config, SimpleNamespace(tokenizer=Other(), name="birds"))
