"""For tests of ``foretoken train`` of draft networks: little to read, and steps of few tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.train import mixture, outputs
from foretoken.train.feature_heads.training import HeadTraining
from helpers.tiny_models import save_model

BLOCK, BATCH = 32, 4
STEP = BLOCK * BATCH


def shortened(training: HeadTraining, block: int = BLOCK, micro_batch: int = BATCH) -> HeadTraining:
    """The same training in steps of few tokens."""
    schedule = replace(training.recipe.schedule, batch=BATCH, micro_batch=micro_batch)
    return replace(training, recipe=replace(training.recipe, block=block, schedule=schedule))


def small_steps(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a method's training read short blocks, and its target write little."""
    made = module.training
    monkeypatch.setattr(module, "training", lambda options: shortened(made(options)))
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 8)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 500)


def fill(place: Path, prompts: int, targets: Sequence[tuple[str, int]]) -> Path:
    """Write ``mine.jsonl`` to train on, ``ask.jsonl`` with held-out prompts, a file, and targets of these widths."""
    lines = [{"prompt": f"Tom has {n} marbles.", "response": f"He has {2 * n + 3}."} for n in range(200)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "ask.jsonl").write_text("".join(json.dumps({"prompt": f"Who has {n}?"}) + "\n" for n in range(prompts)))
    (place / "file").write_text("")
    for name, width in targets:
        save_model("llama", place / name, hidden_size=width, head_dim=32, intermediate_size=128)
    return place


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work inside of a folder, without a data folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)


def assert_foretold(record: dict[str, Any], modes: Sequence[str] = ("greedy",)) -> None:
    """Serving measured the tokens per step that training expected on the target's own text."""
    for mode in modes:
        served, walked = record["acceptance"][mode]["tokens_per_step"], record["walked"][mode]["after"]
        assert served == pytest.approx(walked, abs=0.05)
