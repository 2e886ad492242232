"""One run of training: the text it reads, the folder it resumes in, its stages, and its record.

A method gives a recipe, a network, an objective for each stage, and the fields of the record that only it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from foretoken.core.provenance import provenance
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_tokenizer, source_of
from foretoken.models.memory import peak_resident_bytes
from foretoken.train import trainer
from foretoken.train.effort import Effort, product_rate
from foretoken.train.mixture import Encode, Mixture, Source, scaled
from foretoken.train.objectives import Objective
from foretoken.train.outputs import Outputs
from foretoken.train.run_folder import disk_trouble, refuse_another, write_claim, write_record
from foretoken.train.trainer import Blocks, Bounds, Report, Schedule, StoredFeatures

if TYPE_CHECKING:
    from foretoken.train.recipe import Recipe

LOGITS = 1 << 25  # of one micro-batch, about: 128 MB of float32 for each distribution


class LoopOptions(TypedDict, total=False):
    """Options of every run, as :class:`TrainingRun` describes them."""

    bounds: Bounds | None
    seed: int
    device: str
    report: Report
    arguments: Sequence[str]
    checkpoint_every: float
    rate: float


class TrainingRun:
    """A run of one or more stages over the same network.

    Args:
        recipe: the settings of the run.
        sources: the text; not read if features are.
        out: the folder to make: the result, ``training.json``, and ``run/``.
        start: the folder of a trained part that the network begins as.
        bounds: of all stages together; None: the recipe's.
        seed: of weights, order and sampling.
        device: of torch.
        report: called after every step.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rates.
    Attributes:
        work: the folder of what only the run itself needs.
        stages: of each finished stage the part of the record.
    """

    def __init__(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        out: Path,
        *,
        start: Path | None = None,
        bounds: Bounds | None = None,
        seed: int = 0,
        device: str = "cpu",
        report: Report = lambda progress: None,
        arguments: Sequence[str] = (),
        checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
        rate: float = 1.0,
    ) -> None:
        self.recipe, self.sources, self.out, self.start = recipe, sources, out, start
        self.bounds, self.seed, self.device, self.work = bounds or recipe.bounds, seed, device, out / "run"
        self.stages: list[dict[str, Any]] = []
        self._report, self._arguments = report, arguments
        self._checkpoint_every, self._rate = checkpoint_every, rate

    # ------------------------------------------------------------------ the folder

    def refuse_another(self, settings: Mapping[str, Any] | None = None) -> None:
        """Refuse the folder of a run with other settings.

        Raises:
            ForetokenError: it holds checkpoints of one.
        """
        refuse_another(self.work, self._claim(settings or {}))

    def claim(self, settings: Mapping[str, Any] | None = None) -> None:
        """Mark the folder as this run's; a later run with the same settings resumes it.

        Args:
            settings: those of the method: tokens and checkpoints of a run with others are useless.
        Raises:
            ForetokenError: the folder holds checkpoints of another run.
        """
        self.refuse_another(settings)
        write_claim(self.work, self._claim(settings or {}))

    @contextmanager
    def claimed(
        self, target_fingerprint: str, settings: Mapping[str, Any], stored: StoredFeatures | None
    ) -> Iterator[None]:
        """Claim the folder of a part that is trained for a target; a full disk inside is a ForetokenError."""
        claim = {"target": target_fingerprint, **settings}
        if self.start is not None:
            claim["start"] = fingerprint(self.start)
        if stored is not None:
            claim["features"] = stored.hashes
        with disk_trouble(self.out):
            self.claim(claim)
            yield

    def _claim(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "recipe": recipe.name,
            "description": recipe.description,
            "seed": self.seed,
            "block": recipe.block,
            "tokenizer": recipe.tokenizer_name,
            "start": recipe.start,
            "teacher": recipe.teacher,
            "own words": [recipe.own_words, recipe.on_policy],
            "sources": [
                [s.name, s.share, [[file.name, file.stat().st_size] for file in s.files]] for s in self.sources
            ],
            **settings,
        }

    # ------------------------------------------------------------------ the text

    def text(self, model: nn.Module, place: Path | None = None, own_words: float | None = None) -> list[Source]:
        """Return the given sources and those that models generate, in their shares.

        Args:
            model: in training; it generates ``on_policy`` of the text.
            place: the folder that keeps generated text; None: ``work``.
            own_words: share that the teacher generates; None: the recipe's.
        """
        recipe, place = self.recipe, place or self.work
        own_words = recipe.own_words if own_words is None else own_words
        found = scaled(self.sources, 1 - own_words - recipe.on_policy)
        if own_words:
            teacher = source_of(str(recipe.teacher))
            outputs = Outputs(lambda: teacher, list(self.sources), place / "own_words.jsonl", self.seed)
            found.append(outputs.source("own_words", own_words))
        if recipe.on_policy:
            now = place / "now"

            def current() -> str:
                copy = deepcopy(model).to(torch.bfloat16)
                copy.save_pretrained(now)  # type: ignore[operator]
                load_tokenizer(str(recipe.tokenizer)).save_pretrained(now)
                return str(now)

            outputs = Outputs(current, list(self.sources), place / "on_policy.jsonl", self.seed + 1, renew=True)
            found.append(outputs.source("on_policy", recipe.on_policy))
        return found

    def mixture(
        self, text: list[Source], encode: Encode, num_ids: int, block: int | None = None, place: Path | None = None
    ) -> Mixture:
        """Return the blocks of a stage.

        Args:
            encode: documents -> ids.
            num_ids: all ids are below it.
            block: tokens of one; None: the recipe's.
            place: the folder that keeps the tokens; None: ``work``.
        """
        return Mixture(text, encode, (place or self.work) / "tokens", block or self.recipe.block, num_ids, self.seed)

    # ------------------------------------------------------------------ the stages

    def fit(
        self,
        network: nn.Module,
        objective: Objective,
        blocks: Blocks,
        schedule: Schedule,
        *,
        place: Path | None = None,
        share: float = 1.0,
        measure: Callable[[], str] | None = None,
        usable: Callable[[], None] = lambda: None,
        effort: Effort | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Train one stage, from its last checkpoint if there is one.

        Args:
            schedule: its rates are scaled by the run's factor, and its seed is the run's.
            place: the folder of its checkpoints; None: ``work``.
            share: of the run's bounds.
            measure, usable: see :func:`foretoken.train.trainer.fit`.
            effort: the cost of a step, for the estimate before and the record after it.
            fields: of the method, for the record.
        Returns:
            the stage's part of the record.
        """
        schedule = replace(schedule, rates=schedule.rates.scaled(self._rate), seed=self.seed)
        bounds = self.bounds.part(share)
        rate = 0.0 if effort is None else product_rate(self.device)
        if effort is not None:
            effort.tell(network, rate, bounds.tokens, bounds.minutes)
        progress = trainer.fit(
            network,
            objective,
            blocks,
            schedule,
            bounds,
            (place or self.work) / "checkpoints",
            report=self._report,
            device=self.device,
            checkpoint_every=self._checkpoint_every,
            measure=measure,
            usable=usable,
        )
        stage = {
            **(fields or {}),
            "block": blocks.block,
            "batch": schedule.batch,
            "rates": asdict(schedule.rates),
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            **({} if effort is None else {"products": effort.share(rate, progress.tokens, progress.seconds)}),
            "peak_gb": round((peak_resident_bytes() or 0) / 1e9, 2),
            "mixture": blocks.report(),
            "curve": progress.curve,
        }
        self.stages.append(stage)
        return stage

    # ------------------------------------------------------------------ the record

    def part_fields(self, target_fingerprint: str) -> dict[str, Any]:
        """Return the fields of the record that every part has which is trained for a target."""
        start = self.start
        return {
            "method": self.recipe.name,
            "target": self.recipe.teacher,
            "target_fingerprint": target_fingerprint,
            "start": None if start is None else {"name": str(start), "fingerprint": fingerprint(start)},
        }

    def record(self, network: nn.Module, objective: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of the finished run; text, rates and curve are those of its last stage.

        Args:
            objective: its name.
            fields: of the method, which come first.
        """
        last = self.stages[-1]
        return {
            **fields,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            **{each: last[each] for each in ("block", "batch", "rates")},
            "bounds": asdict(self.bounds),
            "seed": self.seed,
            "objective": objective,
            "steps": sum(each["steps"] for each in self.stages),
            "tokens": sum(each["tokens"] for each in self.stages),
            "minutes": round(sum(each["minutes"] for each in self.stages), 1),
            "threads": torch.get_num_threads(),
            **{each: last[each] for each in ("products", "peak_gb", "mixture", "curve") if each in last},
            **({"stages": self.stages} if len(self.stages) > 1 else {}),
            "provenance": provenance(self._arguments),
        }

    def save_record(self, record: dict[str, Any]) -> None:
        """Write ``training.json``; called last, since it marks the result as whole."""
        write_record(self.out, record)


def within_memory(schedule: Schedule, block: int, vocabulary: int) -> Schedule:
    """Return the schedule with micro-batches small enough that their logits fit the memory."""
    return replace(schedule, micro_batch=max(1, min(schedule.micro_batch, LOGITS // (block * vocabulary))))
