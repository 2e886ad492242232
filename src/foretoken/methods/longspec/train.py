"""Training of LongSpec's head (network.py): short blocks at large positions first, then long ones at their own.

    token t of a block    attends to its own window, and to the target's K* of tokens <= t - j    random j from
    1..levels
                          learns the target's distribution after t, if t + 1 belongs to a reply and t >= j
    positions             0 1 2 3 | 4 + o, 5 + o, ..    anchors, and an offset o of each block; also in the target

Paper: arXiv:2502.17421, sections 3.2 (anchor-offset indices, flash noisy training) and 4.1 (stages).

Differs: the loss is the cross-entropy to the target's distribution, while the paper uses the text; by default the
target generates half of the text (``own_words``), because acceptance is measured against both. The weight of a gap is
the approximate probability that drafting reaches it, 0.8^(j-1); tokens before the j-th have no visible K* and do not
count; gaps go up to the number of levels, while the paper's tree is one level deeper than its training. The head is
initialised from layers of the target (``LongSpec.begin_near``). The paper's third stage (long answers) is part of the
mixture. Rates, block lengths and shares are ours.

Letters: B sequences, T positions, N used positions, W width, G key/value heads, d head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from foretoken.forward import anatomy, target_kv
from foretoken.methods.longspec.network import LEVELS, LongSpec, config_for
from foretoken.methods.longspec.noisy import noisy_forward
from foretoken.models.load import load_as_is
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, part_recipe
from foretoken.train.rendering import encoder
from foretoken.train.replies import Replies
from foretoken.train.run import LoopOptions, TrainingRun, within_memory
from foretoken.train.sources import mixture
from foretoken.train.trainer import Blocks, Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

OWN_WORDS = 0.5
ANCHORS = 4  # first positions of a block, which have no offset: they are attention sinks
DECAY = 0.8  # weight of a gap relative to the previous one: approximate rate of one more drafted token
HELD_OUT_TOKENS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass of the training loop over the head.

    Attributes:
        name: in the record; also the name of its folder.
        share: of the run's bounds.
        block: tokens of a block; limited by the target's context.
        batch: blocks of a step.
        rate: factor on the recipe's rates.
        offset: whether positions have an offset.
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


def recipe(target: str, own_words: float = OWN_WORDS) -> Recipe:
    """Return the recipe of a training run, apart from the head's shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return part_recipe(
        "longspec",
        f"LongSpec head of {target}",
        target,
        own_words,
        sources=mixture("longspec"),
        block=STAGES[0].block,
        schedule=Schedule(rates=Rates(muon=None, adamw=1e-3, warmup=0.03, decay=0.8)),
    )


@dataclass(frozen=True)
class KeyedBatch:
    """One micro-batch, with the target's outputs.

    Attributes:
        e_BTW: embedded tokens.
        keys_BGTd, values_BGTd: K* and V*.
        used_BT: bool, counted positions.
        target_BTW: the target's last states, the inputs of its head.
    """

    e_BTW: Tensor
    keys_BGTd: Tensor
    values_BGTd: Tensor
    used_BT: Tensor
    target_BTW: Tensor


class KeyedTarget(FrozenTarget):
    """A frozen target that also returns the keys and values of one layer.

    Args:
        model, name: see :class:`FrozenTarget` and ``forward/target_kv.py``.
        replies: marks the counted positions.
    """

    def __init__(self, model: Any, name: str, replies: Replies) -> None:
        super().__init__(model, ())
        self.kv = target_kv.find(model, name)
        self._replies = replies

    @torch.no_grad()
    def batch(self, tokens_BT: Tensor, positions_BT: Tensor) -> KeyedBatch:
        """Run one forward of the target at the given positions."""
        kept = DynamicCache(config=self.model.config)
        with self._products():
            state_BTW = self.parts.body(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                # without a mask transformers treats a jump in positions as the start of another text
                attention_mask=torch.ones_like(tokens_BT),
                use_cache=True,
                **{anatomy.cache_argument(self.parts.body): kept},
            ).last_hidden_state
        layer = kept.layers[self.kv.layer]
        used_BT = self._replies.used(tokens_BT)
        return KeyedBatch(self.parts.embedding(tokens_BT), layer.keys, layer.values, used_BT, state_BTW)


class Noisy:
    """Cross-entropy to the target's distribution, with a random number of the last target keys hidden.

        loss = sum over blocks of 0.8^(j-1) mean over used t >= j of -sum_v p(v) log q(v)  /  sum of 0.8^(j-1)

    Args:
        target: computes K*, V* and p; its head computes q.
        levels: largest gap.
        longest: limit of positions with offset; None: no offsets.
    """

    name = "noisy_cross_entropy"

    def __init__(self, target: KeyedTarget, levels: int, longest: int | None) -> None:
        self._target, self._levels, self._longest = target, levels, longest

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        count, length = tokens_BT.shape
        gaps = (1 + torch.randint(self._levels, (count,), generator=generator)).tolist()
        positions_BT = torch.stack([self._positions(length, generator) for _ in gaps]).to(tokens_BT.device)
        batch = self._target.batch(tokens_BT, positions_BT)
        out_BTW = read(cast(LongSpec, model), self._target, batch, positions_BT, gaps)
        total, weights = out_BTW.sum() * 0.0, 0.0  # 0, with the gradient 0, without counted positions
        for row, gap in enumerate(gaps):
            used_T = _counted(batch.used_BT[row], gap)
            if not bool(used_T.any()):
                continue
            with torch.no_grad():
                p_NV = self._target.logits(batch.target_BTW[row][used_T]).softmax(-1)
            loss = F.cross_entropy(self._target.logits(out_BTW[row][used_T]), p_NV)
            total, weights = total + DECAY ** (gap - 1) * loss, weights + DECAY ** (gap - 1)
        return total / max(weights, 1e-9)

    def _positions(self, length: int, generator: torch.Generator) -> Tensor:
        """Draw anchor-offset indices (section 3.2): all positions but the anchors are moved by one offset."""
        positions_T = torch.arange(length)
        if self._longest is not None and self._longest > length:
            positions_T[ANCHORS:] += torch.randint(self._longest - length + 1, (), generator=generator)
        return positions_T


