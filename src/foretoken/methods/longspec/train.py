"""Training of LongSpec's head (network.py): short blocks at far positions first, then long ones where they are.

    token t of a block    reads itself, its own window, and the target's K* of tokens <= t - j    j drawn from 1..levels
                          is taught the target's law behind t, if a reply follows and t >= j
    positions             0 1 2 3 | 4 + o, 5 + o, ..    anchors, and an offset o of each block; the target has the same

Paper: arXiv:2502.17421, sections 3.2 (anchor-offset indices, flash noisy training) and 4.1 (stages).

Differs: the loss is the cross-entropy to the target's own law, where the paper's is that of the text, and half of the
text is by default the target's own (``own_words``): acceptance is measured against both. A gap counts by how often it
is reached, 0.8^(j-1); tokens before the j-th, which see no K*, do not count; gaps go up to the number of levels, where
the paper's tree is one deeper than its training. The head begins as layers of the target (``LongSpec.begin_near``). The
third stage of the paper (long answers) is part of the mixture. Rates, block lengths and shares are ours.

Letters: B sequences, T positions, N used positions, W width, G key/value heads, d head width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.forward import target_kv
from foretoken.methods.longspec.network import LEVELS, LongSpec, config_for
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is, load_config
from foretoken.train import sources as s
from foretoken.train import trainer
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Mixture, Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import (
    RECORD,
    Recipe,
    claim_of,
    disk_trouble,
    refuse_another,
    scaled,
    write_claim,
    written,
)
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.trainer import Blocks, Bounds, Schedule
from foretoken_lab.recipes import base

OWN_WORDS = 0.5
ANCHORS = 4  # first positions of a block, which keep their numbers: attention sinks live there
DECAY = 0.8  # of a gap's weight: how often one more drafted token is reached, about
HELD_OUT_TOKENS = 1 << 14
LOGITS = 1 << 25  # of one micro-batch, about: 128 MB of float32 for each law


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass of the loop over the head.

    Attributes:
        name: for the record, and of its folder.
        share: of the run's bounds.
        block: tokens of a block; shorter where the target's context is.
        batch: blocks of a step.
        rate: factor on the recipe's rates.
        offset: whether positions are moved.
    """

    name: str
    share: float
    block: int
    batch: int
    rate: float
    offset: bool


STAGES = (
    Stage(name="short", share=0.8, block=1024, batch=2, rate=1.0, offset=True),
    Stage(name="long", share=0.2, block=4096, batch=1, rate=0.3, offset=False),
)


def mixture(root: Path) -> list[Source]:
    """Half of it is long, or asks for what stands far back; the other half is that of the zoo's other heads."""
    return [
        s.hidden_keys(0.2, root),
        s.recall(0.1, root),
        s.corpus("qmsum", 0.2, root),
        *(replace(source, share=source.share * 0.5) for source in base.mixture(root)),
    ]


