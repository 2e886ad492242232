"""The run that trains a draft network over a target's hidden states, from text or stored features, in stages.

A method gives a :class:`HeadTraining`; the loop, the folder, the claim on it and the record are the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
from foretoken.train.trainer import Bounds

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
    training.part.check_place(out)
    bounds = bounds or training.recipe.bounds
    trained = _Run(training, sources, out / "run", features=features, start=start, seed=seed, device=device)
    with disk_trouble(out):
        trained.claim()
        trained.begin(prompts)
        before = trained.expected()
        options = {"report": report, "checkpoint_every": checkpoint_every}
        stages = [trained.stage(number, bounds, rate, **options) for number in range(len(training.stages))]
        trained.network.eval()
        record = {
            **trained.record(),
            "bounds": asdict(bounds),
            **_all_stages(stages, before),
            "provenance": provenance(arguments),
        }
        trained.network.save(out)
        if training.keep is not None:
            record["kept"] = training.keep(trained.last_blocks(stages[-1]["steps"]), out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


class _Run:
    """The target, the text and the network of one run.

    Args:
        work: folder of tokens and checkpoints.

    Attributes:
        network: after :meth:`begin`.
    """

    network: TrainableNetwork

    def __init__(
        self,
        training: HeadTraining,
        sources: Sequence[Source],
        work: Path,
        *,
        features: Path | None,
        start: Path | None,
        seed: int,
        device: str,
    ) -> None:
        name = training.target
        self._training, self._sources, self._work, self._seed = training, sources, work, seed
        self._loaded = loaded = load_as_is(name, device=device)
        self._config = training.config(loaded.model.config, name, loaded.fingerprint)
        self._depths = depths_read(self._config, loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
        numbers = tuple(sorted({each for each in self._depths if each != FINAL}))
        self._target = FrozenTarget(loaded.model, numbers)
        if len(loaded.tokenizer) > self._target.vocabulary:
            raise ModelError(
                f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
                f"{self._target.vocabulary}"
            )
        self._start, self._first = start, None if start is None else _learned(training.part, start)
        self._replies = Replies(loaded.tokenizer)
        self._stored: StoredBlocks | None = None
        self._stages = training.stages
        if features is not None:
            self._stored = StoredBlocks(features, numbers, seed)
            self._stored.store.check_target(training.original or loaded.folder)
            self._stages = tuple(replace(each, own_words=0.0) for each in training.stages)
        self._lengths: dict[float, ExpectedLength] = {}

    def claim(self) -> None:
        """Refuse the folder of another run, and mark it as this one's."""
        training, recipe = self._training, self._training.recipe
        claim = {**claim_of(recipe, self._sources, self._seed), "target": self._loaded.fingerprint}
        claim["shape"] = dict(training.shape)
        if self._start is not None:
            claim["start"] = fingerprint(self._start)
        if self._stored is not None:
            claim["features"] = [shard.sha256 for shard in self._stored.store.index.shards]
        refuse_another(self._work, claim)
        write_claim(self._work, claim)

    def begin(self, prompts: Sequence[str]) -> None:
        """Build the network, and read the target's answers to held-out prompts."""
        training, target = self._training, self._target
        self._blocks = self._blocks_of(self._stages[0], self._work)
        ids = self._scored_ids()
        torch.manual_seed(self._seed)
        config = self._config if ids is None else replace(cast(Any, self._config), draft_vocab_size=len(ids))
        self.network = training.build(config, target, None if ids is None else torch.tensor(ids)).to(target.device)
        if self._first is not None and self._start is not None:
            # rows of the target's LM head are no weights of the network: it may score other tokens than before
            begin_as(self.network, self._first, self._start, () if training.own_rows else ("draft_vocab_size",))
        self._embedding_VW = self.network.embedding_of(target.model)
        self._shared_KW = None if training.own_rows else self.network.lm_head_of(target.model)
        for temperature in (0.0, 1.0) if prompts else ():
            answers = texts(training.target, prompts, temperature)
            self._lengths[temperature] = ExpectedLength(target, answers, self._depths, training.steps, training.unroll)

    def expected(self) -> dict[str, float]:
        """Tokens per step that are expected of the network now, by mode; none without prompts."""
        return {
            _mode(temperature): each.tokens_per_step(self.network, self._embedding_VW, self._lm_head())
            for temperature, each in self._lengths.items()
        }

    def stage(self, number: int, bounds: Bounds, rate: float, **options: Any) -> dict[str, Any]:
        """Run one stage.

        Args:
            bounds: of all stages together.
            rate: factor on the learning rates.
            options: of the training loop.
        Returns:
            its record.
        """
        training, stage, schedule = self._training, self._stages[number], self._training.recipe.schedule
        place = self._work / stage.name if number else self._work
        if number:
            place.mkdir(exist_ok=True)
            self._blocks = self._blocks_of(stage, place)
        blocks, rates = self._blocks, (stage.rates or schedule.rates).scaled(rate)
        self._beginning = blocks.state()
        micro_batch = max(1, min(schedule.micro_batch, LOGITS // (blocks.block * self._target.vocabulary)))
        progress = trainer.fit(
            self.network,
            training.objective(self._batches(stage), self._embedding_VW, self._lm_head, training.steps),
            blocks,
            replace(schedule, micro_batch=micro_batch, rates=rates, seed=self._seed),
            bounds.part(stage.share),
            place / "checkpoints",
            device=self._target.device,
            measure=(lambda: f"{self._greedy():.2f} tokens a step") if self._lengths else None,
            **options,
        )
        return {
            "name": stage.name,
            "own_words": stage.own_words,
            "replies_only": stage.replies_only and self._replies.known,
            "rates": asdict(rates),
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "walked": {mode: round(each, 3) for mode, each in self.expected().items()},
            "mixture": blocks.report(),
            "curve": progress.curve,
        }

    def record(self) -> dict[str, Any]:
        """What is known of the run besides its stages."""
        training, recipe, start = self._training, self._training.recipe, self._start
        return {
            "method": recipe.name,
            "target": recipe.teacher,
            "target_fingerprint": self._loaded.fingerprint,
            **training.shape,
            "start": None if start is None else {"name": str(start), "fingerprint": fingerprint(start)},
            "depths": list(self._depths),
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "draft_vocab_size": self.network.config.draft_vocab_size,
            "mlp_width": self.network.config.mlp_width,
            "unrolled_steps": training.steps,
            "block": self._blocks.block,
            "batch": recipe.schedule.batch,
            "seed": self._seed,
            "objective": training.objective.name,
            "threads": torch.get_num_threads(),
        }

    def last_blocks(self, steps: int) -> Iterator[list[int]]:
        """The tokens of the last stage, block by block, once more."""
        self._blocks.resume(self._beginning)
        for _ in range(steps * self._training.recipe.schedule.batch):
            yield self._tokens_of(self._blocks.next(1)).tolist()

    def _lm_head(self) -> Tensor:
        return self.network.lm_head_of(self._target.model) if self._shared_KW is None else self._shared_KW

    def _greedy(self) -> float:
        return self._lengths[0.0].tokens_per_step(self.network, self._embedding_VW, self._lm_head())

    def _blocks_of(self, stage: Stage, place: Path) -> Mixture | StoredBlocks:
        """The text of a stage."""
        if self._stored is not None:
            return self._stored
        recipe, loaded, sources = self._training.recipe, self._loaded, self._sources
        own = written(replace(recipe, own_words=stage.own_words), loaded.model, sources, place, self._seed)
        text = [*scaled(sources, 1 - stage.own_words), *own]
        block = min(recipe.block, self._target.longest or recipe.block)
        vocabulary = self._target.vocabulary
        return Mixture(text, encoder(loaded.tokenizer), place / "tokens", block, vocabulary, self._seed)

    def _batches(self, stage: Stage) -> Batches:
        counted = self._replies if stage.replies_only else AllPositions()
        if self._stored is not None:
            return FromFeatures(self._target, counted, self._stored, self._depths)
        return FromTokens(self._target, counted, self._depths)

    def _tokens_of(self, block: Tensor) -> Tensor:
        return block.flatten() if self._stored is None else self._stored.tokens(block)

    def _scored_ids(self) -> list[int] | None:
        """The draft vocabulary: of the network to go on from, or chosen once, so that a resumed run has the same."""
        count, vocabulary, first = self._training.num_scored, self._target.vocabulary, self._first
        if count is None or count >= vocabulary:
            return None
        if first is not None and first.ids_K is not None and len(first.ids_K) == count:
            return first.ids_K.tolist()
        path = self._work / "draft_vocabulary.json"
        if not path.exists():
            write_whole(path, json.dumps(frequent(self._blocks, self._tokens_of, count, vocabulary)))
        found: list[int] = json.loads(path.read_text(encoding="utf-8"))
        return found


def _all_stages(stages: list[dict[str, Any]], before: dict[str, float]) -> dict[str, Any]:
    """The record of all stages: settings and curve of the last one, sums of steps, tokens and minutes."""
    last = stages[-1]
    return {
        **{each: last[each] for each in ("own_words", "replies_only", "rates", "mixture", "curve")},
        "steps": sum(each["steps"] for each in stages),
        "tokens": sum(each["tokens"] for each in stages),
        "minutes": round(sum(each["minutes"] for each in stages), 1),
        "walked": {mode: {"before": round(each, 3), "after": last["walked"][mode]} for mode, each in before.items()},
        **({"stages": stages} if len(stages) > 1 else {}),
    }


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
