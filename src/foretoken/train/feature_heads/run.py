"""The run that trains a head over a target's hidden states: text or stored features, one stage or several, the walk.

A method gives a :class:`Course`; the loop, the folder, the claim on it and the record are the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.drafting.learned_part import LearnedPart
from foretoken.forward.hidden_states import FINAL
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is
from foretoken.train import trainer
from foretoken.train.begin_as import begin_as
from foretoken.train.feature_heads.course import Course, Stage
from foretoken.train.feature_heads.lessons import AllPositions, FromFeatures, FromTokens, Lessons, depths_read, frequent
from foretoken.train.feature_heads.walk import Walk, texts
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Mixture, Source
from foretoken.train.recipe import (
    RECORD,
    claim_of,
    disk_trouble,
    refuse_another,
    scaled,
    write_claim,
    written,
)
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.stored_blocks import StoredBlocks
from foretoken.train.trainer import Blocks, Bounds

LOGITS = 1 << 25  # of one micro-batch's target, about: 128 MB of float32


def run(
    name: str,
    course: Course,
    sources: Sequence[Source],
    out: Path,
    *,
    prompts: Sequence[str] = (),
    bounds: Bounds | None = None,
    features: Path | None = None,
    start: Path | None = None,
    laid_out_from: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    report: trainer.Report = lambda progress: None,
    arguments: Sequence[str] = (),
    checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
    rate: float = 1.0,
) -> dict[str, Any]:
    """Train a head; goes on where an interrupted run stopped.

    Args:
        name: of the target: zoo name, folder or hub id.
        sources: the text; not read if features are given.
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        prompts: held-out prompts; what the target answers is walked (walk.py) while the head is trained.
        bounds: of all stages together; None: the recipe's.
        features: folder of a feature store to train from instead.
        start: folder of a head of the same shape, or of one with a narrower MLP, whose weights this one begins with; it
            scores the same tokens where it scores as many.
        laid_out_from: the model whose function the target is in another layout: its features are the target's.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rates.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    course.part.check_place(out)
    recipe, bounds = course.recipe, bounds or course.recipe.bounds
    stages = tuple(replace(each, own_words=0.0) if features is not None else each for each in course.stages)
    loaded = load_as_is(name, device=device)
    config = course.config(loaded.model.config, name, loaded.fingerprint, None)
    depths = depths_read(config, loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
    numbers = tuple(sorted({each for each in depths if each != FINAL}))
    target = FrozenTarget(loaded.model, numbers)
    if len(loaded.tokenizer) > target.vocabulary:
        raise ModelError(
            f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
            f"{target.vocabulary}"
        )
    begun = None if start is None else _learned(course.part, start)
    replies = Replies(loaded.tokenizer)
    stored = None
    if features is not None:
        stored = StoredBlocks(features, numbers, seed)
        stored.store.check_target(laid_out_from or loaded.folder)
    work = out / "run"
    with disk_trouble(out):
        claim = {**claim_of(recipe, sources, seed), "target": loaded.fingerprint, "shape": dict(course.shape)}
        if start is not None:
            claim["start"] = fingerprint(start)
        if stored is not None:
            claim["features"] = [shard.sha256 for shard in stored.store.index.shards]
        refuse_another(work, claim)
        write_claim(work, claim)

        def blocks_of(stage: Stage, place: Path) -> Mixture | StoredBlocks:
            if stored is not None:
                return stored
            told = replace(recipe, own_words=stage.own_words)
            text = [*scaled(sources, 1 - stage.own_words), *written(told, loaded.model, sources, place, seed)]
            block = min(recipe.block, target.longest or recipe.block)
            return Mixture(text, encoder(loaded.tokenizer), place / "tokens", block, target.vocabulary, seed)

        blocks = blocks_of(stages[0], work)
        tokens_of: Callable[[Tensor], Tensor] = torch.Tensor.flatten if stored is None else stored.tokens
        few = course.kept is not None and course.kept < target.vocabulary
        ids = None
        if few and begun is not None and begun.ids_K is not None and len(begun.ids_K) == course.kept:
            ids = begun.ids_K.tolist()
        elif few:
            ids = _kept(work, blocks, tokens_of, course.kept or 0, target.vocabulary)
        torch.manual_seed(seed)
        config = course.config(loaded.model.config, name, loaded.fingerprint, None if ids is None else len(ids))
        head = course.build(config, target, None if ids is None else torch.tensor(ids)).to(target.device)
        if begun is not None and start is not None:
            # rows of the target's head are nobody's weights here: others may be scored than before
            begin_as(head, begun, start, () if course.own_head else ("draft_vocab_size",))
        embedding_VW = head.embedding_of(target.model)
        shared_KW = None if course.own_head else head.lm_head_of(target.model)

        def head_of() -> Tensor:
            return head.lm_head_of(target.model) if shared_KW is None else shared_KW

        walks = {
            temperature: Walk(target, texts(name, prompts, temperature), depths, course.steps, course.unroll)
            for temperature in ((0.0, 1.0) if prompts else ())
        }

        def walked(temperature: float) -> float:
            return walks[temperature].tokens_per_step(head, embedding_VW, head_of())

        micro_batch = max(1, min(recipe.schedule.micro_batch, LOGITS // (blocks.block * target.vocabulary)))
        before = {temperature: walked(temperature) for temperature in walks}
        done: list[dict[str, Any]] = []
        for number, stage in enumerate(stages):
            place = work if not number else work / stage.name
            if number:
                place.mkdir(exist_ok=True)
                blocks = blocks_of(stage, place)
            beginning = blocks.state()
            counted = replies if stage.replies_only else AllPositions()
            lessons: Lessons
            if stored is not None:
                lessons = FromFeatures(target, counted, stored, depths)
            else:
                lessons = FromTokens(target, counted, depths)
            rates = (stage.rates or recipe.schedule.rates).scaled(rate)
            progress = trainer.fit(
                head,
                course.objective(lessons, embedding_VW, head_of, course.steps),
                blocks,
                replace(recipe.schedule, micro_batch=micro_batch, rates=rates, seed=seed),
                _part_of(bounds, stage.share),
                place / "checkpoints",
                report=report,
                device=target.device,
                checkpoint_every=checkpoint_every,
                measure=(lambda: f"{walked(0.0):.2f} tokens a step") if walks else None,
            )
            done.append(
                {
                    "name": stage.name,
                    "own_words": stage.own_words,
                    "replies_only": stage.replies_only and replies.known,
                    "rates": asdict(rates),
                    "steps": progress.step,
                    "tokens": progress.tokens,
                    "minutes": round(progress.seconds / 60, 1),
                    "walked": {_mode(each): round(walked(each), 3) for each in walks},
                    "mixture": blocks.report(),
                    "curve": progress.curve,
                }
            )
        head.eval()
        last = done[-1]
        record = {
            "method": recipe.name,
            "target": name,
            "target_fingerprint": loaded.fingerprint,
            **course.shape,
            "start": None if start is None else {"name": str(start), "fingerprint": fingerprint(start)},
            "depths": list(depths),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "draft_vocab_size": head.config.draft_vocab_size,
            "mlp_width": head.config.mlp_width,
            "unrolled_steps": course.steps,
            "block": blocks.block,
            "batch": recipe.schedule.batch,
            "bounds": asdict(bounds),
            "seed": seed,
            "objective": course.objective.name,
            "threads": torch.get_num_threads(),
            **{each: last[each] for each in ("own_words", "replies_only", "rates", "mixture", "curve")},
            "steps": sum(each["steps"] for each in done),
            "tokens": sum(each["tokens"] for each in done),
            "minutes": round(sum(each["minutes"] for each in done), 1),
            "walked": {
                _mode(each): {"before": round(before[each], 3), "after": last["walked"][_mode(each)]} for each in walks
            },
            **({"stages": done} if len(done) > 1 else {}),
            "provenance": provenance(arguments),
        }
        head.save(out)
        if course.read is not None:
            blocks.resume(beginning)
            count = last["steps"] * recipe.schedule.batch
            record["kept"] = course.read((tokens_of(blocks.next(1)).tolist() for _ in range(count)), out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _mode(temperature: float) -> str:
    return f"T={temperature:g}" if temperature else "greedy"


def _part_of(bounds: Bounds, share: float) -> Bounds:
    """The bounds of one stage."""
    if share == 1:
        return bounds
    return Bounds(
        tokens=None if bounds.tokens is None else max(1, round(bounds.tokens * share)),
        minutes=None if bounds.minutes is None else bounds.minutes * share,
    )


def _learned(part: type[TrainableNetwork], folder: Path) -> TrainableNetwork:
    """A trained head, to go on from.

    Raises:
        ModelError: there is none, it is of another kind, or it is damaged.
    """
    assert issubclass(part, LearnedPart)  # of another kind of head nobody asks for it
    found = part.load(folder)
    assert isinstance(found, TrainableNetwork)
    return found


def _kept(work: Path, blocks: Blocks, tokens_of: Callable[[Tensor], Tensor], size: int, vocabulary: int) -> list[int]:
    """The draft vocabulary of a run: chosen once, so that a resumed run has the same."""
    path = work / "draft_vocabulary.json"
    if not path.exists():
        write_whole(path, json.dumps(frequent(blocks, tokens_of, size, vocabulary)))
    found: list[int] = json.loads(path.read_text(encoding="utf-8"))
    return found
