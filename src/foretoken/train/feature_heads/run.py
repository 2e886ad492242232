"""The run that trains a draft network over a target's hidden states, from text or stored features, in stages.

A method gives a :class:`HeadTraining`; the loop, the folder, the claim on it and the record are the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from foretoken.core.files import write_whole
from foretoken.core.phases import PHASES
from foretoken.drafting.feature_heads.state_network import TrainableNetwork
from foretoken.drafting.learned_part import LearnedPart
from foretoken.forward.hidden_states import FINAL, Depth
from foretoken.models.load import load_as_is
from foretoken.train.begin_as import begin_as
from foretoken.train.effort import Effort
from foretoken.train.feature_heads.batches import AllPositions, batches_of, depths_read, frequent
from foretoken.train.feature_heads.expected_length import ExpectedLength, Text, texts
from foretoken.train.feature_heads.objective import Unrolled
from foretoken.train.feature_heads.remembered import KEPT_TOKENS, Remembered
from foretoken.train.feature_heads.training import HeadTraining, Stage
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Mixture, Source
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.run import LoopOptions, TrainingRun, within_memory
from foretoken.train.sources import stored_features
from foretoken.train.trainer import Blocks, Bounds, StoredFeatures

if TYPE_CHECKING:
    from typing_extensions import Unpack


def run(
    training: HeadTraining,
    sources: Sequence[Source],
    out: Path,
    *,
    prompts: Sequence[str] = (),
    features: Path | None = None,
    start: Path | None = None,
    **loop: Unpack[LoopOptions],
) -> dict[str, Any]:
    """Train a network; continues where an interrupted run stopped.

    Args:
        sources: the text; not read if features are given.
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        prompts: held-out prompts; the network is tried on the target's answers while it trains (expected_length.py).
        features: folder of a feature store to train from instead.
        start: folder of a network of the same shape, or with a narrower MLP; its weights are the first ones here, and
            its tokens are scored again if the number is the same.
        loop: see :class:`foretoken.train.run.TrainingRun`.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; the last checkpoint is kept.
    """
    name, recipe = training.target, training.recipe
    training.part.check_place(out)
    this = TrainingRun(recipe, sources, out, start=start, **loop)
    stages = tuple(replace(each, own_words=0.0) if features is not None else each for each in training.stages)
    loaded = load_as_is(name, device=this.device)
    config = training.config(loaded.model.config, name, loaded.fingerprint)
    depths = depths_read(config, loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
    numbers = tuple(sorted({each for each in depths if each != FINAL}))
    target = FrozenTarget(loaded.model, numbers)
    target.check_tokenizer(loaded.tokenizer, name)
    begun = None if start is None else _learned(training.part, start)
    replies = Replies(loaded.tokenizer)
    original = training.original or loaded.folder
    stored = None if features is None else stored_features(features, numbers, this.seed, original)
    with this.claimed(loaded.fingerprint, {"shape": dict(training.shape)}, stored):

        def blocks_of(stage: Stage, place: Path) -> Mixture | StoredFeatures:
            if stored is not None:
                return stored
            text = this.text(loaded.model, place, stage.own_words)
            block = min(recipe.block, target.longest or recipe.block)
            return this.mixture(text, encoder(loaded.tokenizer), target.vocabulary, block, place)

        few = training.num_scored is not None and training.num_scored < target.vocabulary
        ids = None
        if few and begun is not None and begun.ids_K is not None and len(begun.ids_K) == training.num_scored:
            ids = begun.ids_K.tolist()
        elif few:
            PHASES.info("choosing the tokens that it scores")
            # of the given text: what the target says itself is written when it is trained on
            given = blocks_of(replace(stages[0], own_words=0.0), this.work)
            ids = _kept(this.work, given, _predicted(replies, stored), training.num_scored or 0, target, this.bounds)
        blocks = blocks_of(stages[0], this.work)
        torch.manual_seed(this.seed)
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

        untrained = deepcopy(network)
        judge = _Judge(training, target, prompts, depths, this.work)

        def expected(temperature: float, judged: TrainableNetwork = network) -> float:
            return judge(temperature).tokens_per_step(judged, embedding_VW, judged.lm_head_of(target.model))

        schedule = within_memory(recipe.schedule, blocks.block, target.vocabulary)
        for number, stage in enumerate(stages):
            place = this.work if not number else this.work / stage.name
            if number:
                place.mkdir(exist_ok=True)
                blocks = blocks_of(stage, place)
            beginning = blocks.state()
            batches = batches_of(target, replies if stage.replies_only else AllPositions(), stored, depths)
            kept = None
            if stored is None and issubclass(training.objective, Unrolled):
                batches = kept = Remembered(batches, place / "states", target.vocabulary)
            last = this.fit(
                network,
                training.objective(batches, embedding_VW, lm_head, training.steps),
                blocks,
                replace(schedule, rates=stage.rates or schedule.rates),
                place=place,
                share=stage.share,
                measure=(lambda: f"{expected(0.0):.2f} tokens a step") if prompts else None,
                usable=lambda: network.save(out),
                effort=_effort(training, network, target, schedule.micro_batch * blocks.block, kept, this.bounds),
                fields={
                    "name": stage.name,
                    "own_words": stage.own_words,
                    "replies_only": stage.replies_only and replies.known,
                },
            )
            last["walked"] = {_mode(each): round(expected(each), 3) for each in judge.temperatures}
            if kept is not None:
                kept.forget()
        network.eval()
        fields = {
            **this.part_fields(loaded.fingerprint),
            **training.shape,
            "depths": list(depths),
            "draft_vocab_size": network.config.draft_vocab_size,
            "mlp_width": network.config.mlp_width,
            "unrolled_steps": training.steps,
            **{each: last[each] for each in ("own_words", "replies_only")},
            "walked": {
                _mode(each): {"before": round(expected(each, untrained), 3), "after": last["walked"][_mode(each)]}
                for each in judge.temperatures
            },
        }
        record = this.record(network, training.objective.name, fields)
        network.save(out)
        if training.keep is not None:
            blocks.resume(beginning)
            count = last["steps"] * recipe.schedule.batch
            tokens_of: Callable[[Tensor], Tensor] = torch.Tensor.flatten if stored is None else stored.tokens
            record["kept"] = training.keep((tokens_of(blocks.next(1)).tolist() for _ in range(count)), out)
        this.save_record(record)
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


def _effort(
    training: HeadTraining,
    network: TrainableNetwork,
    target: FrozenTarget,
    positions: int,
    kept: Remembered | None,
    bounds: Bounds,
) -> Effort:
    """The products of a token that is read for the first time: the target's, and those of every unrolled step."""
    steps = 1 + (training.steps - 1) / training.objective.later
    read, trained = (sum(each.numel() for each in part.parameters()) for part in (target.parts.layers, network))
    again = steps * (6 * trained + 4 * network.config.draft_vocab_size * target.width)
    flops = 2 * (read + target.vocabulary * target.width) + again
    on_disk = 0 if kept is None else kept.most_bytes
    if bounds.tokens is not None:
        on_disk = min(on_disk, bounds.tokens * (2 * network.config.taps.count * target.width + 6 * KEPT_TOKENS))
    return Effort(flops, positions * target.vocabulary, on_disk, 0.0 if kept is None else again)


