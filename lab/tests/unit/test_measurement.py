"""Records of measuring scripts: their provenance, and the refusal of a path before the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ForetokenError
from foretoken_lab.measurement import Measurement


def test_a_record_has_results_and_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prefill.py", "--model", "zoo:base"])
    before, path = torch.get_num_threads(), tmp_path / "found.json"
    try:
        measurement = Measurement("prefill.py", path, threads=1)
        assert torch.get_num_threads() == 1
        measurement.write({"rows": [1]}, model="zoo:base")
    finally:
        torch.set_num_threads(before)
    record = json.loads(path.read_text(encoding="utf-8"))
    facts = record["provenance"]
    assert record["rows"] == [1]
    assert facts["command"] == "python lab/benchmarks/prefill.py --model zoo:base"
    assert (facts["model"], facts["threads"]) == ("zoo:base", 1)
    assert {"commit", "cpu", "platform", "versions", "share_of_processors_used_by_others"} <= facts.keys()


def test_versions_of_peers_are_recorded_on_request(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    Measurement("prefill.py", path, threads=None, peers=True).write({})
    facts = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    assert "llama-cpp-python" in facts["versions"]
    assert "threads" not in facts


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Measurement("prefill.py", None, threads=None).write({"rows": []})
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match="--json"):
        Measurement("prefill.py", tmp_path / "no" / "such" / "folder" / "it.json", threads=None)
