"""A recipe: everything that decides what a model becomes, in one object; and the run that follows it.

``run`` makes an ordinary Hugging Face folder: configuration, weights in bf16, tokenizer with chat template, and
``training.json`` with the seed, the hashes of the data, the time it took, the loss curve and the versions. Its
intermediate files (tokens, checkpoints) lie in ``run/`` inside that folder.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.core.errors import ConfigError, ModelError
from foretoken.forward import anatomy
from foretoken.models.checkpoint_files import auto_class
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.load import load_config, load_network, load_tokenizer, source_of
from foretoken.train import attention, head_loss, trainer
from foretoken.train.effort import Effort
from foretoken.train.frozen_target import dense_products
from foretoken.train.mixture import Encode, Source
from foretoken.train.objectives import ROWS, NextToken, Objective
from foretoken.train.rendering import encoder
from foretoken.train.run import LoopOptions, TrainingRun, within_memory
from foretoken.train.run_folder import disk_trouble, first_line
from foretoken.train.trainer import Bounds, Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from typing_extensions import Unpack

HELD_OUT_BLOCKS = 64


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        name: of the recipe and of the model.
        description: one line.
        config: the architecture, given the number of entries and the ids of the tokenizer.
        sources: the mixture, given the data folder.
        block: tokens of a training block.
        schedule: batch and rates.
        bounds: when to stop unless the command says otherwise.
        tokenizer: a zoo name or folder with a tokenizer, or a function that learns one from the sources.
        start: a zoo name or folder with the first weights; None: random.
        adopt: puts the weights of ``start`` into the new model.
        teacher: a zoo name or folder that the objective measures against.
        own_words: share of the training text that the teacher itself wrote, continuing openings of the mixture.
        on_policy: share that the model in training wrote.
        objective: given the tokenizer and the loaded teacher, which is there if ``teacher`` names one.
        initialise: draws weights that the library draws badly.
        prepare: swaps in what only training needs; gives back what undoes it.
        encode: given the tokenizer, returns the function from documents to ids, and a bound of the ids.
    """

    name: str
    description: str
    config: Callable[[PreTrainedTokenizerBase], PretrainedConfig]
    sources: Callable[[Path], list[Source]]
    block: int = 512
    schedule: Schedule = field(default_factory=Schedule)
    bounds: Bounds = field(default_factory=lambda: Bounds(minutes=30))
    tokenizer: str | Callable[[Sequence[Source]], PreTrainedTokenizerBase] = "zoo:base"
    start: str | None = None
    adopt: Callable[[nn.Module, nn.Module], None] | None = None
    teacher: str | None = None
    own_words: float = 0.0
    on_policy: float = 0.0
    objective: Callable[[PreTrainedTokenizerBase, Any], Objective] = lambda tokenizer, teacher: NextToken()
    initialise: Callable[[nn.Module], None] | None = None
    prepare: Callable[[nn.Module], Callable[[], None]] | None = None
    encode: Callable[[PreTrainedTokenizerBase], tuple[Encode, int]] = lambda tokenizer: (
        encoder(tokenizer),
        len(tokenizer),
    )

    @property
    def tokenizer_name(self) -> str | None:
        """The name of a tokenizer that is taken; None: it is learnt from the text."""
        return self.tokenizer if isinstance(self.tokenizer, str) else None