class _Judge:
    """The target's answers to held-out prompts, written when a network is first tried on them, and kept."""

    def __init__(
        self,
        training: HeadTraining,
        target: FrozenTarget,
        prompts: Sequence[str],
        depths: tuple[Depth, ...],
        work: Path,
    ) -> None:
        self.temperatures = (0.0, 1.0) if prompts else ()
        self._training, self._target, self._prompts, self._depths, self._work = training, target, prompts, depths, work
        self._made: dict[float, ExpectedLength] = {}

    def __call__(self, temperature: float) -> ExpectedLength:
        if temperature not in self._made:
            path = self._work / f"answers-{temperature:g}.json"
            if not path.exists():
                found = texts(self._training.target, self._prompts, temperature)
                write_whole(path, json.dumps([astuple(each) for each in found]))
            read = [Text(tuple(ids), *rest) for ids, *rest in json.loads(path.read_text(encoding="utf-8"))]
            self._made[temperature] = ExpectedLength(
                self._target, read, self._depths, self._training.steps, self._training.unroll
            )
        return self._made[temperature]


def _predicted(replies: Replies, stored: StoredFeatures | None) -> Callable[[Tensor], Tensor]:
    """Of a block, the tokens that a network is to predict."""
    tokens_of: Callable[[Tensor], Tensor] = torch.Tensor.flatten if stored is None else stored.tokens

    def of(block: Tensor) -> Tensor:
        tokens_T = tokens_of(block)
        return tokens_T[1:][replies.used(tokens_T[None])[0, :-1]]

    return of


def _kept(
    work: Path, blocks: Blocks, predicted: Callable[[Tensor], Tensor], size: int, target: FrozenTarget, bounds: Bounds
) -> list[int]:
    """The draft vocabulary of a run: chosen once, so that a resumed run has the same."""
    path = work / "draft_vocabulary.json"
    if not path.exists():
        write_whole(path, json.dumps(frequent(blocks, predicted, size, target.vocabulary, bounds.tokens)))
    return json.loads(path.read_text(encoding="utf-8"))
