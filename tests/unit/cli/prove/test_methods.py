"""How methods and their options are spelled on the command line."""

from __future__ import annotations

import pytest

from foretoken.cli.prove.methods import parse_methods
from foretoken.core.errors import ConfigError


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