def part_recipe(name: str, description: str, target: str, own_words: float, **fields: Any) -> Recipe:
    """Return the recipe of a part that is trained for a target, which generates a share of the text.

    Args:
        fields: of the recipe.
    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= own_words <= 1:
        raise ConfigError(f"--own-words {own_words}: a share must be from 0 to 1")
    return Recipe(
        name=name,
        description=description,
        config=lambda tokenizer: load_config(target),
        tokenizer=target,
        teacher=target,
        own_words=own_words,
        **fields,
    )


def run(
    recipe: Recipe, sources: Sequence[Source], out: Path, *, compiled: bool = False, **loop: Unpack[LoopOptions]
) -> dict[str, Any]:
    """Follow a recipe from tokenizer to exported folder; goes on where an interrupted run stopped.

    Args:
        sources: the recipe's, or the user's own.
        out: the folder to make.
        compiled: compile the layers first, half a minute that pays for state-space models and on a GPU.
        loop: see :class:`foretoken.train.run.TrainingRun`.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: data, tokenizer, disk or loss stop the run; the last checkpoint is kept.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file; name a folder to make")
    training = TrainingRun(recipe, sources, out, **loop)
    if (out / "config.json").exists() and not (training.work / "claim.json").exists():
        raise ConfigError(f"--out {out}: another model lies there; name a folder to make")
    with disk_trouble(out):
        training.refuse_another()  # before anything large is loaded
        if isinstance(recipe.tokenizer, str):
            tokenizer = load_tokenizer(recipe.tokenizer)
        else:
            training.claim()
            tokenizer = _learnt(recipe.tokenizer, sources, training.work)
        torch.manual_seed(training.seed)
        model = build(recipe, tokenizer)
        teacher = load_network(recipe.teacher, dtype="float32") if recipe.teacher else None
        if teacher is not None:
            dense_products(teacher)
            _check_vocabulary(teacher, model, recipe)
            teacher.to(training.device)
        objective = recipe.objective(tokenizer, teacher)
        training.claim()
        mixture = training.mixture(training.text(model), *recipe.encode(tokenizer))
        if training.device == "cpu":
            attention.use(model)
            if teacher is not None:
                attention.use(teacher)
        undo = recipe.prepare(model) if recipe.prepare else lambda: None
        if compiled:
            for layer in anatomy.find(model).layers:
                layer.compile(dynamic=False)
        try:
            schedule = recipe.schedule
            if teacher is not None and not (head_loss.applies(model) and head_loss.applies(teacher)):
                schedule = within_memory(schedule, mixture.block, len(tokenizer))

            def usable() -> None:
                if teacher is not None and not compiled and recipe.prepare is None:
                    export(deepcopy(model), tokenizer, out)

            teaching = [] if teacher is None else list(teacher.parameters())
            flops = 6 * sum(each.numel() for each in model.parameters()) + 2 * sum(each.numel() for each in teaching)
            logits = min(schedule.micro_batch * mixture.block, ROWS) * len(tokenizer)
            training.fit(model, objective, mixture, schedule, usable=usable, effort=Effort(flops, logits))
            micro_batch = schedule.micro_batch
            loss = trainer.held_out_loss(model, objective, mixture, HELD_OUT_BLOCKS, micro_batch, training.seed)
        finally:
            undo()
        held_out = None if math.isnan(loss) else round(loss, 4)
        record = training.record(model, objective.name, {**_settings(recipe), "held_out_loss": held_out})
        export(model, tokenizer, out)
        training.save_record(record)
    return record


def build(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The recipe's model before training: its architecture, random or with adopted weights, float32."""
    config = recipe.config(tokenizer)
    model: nn.Module = auto_class(config).from_config(config, dtype=torch.float32)
    if recipe.initialise is not None:
        recipe.initialise(model)
    if recipe.start is not None and recipe.adopt is not None:
        recipe.adopt(model, load_network(recipe.start, dtype="float32"))
    return model


def copy_all(model: nn.Module, start: nn.Module) -> None:
    """Adopt every weight of a model of the same architecture.

    Raises:
        ModelError: the architectures differ.
    """
    try:
        model.load_state_dict(start.state_dict())
    except RuntimeError as error:  # a headline, then a line for every kind of difference
        why = str(error).splitlines()[1:2] or [str(error)]
        raise ModelError(
            f"the weights to start from do not fit the recipe's architecture ({why[0].strip()[:200]})"
        ) from None


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the Hugging Face folder; a half-written one never replaces a whole one."""
    part = out / "run" / "export"
    shutil.rmtree(part, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(part)  # type: ignore[operator]
    _save_tokenizer(tokenizer, part)
    for file in sorted(part.iterdir()):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
        os.replace(file, out / file.name)
    part.rmdir()


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    try:
        tokenizer.save_pretrained(place)
    except OSError:
        raise
    except Exception as error:  # the library says no more than that, whatever went wrong with the file
        raise OSError(first_line(error)) from None


def _learnt(
    learn: Callable[[Sequence[Source]], PreTrainedTokenizerBase], sources: Sequence[Source], work: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer that this run learns, or has learnt."""
    kept = work / "tokenizer"
    if not kept.exists():
        tokenizer = learn(sources)
        part = work / "tokenizer.part"
        _save_tokenizer(tokenizer, part)
        os.replace(part, kept)
    return load_tokenizer(str(kept))


def _check_vocabulary(teacher: Any, model: Any, recipe: Recipe) -> None:
    theirs, ours = (each.config.get_text_config().vocab_size for each in (teacher, model))
    if theirs != ours:
        raise ModelError(
            f"vocabulary mismatch: the teacher {recipe.teacher} has {theirs} entries, the recipe's model {ours}: "
            "distillation compares them entry by entry"
        )


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of the record that only whole models have."""
    return {
        "recipe": recipe.name,
        "description": recipe.description,
        "start": recipe.start,
        "teacher": recipe.teacher,
        "teacher_fingerprint": fingerprint_of(source_of(recipe.teacher)) if recipe.teacher else None,
        "tokenizer": recipe.tokenizer_name,
        "own_words": recipe.own_words,
        "on_policy": recipe.on_policy,
    }
