"""Training of Kangaroo's adapter (adapter.py): the target's first layers are taught to speak for all of them.

    tokens ── embedding ── layers[0] ─ … ─ layers[E-1] ── … ── layers[L-1] ── final norm ── head ── p
                                              └── adapter ─────────────────────────────── head ── q

Paper: arXiv:2404.18911, section 3.1. The target is frozen; the loss is the cross-entropy between full laws,
-sum_v p(v) log q(v), through the same frozen head with the target's own scaling and capping, averaged over the
positions that predict a reply (train/replies.py). Both laws are at temperature 1. No feature is regressed.

Differs: half of the text is by default the target's own (``own_words``), where the reference reads stored chats; the
target is run while the adapter is trained unless features were stored; the gradient is clipped by its norm (1.0), not
element by element (0.5); the mean is taken micro-batch by micro-batch; the adapter's last norm begins as the target's
final norm. AdamW (0.9, 0.95) and a linear schedule with warm-up are the reference's; the rate is ours, and so is the
weight decay (0.1).

Letters: B sequences, T positions, N rows, D width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foretoken.core.errors import ConfigError, ModelError, UnsupportedArchitecture
from foretoken.core.files import write_whole
from foretoken.core.provenance import provenance
from foretoken.forward import anatomy
from foretoken.forward.hidden_states import FINAL
from foretoken.methods.kangaroo.adapter import Adapter, AdapterConfig
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is, load_config
from foretoken.train import trainer
from foretoken.train.begin_as import begin_as
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
from foretoken.train.stored_blocks import StoredBlocks
from foretoken.train.trainer import Blocks, Bounds, Schedule
from foretoken_lab.recipes.base import mixture

OWN_WORDS = 0.5
RATE = 3e-3
HELD_OUT_BLOCKS = 32
AGREE = 3  # agreement is measured among so many favourites of the adapter
LOGITS = 1 << 25  # of one micro-batch, about: 128 MB of float32 for each law


def recipe(target: str, exit_layer: int, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the adapter's place.

    Args:
        target: zoo name, folder or hub id.
        exit_layer: layers of the target below the adapter.
        own_words: share of the text that the target writes.
    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= own_words <= 1:
        raise ConfigError(f"--own-words {own_words}: a share must be from 0 to 1")
    return Recipe(
        name="kangaroo",
        description=f"adapter of {target} after {exit_layer} layers",
        config=lambda tokenizer: load_config(target),
        sources=mixture,
        schedule=Schedule(batch=4, micro_batch=4, rates=Rates(muon=None, adamw=RATE, warmup=0.05, decay=0.95)),
        bounds=Bounds(minutes=30),
        tokenizer=target,
        teacher=target,
        own_words=own_words,
    )


class ExitTarget(FrozenTarget):
    """A frozen target that is read after E layers and behind its final norm.

    Args:
        model: see :class:`FrozenTarget`.
        exit_layer: E.
    Raises:
        ConfigError: the target is not as deep.
    """

    def __init__(self, model: Any, exit_layer: int) -> None:
        depth = len(anatomy.find(model).layers)
        if not 1 <= exit_layer < depth:
            raise ConfigError(
                f"--exit-layer {exit_layer}: must be from 1 to {depth - 1}, as the target has {depth} layers"
            )
        super().__init__(model, (exit_layer,))
        self.exit_layer = exit_layer


@dataclass(frozen=True)
class Lesson:
    """What one micro-batch teaches.

    Attributes:
        exit_BTD: the residual stream after E layers.
        used_BT: bool, positions that count.
        target_NV: logits of p at the used positions.
    """

    exit_BTD: Tensor
    used_BT: Tensor
    target_NV: Tensor


Lessons = Callable[[Tensor], Lesson]  # makes the lesson of one micro-batch of what a run reads, int64 [B, ...]


class FromTokens:
    """Lessons from tokens: the target is run on them."""

    def __init__(self, target: ExitTarget, replies: Replies) -> None:
        self._target, self._replies = target, replies

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> Lesson:
        states = self._target.states(tokens_BT)
        used_BT = self._replies.used(tokens_BT)
        return Lesson(states[self._target.exit_layer], used_BT, _laws(self._target, states[FINAL][used_BT]))


class FromFeatures:
    """Lessons from a feature store: the target's layers are not run, only its head, and not even that on all logits."""

    def __init__(self, target: ExitTarget, replies: Replies, stored: StoredBlocks) -> None:
        self._target, self._replies, self._stored = target, replies, stored

    @torch.no_grad()
    def __call__(self, numbers_B1: Tensor) -> Lesson:
        device, depth = self._target.device, self._target.exit_layer
        found = self._stored.sequences(numbers_B1.flatten().tolist())
        exit_BTD = pad_sequence([each.hidden[depth].float() for each in found], batch_first=True).to(device)
        used_BT = torch.zeros(exit_BTD.shape[:2], dtype=torch.bool)
        for used_T, each in zip(used_BT, found, strict=True):  # sequence by sequence: padding is nobody's reply
            used_T[: len(each)] = self._replies.used(each.tokens_N[None])[0]
        rows = [used_T[: len(each)] for used_T, each in zip(used_BT, found, strict=True)]
        if FINAL in found[0].hidden:
            final_ND = torch.cat([each.hidden[FINAL][taken] for each, taken in zip(found, rows, strict=True)])
            target_NV = _laws(self._target, final_ND.float().to(device))
        else:
            stored = [(each.logits_NV, taken) for each, taken in zip(found, rows, strict=True)]
            target_NV = torch.cat([logits[taken] for logits, taken in stored if logits is not None]).float().to(device)
        return Lesson(exit_BTD, used_BT.to(device), target_NV)


