"""The nightly comparison of tokens per step sees a fall, and its command is one that can run."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/steps.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


def test_a_fall_is_seen_and_rounding_is_not() -> None:
    differences = runpy.run_path(str(SCRIPT))["differences"]
    fallen, risen = differences({"a": 2.0, "b": 2.0, "c": 2.0}, {"a": 1.98, "b": 2.001, "c": 2.2})
    assert [line[0] for line in fallen] == ["a"]
    assert [line[0] for line in risen] == ["c"]


def test_the_command_of_the_kept_record_has_fixed_counts() -> None:
    kept = json.loads((ROOT / "lab/results/steps.json").read_text("utf-8"))
    words = shlex.split(kept["provenance"]["command"])
    assert words[:2] == ["foretoken", "bench"]
    assert {"--out", "float32"} <= set(words)
    methods = words[words.index("--methods") + 1].split(",")
    assert [each["method"] for each in kept["results"]] == methods
    assert all("num_speculative_tokens=" in each for each in methods if each != "none")
