"""How methods and their options are spelled on the command line."""

from __future__ import annotations

import pytest

from foretoken import zoo
from foretoken.cli.prove.methods import check_draft_is_used, parse_methods
from foretoken.core.errors import ConfigError

HEAD = str(zoo.path("base") / "eagle")


def test_methods_with_options():
    methods = parse_methods(
        "none,ngram,draft_model+num_speculative_tokens=4+tree=topk",
        ["draft_model.num_drafts=2", "ngram.prompt_lookup_max=3"],
        target="zoo:base",
    )
    assert [method.label for method in methods] == ["none", "ngram", "draft_model+num_speculative_tokens=4+tree=topk"]
    assert methods[1].settings == {"prompt_lookup_max": 3}
    assert methods[2].settings == {"num_drafts": 2, "num_speculative_tokens": 4, "tree": "topk", "model": "zoo:draft"}


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("ngrm", [], "did you mean 'ngram'"),
        ("a,,b", [], "comma-separated"),
        ("ngram,ngram", [], "twice"),
        ("ngram+a=1+a=2", [], "'a' twice"),
        ("ngram", ["suffix.tree=false"], "not among"),
        ("ngram", ["prompt_lookup_max=3"], "METHOD.key=value"),
        ("ngram", ["ngram.a=1", "ngram.a=2"], "twice"),
        ("greedy", [], "is a verifier"),
    ],
)
def test_bad_methods(text, sets, message):
    with pytest.raises(ConfigError, match=message):
        parse_methods(text, sets, target="zoo:base")


def test_a_head_is_given_to_every_method_that_drafts_with_it():
    """The other methods keep their own draft model or network."""
    names = "draft_model,eagle,auto,suffix_first,kangaroo,ngram"
    methods = parse_methods(names, [], target="zoo:base", draft_model=HEAD)
    found = {method.label: method.config.get("model") for method in methods[1:]}
    assert found == {
        "draft_model": "zoo:draft", "eagle": HEAD, "auto": HEAD, "suffix_first": HEAD, "kangaroo": None, "ngram": None
    }  # fmt: skip
    check_draft_is_used(HEAD, methods)


def test_a_language_model_is_given_to_no_method_of_heads():
    methods = parse_methods("eagle,draft_model,auto", [], target="zoo:moe", draft_model="./small")
    assert [method.config.get("model") for method in methods] == [None, None, "./small", "./small"]


def test_a_draft_model_that_no_method_takes():
    methods = parse_methods("draft_model,ngram", [], target="zoo:base", draft_model=HEAD)
    with pytest.raises(ConfigError, match="leave it out, or add eagle"):
        check_draft_is_used(HEAD, methods)