def recipe(target: str, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= own_words <= 1:
        raise ConfigError(f"--own-words {own_words}: a share must be from 0 to 1")
    return Recipe(
        name="longspec",
        description=f"LongSpec head of {target}",
        config=lambda tokenizer: load_config(target),
        sources=mixture,
        block=STAGES[0].block,
        schedule=Schedule(rates=Rates(muon=None, adamw=1e-3, warmup=0.03, decay=0.8)),
        bounds=Bounds(minutes=30),
        tokenizer=target,
        teacher=target,
        own_words=own_words,
    )


@dataclass(frozen=True)
class Lesson:
    """What one micro-batch teaches.

    Attributes:
        e_BTW: embedded tokens.
        keys_BGTd, values_BGTd: K* and V*.
        used_BT: bool, positions that count.
        target_BTW: what the target's head reads at all positions.
    """

    e_BTW: Tensor
    keys_BGTd: Tensor
    values_BGTd: Tensor
    used_BT: Tensor
    target_BTW: Tensor


class KeyedTarget(FrozenTarget):
    """A frozen target whose keys and values of one layer are read.

    Args:
        model, name: see :class:`FrozenTarget` and ``forward/target_kv.py``.
        replies: which positions count.
    """

    def __init__(self, model: Any, name: str, replies: Replies) -> None:
        super().__init__(model, ())
        self.far = target_kv.find(model, name)
        self._replies = replies

    @torch.no_grad()
    def lesson(self, tokens_BT: Tensor, positions_BT: Tensor) -> Lesson:
        """One forward of the target at the given positions."""
        kept = DynamicCache(config=self.model.config)
        with self._products():
            state_BTW = self.parts.body(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                # the library takes a skip for the beginning of another text, unless it is told that all is one
                attention_mask=torch.ones_like(tokens_BT),
                past_key_values=kept,
                use_cache=True,
            ).last_hidden_state
        layer = kept.layers[self.far.layer]
        used_BT = self._replies.used(tokens_BT)
        return Lesson(self.parts.embedding(tokens_BT), layer.keys, layer.values, used_BT, state_BTW)


class Noisy:
    """Cross-entropy to the target's law with keys that end a random number of tokens early.

        loss = sum over blocks of 0.8^(j-1) mean over used t >= j of -sum_v p(v) log q(v)  /  sum of 0.8^(j-1)

    Args:
        target: gives K*, V* and p; its head gives q.
        levels: gaps that are drawn.
        longest: positions lie below this; None: they are not moved.
    """

    name = "noisy_cross_entropy"

    def __init__(self, target: KeyedTarget, levels: int, longest: int | None) -> None:
        self._target, self._levels, self._longest = target, levels, longest

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        count, length = tokens_BT.shape
        gaps = (1 + torch.randint(self._levels, (count,), generator=generator)).tolist()
        positions_BT = torch.stack([self._positions(length, generator) for _ in gaps]).to(tokens_BT.device)
        lesson = self._target.lesson(tokens_BT, positions_BT)
        out_BTW = read(model, self._target, lesson, positions_BT, gaps)
        total, weights = out_BTW.sum() * 0.0, 0.0  # 0, with the gradient 0, where nothing counts
        for row, gap in enumerate(gaps):
            used_T = _counted(lesson.used_BT[row], gap)
            if not bool(used_T.any()):
                continue
            with torch.no_grad():
                p_NV = self._target.logits(lesson.target_BTW[row][used_T]).softmax(-1)
            loss = F.cross_entropy(self._target.logits(out_BTW[row][used_T]), p_NV)
            total, weights = total + DECAY ** (gap - 1) * loss, weights + DECAY ** (gap - 1)
        return total / max(weights, 1e-9)

    def _positions(self, length: int, generator: torch.Generator) -> Tensor:
        """Anchor-offset indices (section 3.2): the first ones stay, the others move together."""
        positions_T = torch.arange(length)
        if self._longest is not None and self._longest > length:
            positions_T[ANCHORS:] += torch.randint(self._longest - length + 1, (), generator=generator)
        return positions_T


def read(model: nn.Module, target: KeyedTarget, lesson: Lesson, positions_BT: Tensor, gaps: Sequence[int]) -> Tensor:
    """What the head reads for a lesson, [B, T, W]."""
    angles = [target.far.angles(positions_T) for positions_T in positions_BT]
    found: Tensor = model(lesson.e_BTW, angles, lesson.keys_BGTd, lesson.values_BGTd, gaps)
    return found


def _counted(used_T: Tensor, gap: int) -> Tensor:
    """Without the tokens that see no K*."""
    return used_T & (torch.arange(len(used_T), device=used_T.device) >= gap)


@torch.no_grad()
def judge(heads: dict[str, LongSpec], target: KeyedTarget, blocks: Blocks) -> dict[str, list[dict[str, float]] | None]:
    """How close heads are to the target on blocks that training never reads, where they are.

    Returns:
        for each head, gap by gap from 1: ``cross_entropy`` in nats; ``acceptance``, the expected share
        sum_v min(p(v), q(v)) of drafts that are accepted at temperature 1; ``top_1``, how often the target's favourite
        is the head's; and the ``positions`` that this is the mean over. None where nothing is held out.
    """
    levels = next(iter(heads.values())).config.levels
    sums = {name: torch.zeros(levels, 4, dtype=torch.float64) for name in heads}
    for tokens_T in blocks.held_out(max(1, HELD_OUT_TOKENS // blocks.block)):
        positions_1T = torch.arange(len(tokens_T), device=target.device)[None]
        lesson = target.lesson(tokens_T[None].to(target.device), positions_1T)
        for gap in range(1, levels + 1):
            used_T = _counted(lesson.used_BT[0], gap)
            if not bool(used_T.any()):
                continue
            p_NV = target.logits(lesson.target_BTW[0][used_T]).softmax(-1)
            for name, head in heads.items():
                rows_NW = read(head, target, lesson, positions_1T, [gap])[0][used_T]
                log_q_NV = target.logits(rows_NW).log_softmax(-1)
                same_N = log_q_NV.argmax(-1) == p_NV.argmax(-1)
                shared = torch.minimum(p_NV, log_q_NV.exp()).sum()
                counted = [float(-(p_NV * log_q_NV).sum()), float(shared), float(same_N.sum()), float(len(p_NV))]
                sums[name][gap - 1] += torch.tensor(counted, dtype=torch.float64)
    if not all(bool(total[:, 3].all()) for total in sums.values()):
        return dict.fromkeys(heads)
    names = ("cross_entropy", "acceptance", "top_1")
    found: dict[str, list[dict[str, float]] | None] = {}
    for name, total in sums.items():
        means = (total[:, :3] / total[:, 3:]).tolist()
        found[name] = [
            {**{each: round(value, 4) for each, value in zip(names, row, strict=True)}, "positions": int(count)}
            for row, count in zip(means, total[:, 3], strict=True)
        ]
    return found


def run(
    name: str,
    sources: Sequence[Source],
    out: Path,
    *,
    mlp_width: int | None = None,
    levels: int = LEVELS,
    start: Path | None = None,
    bounds: Bounds | None = None,
    own_words: float = OWN_WORDS,
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
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        mlp_width: of its MLP; None: the target's, or that of ``start``.
        levels: gaps that are trained, and tokens of a draft at most.
        start: the folder of a head to go on from, whatever target it was trained for; None: layers of the target.
        bounds: of both stages together; None: the recipe's.
        own_words: share of the text that the target writes.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rates.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
        MismatchError: the head to start from has another shape.
    """
    LongSpec.check_place(out)
    chosen = recipe(name, own_words)
    bounds = bounds or chosen.bounds
    begun = None if start is None else LongSpec.load(start)
    if begun is not None:
        mlp_width = mlp_width or begun.config.mlp_width
    loaded = load_as_is(name, device=device)
    replies = Replies(loaded.tokenizer)
    target = KeyedTarget(loaded.model, name, replies)
    if len(loaded.tokenizer) > target.vocabulary:
        raise ModelError(
            f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
            f"{target.vocabulary}"
        )
    shape = {"mlp_width": mlp_width, "levels": levels}
    torch.manual_seed(seed)
    config = config_for(loaded.model.config, name, loaded.fingerprint, target.far, **shape)
    head = LongSpec(config).to(target.device)
    if begun is None:
        head.draw()
        head.begin_near(target.model)
    else:
        head.go_on_from(begun, str(start))
    untrained, work, done = deepcopy(head), out / "run", []
    with disk_trouble(out):
        claim = {**claim_of(chosen, sources, seed), "target": loaded.fingerprint, "shape": shape}
        if start is not None:
            claim["start"] = fingerprint(start)
        refuse_another(work, claim)
        write_claim(work, claim)
        text = [*scaled(sources, 1 - own_words), *written(chosen, head, sources, work, seed)]
        for stage in STAGES:
            block = min(stage.block, config.max_length)
            place = work / stage.name
            blocks = Mixture(text, encoder(loaded.tokenizer), place / "tokens", block, target.vocabulary, seed)
            micro_batch = max(1, min(stage.batch, LOGITS // (block * target.vocabulary)))
            rates = chosen.schedule.rates.scaled(rate * stage.rate)
            objective = Noisy(target, levels, config.max_length if stage.offset else None)
            progress = trainer.fit(
                head,
                objective,
                blocks,
                Schedule(batch=stage.batch, micro_batch=micro_batch, rates=rates, seed=seed),
                _part_of(bounds, stage.share),
                place / "checkpoints",
                report=report,
                device=target.device,
                checkpoint_every=checkpoint_every,
            )
            done.append(
                {
                    **asdict(stage),
                    "block": block,
                    "rates": asdict(rates),
                    "steps": progress.step,
                    "tokens": progress.tokens,
                    "minutes": round(progress.seconds / 60, 1),
                    "mixture": blocks.report(),
                    "curve": progress.curve,
                }
            )
        # both at the end, on the same blocks: before it, what the target writes is not there yet
        held_out = judge({"before": untrained.eval(), "after": head.eval()}, target, blocks)
        record = {
            "method": "longspec",
            "target": name,
            "target_fingerprint": loaded.fingerprint,
            "start": None if start is None else str(start),
            "layer": config.layer,
            "levels": levels,
            "window": config.window,
            "mlp_width": config.mlp_width,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "own_words": own_words,
            "replies_only": replies.known,
            "bounds": asdict(bounds),
            "seed": seed,
            "objective": Noisy.name,
            "threads": torch.get_num_threads(),
            "steps": sum(each["steps"] for each in done),
            "tokens": sum(each["tokens"] for each in done),
            "minutes": round(sum(each["minutes"] for each in done), 1),
            "held_out": held_out,
            "stages": done,
            "provenance": provenance(arguments),
        }
        head.save(out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def _part_of(bounds: Bounds, share: float) -> Bounds:
    """The bounds of one stage."""
    return Bounds(
        tokens=None if bounds.tokens is None else max(1, round(bounds.tokens * share)),
        minutes=None if bounds.minutes is None else bounds.minutes * share,
    )
