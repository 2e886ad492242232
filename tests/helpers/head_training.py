"""What the tests of ``foretoken train`` share for heads over hidden states: little to read, and steps of few tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.train import mixture, outputs
from helpers.tiny_models import save_model

BLOCK, BATCH = 32, 4
STEP = BLOCK * BATCH


def small_steps(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a method's recipe read short blocks, and its target write little."""
    made = module.recipe

    def small(*arguments: Any) -> Any:
        recipe = made(*arguments)
        return replace(recipe, block=BLOCK, schedule=replace(recipe.schedule, batch=BATCH))

    monkeypatch.setattr(module, "recipe", small)
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 8)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 500)


def fill(place: Path, prompts: int, targets: Sequence[tuple[str, int]]) -> Path:
    """``mine.jsonl`` to learn from, ``ask.jsonl`` to be judged by, a file, and targets of these names and widths."""
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
    """What serving measured is what the walk over the target's own text had said."""
    for mode in modes:
        served, walked = record["acceptance"][mode]["tokens_per_step"], record["walked"][mode]["after"]
        assert served == pytest.approx(walked, abs=0.05)