def read(net: LongSpec, target: KeyedTarget, batch: KeyedBatch, positions_BT: Tensor, gaps: Sequence[int]) -> Tensor:
    """Run the draft network on a batch; return the inputs of the target's head, [B, T, W]."""
    angles = [target.kv.angles(positions_T) for positions_T in positions_BT]
    return noisy_forward(net, batch.e_BTW, angles, batch.keys_BGTd, batch.values_BGTd, gaps)


def _counted(used_T: Tensor, gap: int) -> Tensor:
    """Exclude the tokens without visible K*."""
    return used_T & (torch.arange(len(used_T), device=used_T.device) >= gap)


@torch.no_grad()
def judge(heads: dict[str, LongSpec], target: KeyedTarget, blocks: Blocks) -> dict[str, list[dict[str, float]] | None]:
    """Measure the agreement of heads with the target on held-out blocks, without offsets.

    Returns:
        for each head, gap by gap from 1: ``cross_entropy`` in nats; ``acceptance``, the expected share
        sum_v min(p(v), q(v)) of accepted drafts at temperature 1; ``top_1``, how often the most probable token is the
        same; and the number of ``positions`` of these means. None if no block is held out.
    """
    levels = next(iter(heads.values())).config.levels
    sums = {name: torch.zeros(levels, 4, dtype=torch.float64) for name in heads}
    for tokens_T in blocks.held_out(max(1, HELD_OUT_TOKENS // blocks.block)):
        positions_1T = torch.arange(len(tokens_T), device=target.device)[None]
        batch = target.batch(tokens_T[None].to(target.device), positions_1T)
        for gap in range(1, levels + 1):
            used_T = _counted(batch.used_BT[0], gap)
            if not bool(used_T.any()):
                continue
            p_NV = target.logits(batch.target_BTW[0][used_T]).softmax(-1)
            for name, head in heads.items():
                rows_NW = read(head, target, batch, positions_1T, [gap])[0][used_T]
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
    own_words: float = OWN_WORDS,
    **loop: Unpack[LoopOptions],
) -> dict[str, Any]:
    """Train a head, or resume an interrupted run.

    Args:
        name: the target: zoo name, folder or hub id.
        out: the folder to write: ``config.json``, ``model.safetensors``, ``training.json``, and ``run/``.
        mlp_width: of its MLP; None: the target's, or that of ``start``.
        levels: gaps that are trained, and tokens of a draft at most.
        start: the folder of a head to start from, trained for any target; None: layers of the target.
        own_words: share of the text that the target generates.
        loop: see :class:`foretoken.train.run.TrainingRun`.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; its checkpoints are kept.
        MismatchError: the head to start from has another shape.
    """
    LongSpec.check_place(out)
    chosen = recipe(name, own_words)
    training = TrainingRun(chosen, sources, out, start=start, **loop)
    begun = None if start is None else LongSpec.load(start)
    if begun is not None:
        mlp_width = mlp_width or begun.config.mlp_width
    loaded = load_as_is(name, device=training.device)
    replies = Replies(loaded.tokenizer)
    target = KeyedTarget(loaded.model, name, replies)
    target.check_tokenizer(loaded.tokenizer, name)
    shape = {"mlp_width": mlp_width, "levels": levels}
    torch.manual_seed(training.seed)
    config = config_for(loaded.model.config, name, loaded.fingerprint, target.kv, **shape)
    head = LongSpec(config).to(target.device)
    if begun is None:
        head.draw()
        head.begin_near(target.model)
    else:
        head.go_on_from(begun, str(start))
    untrained = deepcopy(head)
    with training.claimed(loaded.fingerprint, {"shape": shape}, None):
        text = training.text(head)
        for stage in STAGES:
            place, block = training.work / stage.name, min(stage.block, config.max_length)
            blocks = training.mixture(text, encoder(loaded.tokenizer), target.vocabulary, block, place)
            rates = chosen.schedule.rates.scaled(stage.rate)
            schedule = Schedule(batch=stage.batch, micro_batch=stage.batch, rates=rates)
            training.fit(
                head,
                Noisy(target, levels, config.max_length if stage.offset else None),
                blocks,
                within_memory(schedule, block, target.vocabulary),
                place=place,
                share=stage.share,
                fields=asdict(stage),
            )
        # both at the end, on the same blocks: the text that the target generates does not exist before
        pair = {"before": untrained.eval(), "after": head.eval()}
        fields = {
            **training.part_fields(loaded.fingerprint),
            "start": None if start is None else str(start),
            "layer": config.layer,
            "levels": levels,
            "window": config.window,
            "mlp_width": config.mlp_width,
            "own_words": own_words,
            "replies_only": replies.known,
            "held_out": judge(pair, target, blocks),
        }
        record = training.record(head, Noisy.name, fields)
        head.save(out)
        training.save_record(record)
    return record
