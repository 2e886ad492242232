"""The studies of named suites, as short as they can be: every table has rows, and every cell can be written."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.harness import Method
from foretoken.bench.suite import Run, Section
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken_lab.suites import judge, reflective, sparse

CHAIN = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4}


def run_of(model: str, *configs: dict[str, Any], data: Path | None = None) -> Run:
    plain = LLM(model, speculative_config={"method": "none"}, threads=1, max_num_seqs=4)
    methods = [Method("none", {"method": "none"}), *(Method(f"method {each}", each) for each in configs)]
    engines = {each.label: plain if each.label == "none" else plain.with_method(each.config) for each in methods}
    return Run(engines, methods, [], SamplingParams(max_tokens=8), chat=True, data=data, limit=1)


def check(found: list[Section], names: list[str]) -> dict[str, Section]:
    assert [section.name for section in found] == names
    for section in found:
        assert section.rows, section.name
        assert all(isinstance(column.cell(row), str) for row in section.rows for column in section.columns)
    return {section.name: section for section in found}


def test_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "TASKS", ("arithmetic",))
    found = judge.study(run_of("zoo:base", {**CHAIN, "verifier": "judge", "threshold": 0.5}))
    tables = check(found, ["accuracy", "adversaries", "labels"])
    assert [row["method"][:6] for row in tables["accuracy"].rows] == ["none", "method"]
    names = [row["method"].partition(": method")[0] for row in tables["adversaries"].rows]
    assert names == ["wrong fact", "random"]
    labels = [row for row in tables["labels"].rows if row["task"] == "arithmetic"]
    assert {(row["fine"] > 0, row["bad"] > 0) for row in labels} == {(True, True)}
    assert len({(row["fine"], row["bad"]) for row in labels}) == 1  # the same tokens at every threshold
    for measure in ("accepted", "fine_accepted", "false_accepts"):  # a looser threshold accepts more
        shares = [row[measure] for row in sorted(labels, key=lambda row: row["threshold"], reverse=True)]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1]


def test_reflective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflective, "TASKS", ("arithmetic",))
    monkeypatch.setattr(reflective, "ALPHAS", (0.1, 0.3))
    monkeypatch.setattr(reflective, "TOLERANCES", (1.0,))
    monkeypatch.setattr(reflective, "PROMPTS", {"[BACK]": reflective.PROMPTS["[BACK]"]})
    monkeypatch.setattr(reflective, "_REPEATS", 1)
    found = reflective.study(run_of("zoo:base", {**CHAIN, "verifier": "reflective", "alpha": 0.3}))
    assert [section.name for section in found] == ["accuracy", "judgement", "copying", "cost"]
    # whether one question has a refused token whose label is known is the model's affair
    assert all(section.rows for section in found if section.name != "judgement")


def test_sparse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sparse, "TASKS", ("json",))
    monkeypatch.setattr(sparse, "TOKENS", 16)
    monkeypatch.setattr(sparse, "SHORT", 24)
    text = tmp_path / sparse.TEXT
    text.parent.mkdir(parents=True)
    with lzma.open(text, "wt") as file:
        file.write("The river runs past the old mill, and the children play there in summer. \n" * 60)
    run = run_of("zoo:moe", {"method": "none", "verification.moe": 1, "verification.ffn": 0.1}, data=tmp_path)
    sections = check(sparse.study(run), ["accuracy", "given_text"])
    assert {row["settings"] for row in sections["given_text"].rows} == {"dense", "moe=1+ffn=0.1"}
