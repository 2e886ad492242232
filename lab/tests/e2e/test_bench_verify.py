"""``foretoken bench verify`` as a person runs it."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main


@pytest.fixture
def run(capsys):
    """Run the command with the given options; returns its standard output and error."""

    def run(*options, code=0):
        found = main(["bench", "verify", "--threads", "1", "--repeats", "2", *map(str, options)])
        written = capsys.readouterr()
        assert found == code, written.err
        assert "Traceback" not in written.err
        return written

    return run


def test_one_object_a_plan_context_and_number_of_rows(tmp_path, run):
    out = tmp_path / "out.json"
    plans = "dense,sparse,sparse+verification.budget=1.0"
    sets = [
        "--set",
        "verification.block=16",
        "--set",
        "verification.score=mean",
    ]  # of so few rows exact scores save nothing
    done = run("--context", "200,80", "--rows", "1,4", "--plans", plans, *sets, "--out", out)
    assert "speed-up" in done.out
    record = json.loads(out.read_text())
    assert record["provenance"]["fill"] == "text"
    found = {(each["context"], each["rows"], each["plan"]): each for each in record["results"]}
    assert len(found) == len(record["results"]) == 12
    for (context, rows, plan), each in found.items():
        assert 0 < each["attention_seconds"] < each["seconds_upper"]
        assert each["seconds_lower"] <= each["seconds"] <= each["seconds_upper"]
        dense = found[context, rows, "dense"]
        if plan == "sparse":
            assert each["read"] < 0.7
            assert each["flops"] < dense["flops"]
            assert each["bytes"] < dense["bytes"]
        else:
            assert (each["read"], each["flops"], each["bytes"]) == (1.0, dense["flops"], dense["bytes"])


def test_what_only_the_model_knows_is_refused_in_one_line(run):
    done = run("--model", "shape:16m", "--fill", "random", "--set", "verification.dense_below=4096", code=2)
    assert "the context of 'shape:16m' holds 4096" in done.err
    assert len(done.err.splitlines()) == 1


def test_prefix_tree_next_to_dense_and_under_sparse(tmp_path, run):
    out = tmp_path / "out.json"
    plans = "dense,prefix_tree,prefix_tree+verification.block=16"
    run("--context", "200", "--rows", "4", "--plans", plans, "--set", "verification.score=mean", "--out", out)
    dense, prefix_tree, sparse = json.loads(out.read_text())["results"]
    assert (prefix_tree["read"], prefix_tree["bytes"]) == (1.0, dense["bytes"])
    assert prefix_tree["settings"] == {"plan": "prefix_tree"}
    assert sparse["settings"]["plan"] == "prefix_tree"
    assert sparse["read"] < 0.7
    done = run("--plans", "dense,prefix_tre", code=2)
    assert "did you mean 'prefix_tree'" in done.err
