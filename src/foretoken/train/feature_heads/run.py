"""The run that trains a draft network over a target's hidden states, from text or stored features, in stages.

A method gives a :class:`HeadTraining`; the loop, the folder, the claim on it and the record are the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

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
from foretoken.train.feature_heads.batches import AllPositions, Batches, FromFeatures, FromTokens, depths_read, frequent
from foretoken.train.feature_heads.expected_length import ExpectedLength, texts
from foretoken.train.feature_heads.training import HeadTraining, Stage
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
    training: HeadTraining,
    sources: Sequence[Source],
    out: Path,
    *,
    prompts: Sequence[str] = (),
    bounds: Bounds | None = None,
    features: Path | None = None,
    start: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    report: trainer.Report = lambda progress: None,
    arguments: Sequence[str] = (),
    checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
    rate: float = 1.0,
) -> dict[str, Any]:
    """Train a network; continues where an interrupted run stopped.

    Args:
        sources: the text; not read if features are given.
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        prompts: held-out prompts; the network is tried on the target's answers while it trains (expected_length.py).
        bounds: of all stages together; None: the recipe's.
        features: folder of a feature store to train from instead.
        start: folder of a network of the same shape, or with a narrower MLP; its weights are the first ones here, and
            its tokens are scored again if the number is the same.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rates.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; the last checkpoint is kept.
    """
    name = training.target
    training.part.check_place(out)
    recipe, bounds = training.recipe, bounds or training.recipe.bounds
    stages = tuple(replace(each, own_words=0.0) if features is not None else each for each in training.stages)
    loaded = load_as_is(name, device=device)
    config = training.config(loaded.model.config, name, loaded.fingerprint)
    depths = depths_read(config, loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
    numbers = tuple(sorted({each for each in depths if each != FINAL}))
    target = FrozenTarget(loaded.model, numbers)
    if len(loaded.tokenizer) > target.vocabulary:
        raise ModelError(
            f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
            f"{target.vocabulary}"
        )
    begun = None if start is None else _learned(training.part, start)
    replies = Replies(loaded.tokenizer)
    stored = None
    if features is not None:
        stored = StoredBlocks(features, numbers, seed)
        stored.store.check_target(training.original or loaded.folder)
    work = out / "run"
    with disk_trouble(out):
        claim = {**claim_of(recipe, sources, seed), "target": loaded.fingerprint, "shape": dict(training.shape)}
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
        few = training.num_scored is not None and training.num_scored < target.vocabulary
        ids = None
        if few and begun is not None and begun.ids_K is not None and len(begun.ids_K) == training.num_scored:
            ids = begun.ids_K.tolist()
        elif few:
            ids = _kept(work, blocks, tokens_of, training.num_scored or 0, target.vocabulary)
        torch.manual_seed(seed)
        if ids is not None:
            config = replace(cast(Any, config), draft_vocab_size=len(ids))
        network = training.build(config, target, None if ids is None else torch.tensor(ids)).to(target.device)
        if begun is not None and start is not None:
            # rows of the target's LM head are no weights of the network: it may score other tokens than before
            begin_as(network, begun, start, () if training.own_rows else ("draft_vocab_size",))
        embedding_VW = network.embedding_of(target.model)
        shared_KW = None if training.own_rows else network.lm_head_of(target.model)

        def lm_head() -> Tensor:
            return network.lm_head_of(target.model) if shared_KW is None else shared_KW

        lengths = {
            temperature: ExpectedLength(
                target, texts(name, prompts, temperature), depths, training.steps, training.unroll
            )
            for temperature in ((0.0, 1.0) if prompts else ())
        }

        def expected(temperature: float) -> float:
            return lengths[temperature].tokens_per_step(network, embedding_VW, lm_head())

        micro_batch = max(1, min(recipe.schedule.micro_batch, LOGITS // (blocks.block * target.vocabulary)))
        before = {temperature: expected(temperature) for temperature in lengths}
        done: list[dict[str, Any]] = []
        for number, stage in enumerate(stages):
            place = work if not number else work / stage.name
            if number:
                place.mkdir(exist_ok=True)
                blocks = blocks_of(stage, place)
            beginning = blocks.state()
            counted = replies if stage.replies_only else AllPositions()
            batches: Batches
            if stored is not None:
                batches = FromFeatures(target, counted, stored, depths)
            else:
                batches = FromTokens(target, counted, depths)
            rates = (stage.rates or recipe.schedule.rates).scaled(rate)
            progress = trainer.fit(
                network,
                training.objective(batches, embedding_VW, lm_head, training.steps),
                blocks,
                replace(recipe.schedule, micro_batch=micro_batch, rates=rates, seed=seed),
                bounds.part(stage.share),
                place / "checkpoints",
                report=report,
                device=target.device,
                checkpoint_every=checkpoint_every,
                measure=(lambda: f"{expected(0.0):.2f} tokens a step") if lengths else None,
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
                    "walked": {_mode(each): round(expected(each), 3) for each in lengths},
                    "mixture": blocks.report(),
                    "curve": progress.curve,
                }
            )
        network.eval()
        last = done[-1]
        record = {
            "method": recipe.name,
            "target": recipe.teacher,
            "target_fingerprint": loaded.fingerprint,
            **training.shape,
            "start": None if start is None else {"name": str(start), "fingerprint": fingerprint(start)},
            "depths": list(depths),
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "draft_vocab_size": network.config.draft_vocab_size,
            "mlp_width": network.config.mlp_width,
            "unrolled_steps": training.steps,
            "block": blocks.block,
            "batch": recipe.schedule.batch,
            "bounds": asdict(bounds),
            "seed": seed,
            "objective": training.objective.name,
            "threads": torch.get_num_threads(),
            **{each: last[each] for each in ("own_words", "replies_only", "rates", "mixture", "curve")},
            "steps": sum(each["steps"] for each in done),
            "tokens": sum(each["tokens"] for each in done),
            "minutes": round(sum(each["minutes"] for each in done), 1),
            "walked": {
                _mode(each): {"before": round(before[each], 3), "after": last["walked"][_mode(each)]}
                for each in lengths
            },
            **({"stages": done} if len(done) > 1 else {}),
            "provenance": provenance(arguments),
        }
        network.save(out)
        if training.keep is not None:
            blocks.resume(beginning)
            count = last["steps"] * recipe.schedule.batch
            record["kept"] = training.keep((tokens_of(blocks.next(1)).tolist() for _ in range(count)), out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _mode(temperature: float) -> str:
    return f"T={temperature:g}" if temperature else "greedy"


def _learned(part: type[TrainableNetwork], folder: Path) -> TrainableNetwork:
    """A trained network, to go on from.

    Raises:
        ModelError: there is none, it is of another kind, or it is damaged.
    """
    assert issubclass(part, LearnedPart)  # other networks have no option for it
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