def _laws(target: FrozenTarget, rows_ND: Tensor) -> Tensor:
    """The head's logits; [0, V] for no rows."""
    return target.logits(rows_ND) if len(rows_ND) else rows_ND.new_zeros(0, target.vocabulary)


class FullLaw:
    """-sum_v p(v) log q(v), the mean over the used positions; 0 where a micro-batch has none.

    Args:
        target: its head gives q.
        lessons: gives p, and what the adapter reads.
    """

    name = "cross_entropy"

    def __init__(self, target: FrozenTarget, lessons: Lessons) -> None:
        self._target, self._lessons = target, lessons

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        lesson = self._lessons(tokens_BT)
        out_ND = model(lesson.exit_BTD)[lesson.used_BT]
        if not len(out_ND):
            return out_ND.sum()  # 0, with the gradient 0
        return F.cross_entropy(self._target.logits(out_ND), lesson.target_NV.softmax(-1))


@torch.no_grad()
def judge(
    adapters: Mapping[str, Adapter],
    target: FrozenTarget,
    lessons: Lessons,
    blocks: Blocks,
    count: int,
    micro_batch: int,
) -> dict[str, dict[str, float] | None]:
    """How close adapters are to the target on blocks that training never reads.

    Returns:
        for each adapter: ``cross_entropy`` in nats; ``acceptance``, the expected share sum_v min(p(v), q(v)) of drafts
        that are accepted at temperature 1; ``top_k``, how often the target's favourite is among the adapter's k; and
        the ``positions`` that this is the mean over. None where nothing is held out.
    """
    sums = {name: torch.zeros(2 + AGREE, dtype=torch.float64) for name in adapters}
    positions = 0
    for chunk in blocks.held_out(count).split(micro_batch):
        lesson = lessons(chunk.to(target.device))
        if not len(lesson.target_NV):
            continue
        p_NV, favourite_N = lesson.target_NV.softmax(-1), lesson.target_NV.argmax(-1)
        positions += len(p_NV)
        for name, adapter in adapters.items():
            log_q_NV = target.logits(adapter(lesson.exit_BTD)[lesson.used_BT]).log_softmax(-1)
            agrees_NK = log_q_NV.topk(AGREE, dim=-1).indices == favourite_N[:, None]
            found = [-(p_NV * log_q_NV).sum(), torch.minimum(p_NV, log_q_NV.exp()).sum()]
            found += list(agrees_NK.cumsum(-1).sum(0))
            sums[name] += torch.stack([each.double().cpu() for each in found])
    if not positions:
        return dict.fromkeys(adapters)
    names = ("cross_entropy", "acceptance", *(f"top_{k + 1}" for k in range(AGREE)))
    means = {name: [round(value, 4) for value in (total / positions).tolist()] for name, total in sums.items()}
    return {name: {**dict(zip(names, found, strict=True)), "positions": positions} for name, found in means.items()}


def adopt_norm(adapter: Adapter, final_norm: nn.Module) -> None:
    """Begin near an early exit without weights of its own: norm_out becomes the final norm.

    A final norm that is no RMSNorm of either kind (weight or 1 + weight) is left alone.
    """
    gain_D = anatomy.gain_of(final_norm)
    if gain_D is not None and gain_D.shape == adapter.norm_out.weight.shape:
        with torch.no_grad():
            adapter.norm_out.weight.copy_(gain_D)


def build(config: Any, target: ExitTarget, name: str, fingerprint: str) -> Adapter:
    """The untrained adapter, float32, drawn from torch's generator.

    Args:
        config: the target's.
        name: what the target is called.
    Raises:
        UnsupportedArchitecture: the target has no attention whose shape could be taken.
    """
    try:
        adapter = Adapter(AdapterConfig.for_target(config, target.exit_layer, name, fingerprint))
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{name}: no adapter fits it ({error})") from None
    adopt_norm(adapter, target.parts.final_norm)
    return adapter


