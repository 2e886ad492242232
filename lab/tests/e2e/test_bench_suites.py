"""Named suites of ``foretoken bench`` from the command line, as short as they can be."""

from __future__ import annotations

import json

import pytest

from foretoken import zoo
from foretoken.bench.suite import find_suite
from foretoken.cli.main import main

SHORT = "--limit 1 --repeats 1 --max-tokens 8 --threads 1 --device cpu --json"


@pytest.mark.parametrize(
    ("name", "studies"),
    [("exits", ()), ("state_space", ()), pytest.param("entropy_adaptive", ("turns",), marks=pytest.mark.slow)],
)
def test_a_suite_measures_its_recipes_and_its_study(name, studies, capsys):
    model = find_suite(name).model
    if zoo.find(model).folder is None:
        pytest.skip(f"{model} has to be made first")
    assert main(["bench", "--suite", name, *SHORT.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["results"]) == len(find_suite(name).methods) + 1
    assert all(result["failures"] == 0 and result["num_tokens"] > 0 for result in record["results"])
    assert tuple(record.get("studies", ())) == studies
    assert all(record["studies"][study] for study in studies)


def test_a_suites_draft_model_is_left_out_where_no_method_takes_it(capsys):
    """It is the suite's own: only one that was asked for is refused."""
    assert main(["bench", "--suite", "state_space", "--methods", "ngram", *SHORT.split()]) == 0
    assert [result["method"] for result in json.loads(capsys.readouterr().out)["results"]] == ["none", "ngram"]
    named = ["--suite", "state_space", "--methods", "ngram", "--draft-model", "zoo:draft"]
    assert main(["bench", *named, *SHORT.split()]) == 2
    assert "--draft-model does not apply to any of --methods" in capsys.readouterr().err
