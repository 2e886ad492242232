"""A run of several stages: bounds, record, and the folder in which it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.data import documents
from foretoken.models.load import load_config, load_tokenizer
from foretoken.train.mixture import Source
from foretoken.train.recipe import Recipe
from foretoken.train.rendering import encoder
from foretoken.train.run import LOGITS, TrainingRun, within_memory
from foretoken.train.trainer import Bounds, Schedule
from helpers.threads import one_thread  # noqa: F401  (a fixture)

RECIPE = Recipe(
    name="tiny",
    description="of the tests",
    config=lambda tokenizer: load_config("zoo:draft"),
    sources=lambda root: [],
    block=16,
    schedule=Schedule(batch=2, micro_batch=2),
    bounds=Bounds(tokens=10 * 32),
    teacher="zoo:draft",
)


class Shrink:
    """Pulls the weight towards 0."""

    name = "shrink"

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        weight: Tensor = model.weight  # type: ignore[assignment]
        return (weight**2).mean()


def train(out: Path, *, settings: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], Tensor]:
    """Two stages, three parts of the tokens and one."""
    source = Source("mine", 1.0, lambda: (documents.text(f"It is {number}.") for number in range(300)))
    run = TrainingRun(RECIPE, [source], out, **options)
    torch.manual_seed(run.seed)
    network = nn.Linear(4, 4)
    with run.claimed("f" * 64, settings or {}, None):
        encode = encoder(load_tokenizer("zoo:draft"))
        for name, share in (("first", 0.75), ("second", 0.25)):
            place = run.work / name
            blocks = run.mixture(run.text(network), encode, 8192, place=place)
            run.fit(network, Shrink(), blocks, RECIPE.schedule, place=place, share=share, fields={"name": name})
        record = run.record(network, Shrink.name, run.part_fields("f" * 64))
        run.save_record(record)
    return record, network.weight.detach()


def test_stages_share_the_bounds_and_the_record_adds_them_up(tmp_path: Path) -> None:
    record, _ = train(tmp_path, rate=0.5, seed=4)
    assert [(stage["name"], stage["steps"]) for stage in record["stages"]] == [("first", 8), ("second", 3)]
    assert (record["steps"], record["tokens"]) == (11, 11 * 32)
    assert record["curve"] == record["stages"][-1]["curve"]
    assert record["rates"]["adamw"] == RECIPE.schedule.rates.adamw / 2
    assert (record["method"], record["target"], record["start"]) == ("tiny", "zoo:draft", None)
    assert (record["seed"], record["parameters"], record["objective"]) == (4, 20, "shrink")
    assert json.loads((tmp_path / "training.json").read_text()) == record


def test_a_finished_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    record, weight = train(tmp_path)
    again, same = train(tmp_path)
    assert torch.equal(weight, same)
    assert again["stages"] == record["stages"]


def test_settings_of_the_method_belong_to_the_claim(tmp_path: Path) -> None:
    train(tmp_path, settings={"levels": 2})
    with pytest.raises(ForetokenError, match="holds a run with another levels; name another --out"):
        train(tmp_path, settings={"levels": 3})


def test_micro_batches_shrink_with_the_vocabulary() -> None:
    schedule = replace(RECIPE.schedule, batch=8, micro_batch=8)
    assert within_memory(schedule, 16, 100).micro_batch == 8
    assert within_memory(schedule, LOGITS // 300, 100).micro_batch == 3
    assert within_memory(schedule, LOGITS, 100).micro_batch == 1