def run(
    name: str,
    exit_layer: int,
    sources: Sequence[Source],
    out: Path,
    *,
    bounds: Bounds | None = None,
    own_words: float = OWN_WORDS,
    features: Path | None = None,
    start: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    report: trainer.Report = lambda progress: None,
    arguments: Sequence[str] = (),
    checkpoint_every: float = trainer.CHECKPOINT_SECONDS,
    rate: float = 1.0,
) -> dict[str, Any]:
    """Train an adapter; goes on where an interrupted run stopped.

    Args:
        name: of the target: zoo name, folder or hub id.
        exit_layer: E.
        sources: the text; not read if features are given.
        out: the folder to make: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        bounds: None: the recipe's.
        own_words: share of the text that the target writes; nothing is written if features are given.
        features: folder of a feature store to train from instead.
        start: folder of an adapter of the same shape, whose weights this one begins with.
        arguments: the command line, for the record.
        checkpoint_every: seconds between two checkpoints.
        rate: factor on the learning rate.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    Adapter.check_place(out)
    chosen = recipe(name, exit_layer, 0.0 if features else own_words)
    bounds = bounds or chosen.bounds
    loaded = load_as_is(name, device=device)
    target = ExitTarget(loaded.model, exit_layer)
    if len(loaded.tokenizer) > target.vocabulary:
        raise ModelError(
            f"vocabulary mismatch: the tokenizer of {name} has {len(loaded.tokenizer)} entries, its model "
            f"{target.vocabulary}"
        )
    replies = Replies(loaded.tokenizer)
    torch.manual_seed(seed)
    adapter = build(loaded.model.config, target, name, loaded.fingerprint).to(target.device)
    if start is not None:
        begin_as(adapter, Adapter.load(start), start)
    stored = None
    if features is not None:
        stored = StoredBlocks(features, (exit_layer,), seed)
        stored.store.check_target(loaded.folder)
    work = out / "run"
    with disk_trouble(out):
        claim = {**claim_of(chosen, sources, seed), "target": loaded.fingerprint, "exit layer": exit_layer}
        if start is not None:
            claim["start"] = fingerprint(start)
        if stored is not None:
            claim["features"] = [shard.sha256 for shard in stored.store.index.shards]
        refuse_another(work, claim)
        write_claim(work, claim)
        lessons: Lessons
        blocks: Blocks | Any
        if stored is not None:
            blocks, lessons = stored, FromFeatures(target, replies, stored)
        else:
            text = [*scaled(sources, 1 - own_words), *written(chosen, adapter, sources, work, seed)]
            block = min(chosen.block, target.longest or chosen.block)
            encode = encoder(loaded.tokenizer)
            blocks = Mixture(text, encode, work / "tokens", block, target.vocabulary, seed)
            lessons = FromTokens(target, replies)
        micro_batch = max(1, min(chosen.schedule.micro_batch, LOGITS // (blocks.block * target.vocabulary)))
        rates = chosen.schedule.rates.scaled(rate)
        schedule = replace(chosen.schedule, micro_batch=micro_batch, rates=rates, seed=seed)
        untrained = deepcopy(adapter)
        objective = FullLaw(target, lessons)
        progress = trainer.fit(
            adapter,
            objective,
            blocks,
            schedule,
            bounds,
            work / "checkpoints",
            report=report,
            device=target.device,
            checkpoint_every=checkpoint_every,
        )
        # both at the end, on the same blocks: before it, what the target writes is not there yet
        pair = {"before": untrained.eval(), "after": adapter.eval()}
        held_out = judge(pair, target, lessons, blocks, HELD_OUT_BLOCKS, micro_batch)
        record = {
            "method": "kangaroo",
            "target": name,
            "target_fingerprint": loaded.fingerprint,
            "exit_layer": exit_layer,
            "start": None if start is None else {"name": str(start), "fingerprint": fingerprint(start)},
            "parameters": sum(parameter.numel() for parameter in adapter.parameters()),
            "own_words": chosen.own_words,
            "replies_only": replies.known,
            "block": blocks.block,
            "batch": schedule.batch,
            "rates": asdict(rates),
            "bounds": asdict(bounds),
            "seed": seed,
            "objective": objective.name,
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "threads": torch.get_num_threads(),
            "held_out": held_out,
            "mixture": blocks.report(),
            "curve": progress.curve,
            "provenance": provenance(arguments),
        }
        adapter.save(out)
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record
