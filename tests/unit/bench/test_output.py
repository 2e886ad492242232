"""Tables, report, files, provenance, and the spelling of methods on the command line."""

from __future__ import annotations

import io
import os
import re

import pytest
from rich.console import Console

from foretoken.bench.harness import Method, Records, Sample
from foretoken.bench.report import html_report
from foretoken.bench.summary import summarise
from foretoken.bench.table import tables
from foretoken.bench.workloads import Prompt
from foretoken.cli.settings import parse_methods, parse_settings, speculative_config
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable, write_whole
from foretoken.core.metrics import Metrics
from foretoken.core.provenance import git_commit, provenance


@pytest.fixture
def results():
    prompts = [Prompt("p<1>", "a", "maths"), Prompt("p2", "b", "chat")]
    samples = []
    for repeat in range(2):
        for prompt in prompts:
            for label, seconds in (("none", 1.0), ("slow", 1.25), ("fast", 0.5)):
                metrics = Metrics(
                    num_tokens=4,
                    num_steps=2,
                    num_draft_tokens=4,
                    num_accepted_tokens=2,
                    drafted_at=[2],
                    accepted_at=[1],
                )
                error = "NaN <logits>" if label == "slow" and prompt.id == "p2" else None
                samples.append(Sample(label, prompt, repeat, seconds, () if error else (1, 2), metrics, error))
    methods = [Method(name, {"method": name}) for name in ("none", "slow", "fast")]
    return summarise(Records(samples, 2), methods, dict.fromkeys(("none", "slow", "fast"), "same text"))


def test_the_table_shows_slowdowns_and_failures_in_red_within_80_columns(results):
    buffer = io.StringIO()
    Console(file=buffer, width=80, force_terminal=True, color_system="standard").print(tables(results, "title"))
    lines = buffer.getvalue().splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= 80
    slow = next(line for line in lines if "slow" in line)
    assert re.search(r"\x1b\[1;31m\s*0\.80x", slow)
    assert re.search(r"\x1b\[1;31m\s*2", slow)  # failures
    assert any("fast" in line and "2.00x" in line for line in plain)
    assert any("prompt p<1>" in line or "prompt p2 failed: NaN <logits>" in line for line in plain)
    assert any("speed-up by category" in line for line in plain)


def test_the_report_is_one_self_contained_file(results):
    page = html_report(results, PROVENANCE)
    assert page.count("<svg") == 3
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']https?:", page)
    assert "NaN &lt;logits&gt;" in page
    assert '<span class="bad">0.80x</span>' in page
    for heading in ("Speed-up by method and category", "Acceptance by position", "Where the time goes", "Provenance"):
        assert heading in page
    ids = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # two pictures on one page must not share ids


PROVENANCE = {
    "model": "zoo:base",
    "suite": {"num_prompts": 2, "file": "<odd>"},
    "repeats": 2,
    "dtype": "bfloat16",
    "threads": 1,
    "temperature": 0.0,
    "max_tokens": 8,
    "batch_size": 1,
    "cpu": "a & b",
    "interrupted": False,
    "command": "foretoken bench",
}


def test_files_are_whole_and_checked_before(tmp_path):
    path = check_writable(tmp_path / "out.json", "--json")
    assert list(tmp_path.iterdir()) == []
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["out.json"]
    assert path.stat().st_mode & 0o200
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable(tmp_path / "no" / "out.json", "--json")
    with pytest.raises(ConfigError, match="this is a folder"):
        check_writable(tmp_path, "--json")


def test_provenance_names_command_versions_and_machine(tmp_path):
    facts = provenance(["bench", "--set", "a b"], seed=3)
    assert facts["command"] == "foretoken bench --set 'a b'"
    assert facts["versions"]["torch"]
    assert facts["cpu"]
    assert facts["seed"] == 3
    assert git_commit(tmp_path) is None


def test_methods_with_options():
    methods = parse_methods(
        "none,ngram,draft_model+num_speculative_tokens=4+tree=topk",
        ["draft_model.num_drafts=2", "ngram.prompt_lookup_max=3"],
        target="zoo:base",
    )
    assert [method.label for method in methods] == [
        "none",
        "ngram",
        "draft_model+num_speculative_tokens=4+tree=topk",
    ]
    assert methods[1].settings == {"prompt_lookup_max": 3}
    assert methods[2].settings == {"num_drafts": 2, "num_speculative_tokens": 4, "tree": "topk", "model": "zoo:draft"}


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("ngrm", [], "did you mean 'ngram'"),
        ("a,,b", [], "commas"),
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


def test_settings_are_json_scalars_or_strings():
    texts = ["a=4", "b=0.5", "c=true", "d=null", "e=zoo:draft", "f=", "g=x=y", 'h="4"']
    assert parse_settings(texts) == {
        "a": 4,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "zoo:draft",
        "f": "",
        "g": "x=y",
        "h": "4",
    }
    with pytest.raises(ConfigError, match="key=value"):
        parse_settings(["novalue"])
    with pytest.raises(ConfigError, match="twice"):
        parse_settings(["a=1", "a=2"])


def test_the_draft_model_of_a_method():
    assert speculative_config("draft_model", {}, target="zoo:base")["model"] == "zoo:draft"
    assert speculative_config("draft_model", {}, target="./m", draft_model="./d")["model"] == "./d"
    with pytest.raises(ConfigError, match="add --draft-model"):
        speculative_config("draft_model", {}, target="./m")
    with pytest.raises(ConfigError, match="does not go with method 'ngram'"):
        speculative_config("ngram", {}, target="./m", draft_model="./d")
    with pytest.raises(ConfigError, match="contradicts"):
        speculative_config("draft_model", {"model": "a"}, target="./m", draft_model="b")
