"""A recipe: everything that decides what a model becomes, in one object; and the run that follows it.

``run`` makes an ordinary Hugging Face folder: configuration, weights in bf16, tokenizer with chat template, and
``training.json`` with the seed, the hashes of the data, the time it took, the loss curve and the versions. What it
needs on the way (tokens, checkpoints) lies in ``run/`` inside that folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.forward import anatomy
from foretoken.models.checkpoint_files import auto_class
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.load import load_network, load_tokenizer, source_of
from foretoken.train import attention, checkpoint, trainer
from foretoken.train.mixture import Encode, Mixture, Source
from foretoken.train.objectives import NextToken, Objective
from foretoken.train.outputs import Outputs
from foretoken.train.rendering import encoder
from foretoken.train.trainer import Bounds, Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

HELD_OUT_BLOCKS = 64
RECORD = "training.json"


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
        tokenizer: a zoo name or folder whose tokenizer is taken, or what learns one from the sources.
        start: a zoo name or folder whose weights are taken as far as ``adopt`` says; None: random.
        adopt: puts the weights of ``start`` into the new model.
        teacher: a zoo name or folder that the objective measures against.
        own_words: share of what is read that the teacher itself wrote, continuing openings of the mixture.
        on_policy: share that the model in training wrote.
        objective: given the tokenizer and the loaded teacher, which is there if ``teacher`` names one.
        initialise: draws weights that the library draws badly.
        prepare: swaps in what only training needs; gives back what undoes it.
        encode: given the tokenizer, what turns documents into ids, and the number that all of them are below.
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


def run(
    recipe: Recipe,
    sources: Sequence[Source],
    out: Path,
    *,
    bounds: Bounds,
    seed: int = 0,
    device: str = "cpu",
    report: trainer.Report = lambda progress: None,
    arguments: Sequence[str] = (),
    checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
    compiled: bool = False,
    rate: float = 1.0,
) -> dict[str, Any]:
    """Follow a recipe from tokenizer to exported folder; goes on where an interrupted run stopped.

    Args:
        sources: the recipe's, or the user's own.
        out: the folder to make.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the recipe's learning rates.
        compiled: compile the layers first, half a minute that pays for state-space models and on a GPU.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: data, tokenizer, disk or loss stop the run; what was reached is kept.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file; name a folder to make")
    work = out / "run"
    if (out / "config.json").exists() and not (work / "claim.json").exists():
        raise ConfigError(f"--out {out}: another model lies there; name a folder to make")
    with disk_trouble(out):
        claim = claim_of(recipe, sources, seed)
        refuse_another(work, claim)
        if isinstance(recipe.tokenizer, str):
            tokenizer = load_tokenizer(recipe.tokenizer)
        else:
            write_claim(work, claim)
            tokenizer = _learnt(recipe.tokenizer, sources, work)
        torch.manual_seed(seed)
        model = build(recipe, tokenizer)
        teacher = load_network(recipe.teacher, dtype="float32") if recipe.teacher else None
        if teacher is not None:
            _check_vocabulary(teacher, model, recipe)
            teacher.to(device)
        objective = recipe.objective(tokenizer, teacher)
        write_claim(work, claim)
        everything = [
            *scaled(sources, 1 - recipe.own_words - recipe.on_policy),
            *written(recipe, model, sources, work, seed),
        ]
        encode, num_ids = recipe.encode(tokenizer)
        mixture = Mixture(everything, encode, work / "tokens", recipe.block, num_ids, seed)
        schedule = replace(recipe.schedule, rates=recipe.schedule.rates.scaled(rate), seed=seed)
        recipe = replace(recipe, schedule=schedule)
        if device == "cpu":
            attention.use(model)
            if teacher is not None:
                attention.use(teacher)
        undo = recipe.prepare(model) if recipe.prepare else lambda: None
        if compiled:
            for layer in anatomy.find(model).layers:
                layer.compile(dynamic=False)
        try:
            progress = trainer.fit(
                model,
                objective,
                mixture,
                schedule,
                bounds,
                work / "checkpoints",
                report=report,
                device=device,
                checkpoint_every=checkpoint_every,
            )
            loss = trainer.held_out_loss(model, objective, mixture, HELD_OUT_BLOCKS, schedule.micro_batch, seed)
        finally:
            undo()
        record = {
            **_settings(recipe, model, bounds),
            "objective": objective.name,
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "threads": torch.get_num_threads(),
            "held_out_loss": None if math.isnan(loss) else round(loss, 4),
            "mixture": mixture.report(),
            "curve": progress.curve,
            "provenance": provenance(arguments),
        }
        export(model, tokenizer, out, record)
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


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path, record: dict[str, Any]) -> None:
    """Write the Hugging Face folder; a half-written one never replaces a whole one."""
    part = out / "run" / "export"
    shutil.rmtree(part, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(part)  # type: ignore[operator]
    _save_tokenizer(tokenizer, part)
    for file in sorted(part.iterdir()):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
        os.replace(file, out / file.name)
    part.rmdir()
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")


def add_to_record(out: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Add what was measured after a run to its ``training.json``."""
    record: dict[str, Any] = {**json.loads((out / RECORD).read_text(encoding="utf-8")), **found}
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _first_line(error: Exception) -> str:
    """What the libraries say, without their advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    try:
        tokenizer.save_pretrained(place)
    except OSError:
        raise
    except Exception as error:  # the library says no more than that, whatever went wrong with the file
        raise OSError(_first_line(error)) from None


@contextmanager
def disk_trouble(out: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written, as one line that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or _first_line(error)
        raise ForetokenError(
            f"{out}: cannot be written ({why}); what was reached is kept; make room and run the same command to go on"
        ) from None


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


def scaled(sources: Sequence[Source], share: float) -> list[Source]:
    """Sources whose shares add up to ``share``."""
    total = sum(source.share for source in sources)
    return [replace(source, share=source.share / total * share) for source in sources if share > 0]


def written(recipe: Recipe, model: nn.Module, sources: Sequence[Source], work: Path, seed: int) -> list[Source]:
    """The sources that models write: the teacher, and the model in training."""
    found = []
    if recipe.own_words:
        teacher = source_of(str(recipe.teacher))
        outputs = Outputs(lambda: teacher, list(sources), work / "own_words.jsonl", seed)
        found.append(outputs.source("own_words", recipe.own_words))
    if recipe.on_policy:
        now = work / "now"

        def current() -> str:
            copy = deepcopy(model).to(torch.bfloat16)
            copy.save_pretrained(now)  # type: ignore[operator]
            load_tokenizer(str(recipe.tokenizer)).save_pretrained(now)
            return str(now)

        outputs = Outputs(current, list(sources), work / "on_policy.jsonl", seed + 1, renew=True)
        found.append(outputs.source("on_policy", recipe.on_policy))
    return found


def _check_vocabulary(teacher: Any, model: Any, recipe: Recipe) -> None:
    theirs, ours = (each.config.get_text_config().vocab_size for each in (teacher, model))
    if theirs != ours:
        raise ModelError(
            f"vocabulary mismatch: the teacher {recipe.teacher} has {theirs} entries, the recipe's model {ours}: "
            "distillation compares them entry by entry"
        )


def claim_of(recipe: Recipe, sources: Sequence[Source], seed: int) -> dict[str, Any]:
    """What makes a run another one: its tokens and checkpoints are of no use to it."""
    return {
        "recipe": recipe.name,
        "description": recipe.description,
        "seed": seed,
        "block": recipe.block,
        "tokenizer": _named(recipe.tokenizer),
        "start": recipe.start,
        "teacher": recipe.teacher,
        "own words": [recipe.own_words, recipe.on_policy],
        "sources": [[s.name, s.share, [[path.name, path.stat().st_size] for path in s.files]] for s in sources],
    }


def _named(tokenizer: object) -> str | None:
    """The name of a tokenizer that is taken; None: it is learnt."""
    return tokenizer if isinstance(tokenizer, str) else None


def refuse_another(work: Path, claim: dict[str, Any]) -> None:
    """Refuse to go on in the folder of another run; one that has saved no step yet gives way."""
    path = work / "claim.json"
    if not path.exists() or (found := json.loads(path.read_text(encoding="utf-8"))) == claim:
        return
    if not any(checkpoint.latest(place) for place in work.rglob("checkpoints")):  # of some stage
        shutil.rmtree(work)
        return
    changed = ", ".join(key for key in claim if found.get(key) != claim[key])
    raise ForetokenError(f"{work}: holds a run with another {changed}; name another --out, or remove that folder")


def write_claim(work: Path, claim: dict[str, Any]) -> None:
    """Say whose folder this is."""
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / "claim.json", json.dumps(claim))


def _settings(recipe: Recipe, model: nn.Module, bounds: Bounds) -> dict[str, Any]:
    """What decided the run."""
    return {
        "recipe": recipe.name,
        "description": recipe.description,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "start": recipe.start,
        "teacher": recipe.teacher,
        "teacher_fingerprint": fingerprint_of(source_of(recipe.teacher)) if recipe.teacher else None,
        "tokenizer": _named(recipe.tokenizer),
        "own_words": recipe.own_words,
        "on_policy": recipe.on_policy,
        "block": recipe.block,
        "batch": recipe.schedule.batch,
        "rates": asdict(recipe.schedule.rates),
        "bounds": asdict(bounds),
        "seed": recipe.schedule.seed,
    }
