"""Training of the block network (network.py): the target's distribution at every slot, many blocks of a text at once.

    loss = mean over slots j of all blocks, weighted e^(-(j - 1) / gamma), of  -sum over kept v of p_j(v) log q_j(v)

p_j is the target's distribution at slot j given the true text before it; q_j is the network's, which sees the text up
to the root. A trigram model of the same text is stored beside the network (trigram.py).

Texts are by default the target's own answers, both greedy and drawn; roots are drawn among the positions of replies.

Paper: DFlash, arXiv:2602.06036 (position-weighted loss, random anchors). Differs: the loss is against the whole
distribution of the target, not its token, and at every slot, also after one that would have been rejected.

Letters: B sequences, T positions, A anchors of a sequence, k slots, N used positions, W width, K draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.methods.diffuspec.many_blocks import many_blocks, unrolled
from foretoken.methods.diffuspec.network import (
    LAYERS,
    MOST_SLOTS,
    SLOTS,
    BlockNetwork,
    BlockNetworkConfig,
    config_for,
)
from foretoken.methods.diffuspec.trigram import FILE, Trigram
from foretoken.train.feature_heads.course import Course, HeadShape, Stage, recipe_for, vocabulary_of
from foretoken.train.feature_heads.lessons import Lessons
from foretoken.train.feature_heads.objective import HeadObjective
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.recipe import Recipe

TRIGRAM_LEAST = 2  # occurrences from which a triple is kept
_ANCHORS = 32  # blocks of one sequence


@dataclass(frozen=True, kw_only=True)
class Shape(HeadShape):
    """Sizes of the network to train.

    Attributes:
        layers: L.
        slots: k.
        draft_vocab_size: K; None: 4096, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
    """

    scored: ClassVar[int] = 4096

    layers: int = LAYERS
    slots: int = SLOTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.layers <= 32:
            raise ConfigError(f"--layers {self.layers}: from 1 to 32")
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"--slots {self.slots}: from 1 to {MOST_SLOTS}")


class BlockLoss(HeadObjective):
    """The loss of all slots; 0 where a micro-batch has no position that counts. ``steps`` is k."""

    name = "block_cross_entropy"

    def __init__(self, lessons: Lessons, embedding_VW: Tensor, head_of: Callable[[], Tensor], steps: int) -> None:
        self._lessons, self._embedding_VW, self._head_of = lessons, embedding_VW, head_of
        gamma = steps / 2  # DFlash: 4 for 8 slots, 7 for 16
        self._weight_k = torch.tensor([math.exp(-slot / gamma) for slot in range(steps)])

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, BlockNetwork)
        lesson = self._lessons(tokens_BT)
        used_BT, slots = lesson.used_BT, model.config.slots
        device = used_BT.device
        row_BT = torch.full(used_BT.shape, -1, dtype=torch.int64, device=device)
        row_BT[used_BT] = torch.arange(int(used_BT.sum()), device=device)
        anchors_BA = _anchors(used_BT, generator)
        rows = many_blocks(model, lesson.states_BTF, lesson.tokens_BT, anchors_BA, self._embedding_VW)
        at_BAk = anchors_BA[..., None] + torch.arange(slots, device=device)  # row a + j - 1 is p_j
        inside = at_BAk < used_BT.shape[1]
        sequence = torch.arange(len(used_BT), device=device)[:, None, None]
        of_BAk = torch.where(inside, row_BT[sequence, at_BAk.clamp_max(used_BT.shape[1] - 1)], -1)
        taken = of_BAk >= 0
        if not bool(taken.any()):
            return rows.sum() * 0.0
        log_q_NK = (rows[taken] @ self._head_of().T).log_softmax(-1)
        p_NK = lesson.target_NV[of_BAk[taken]].softmax(-1)
        if model.ids_K is not None:
            p_NK = p_NK[:, model.ids_K.to(device)]
        weight_N = self._weight_k.to(device).expand(of_BAk.shape)[taken]
        return -(weight_N * (p_NK * log_q_NK).sum(-1)).sum() / weight_N.sum()


def _anchors(used_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Roots of blocks, int64 [B, A], drawn without replacement; those that count come first where there are enough."""
    counts = used_BT.clone()
    counts[:, 0] = False  # the first token has nothing before it
    noise_BT = torch.rand(used_BT.shape, generator=generator).to(used_BT.device) + counts
    noise_BT[:, 0] = -1.0
    return noise_BT.topk(min(_ANCHORS, used_BT.shape[1] - 1), dim=-1).indices


def recipe(target: str, own_words: float) -> Recipe:
    """Return the recipe of a training run, apart from the network's shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return recipe_for("diffuspec", f"block network of {target}", target, own_words)


def course(target: str, shape: Shape, own_words: float) -> Course:
    """Describe the training of one network.

    Args:
        own_words: share of the text that the target generates.
    Raises:
        ConfigError: the share is out of range, or the target has fewer tokens than the network is to score.
    """

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> BlockNetworkConfig:
        return config_for(
            target,
            name,
            fingerprint,
            draft_vocab_size=size,
            mlp_width=shape.mlp_width,
            layers=shape.layers,
            slots=shape.slots,
            norm_heads=True,
        )

    def build(config: BlockNetworkConfig, target: FrozenTarget, ids_K: Tensor | None) -> BlockNetwork:
        network = BlockNetwork(config, ids_K=ids_K)
        network.draw()
        network.begin_near(target.model)
        return network

    def read(blocks: Iterable[list[int]], folder: Path) -> dict[str, Any]:
        Trigram.fit(blocks, vocabulary_of(target), least=TRIGRAM_LEAST).save(folder)
        return {"trigram_bytes": (folder / FILE).stat().st_size, "trigram_least": TRIGRAM_LEAST}

    return Course(
        part=BlockNetwork,
        recipe=recipe(target, own_words),
        stages=(Stage(own_words=own_words),),
        shape=asdict(shape),
        steps=shape.slots,
        config=config,
        build=build,
        kept=shape.kept(target),
        objective=BlockLoss,
        unroll=unrolled,
        read=read,
    )
