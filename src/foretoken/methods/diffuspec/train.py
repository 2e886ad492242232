"""Training of the block network (network.py): the target's distribution at every slot, many blocks of a text at once.

    loss = mean over slots j of all blocks, weighted e^(-(j - 1) / gamma), of  -sum over kept v of p_j(v) log q_j(v)

p_j is the target's distribution at slot j given the true text before it; q_j is the network's, given the text up
to the root. A trigram model of the same text is stored with the network (trigram.py).

By default the texts are the target's own answers, both greedy and sampled; roots are sampled among reply positions.

Paper: DFlash, arXiv:2602.06036 (position-weighted loss, random anchors). Differs: the loss uses the target's whole
distribution instead of its token, and covers every slot, also after a token that would have been rejected.

Letters: B sequences, T positions, A anchors of a sequence, k slots, N used positions, W width, K draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.methods.diffuspec.command import Config
from foretoken.methods.diffuspec.many_blocks import many_blocks, unrolled
from foretoken.methods.diffuspec.network import BlockNetwork, BlockNetworkConfig
from foretoken.methods.diffuspec.trigram import FILE, Trigram
from foretoken.train.feature_heads.batches import Batches
from foretoken.train.feature_heads.objective import HeadObjective
from foretoken.train.feature_heads.training import HeadTraining, Stage, num_scored, recipe_for, vocabulary_of
from foretoken.train.frozen_target import FrozenTarget

TRIGRAM_LEAST = 2  # minimum number of occurrences of a triple
_ANCHORS = 32  # blocks of one sequence


class BlockLoss(HeadObjective):
    """Sum the loss over all slots; 0 where a micro-batch has no counted position. ``steps`` is k."""

    name = "block_cross_entropy"

    def __init__(self, batches: Batches, embedding_VW: Tensor, lm_head: Callable[[], Tensor], steps: int) -> None:
        self._batches, self._embedding_VW, self._lm_head = batches, embedding_VW, lm_head
        gamma = steps / 2  # DFlash: 4 for 8 slots, 7 for 16
        self._weight_k = torch.tensor([math.exp(-slot / gamma) for slot in range(steps)])

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        assert isinstance(model, BlockNetwork)
        batch = self._batches(tokens_BT)
        used_BT, slots = batch.used_BT, model.config.slots
        device = used_BT.device
        row_BT = torch.full(used_BT.shape, -1, dtype=torch.int64, device=device)
        row_BT[used_BT] = torch.arange(int(used_BT.sum()), device=device)
        anchors_BA = _anchors(used_BT, generator)
        rows = many_blocks(model, batch.states_BTF, batch.tokens_BT, anchors_BA, self._embedding_VW)
        at_BAk = anchors_BA[..., None] + torch.arange(slots, device=device)  # row a + j - 1 is p_j
        inside = at_BAk < used_BT.shape[1]
        sequence = torch.arange(len(used_BT), device=device)[:, None, None]
        of_BAk = torch.where(inside, row_BT[sequence, at_BAk.clamp_max(used_BT.shape[1] - 1)], -1)
        taken = of_BAk >= 0
        if not bool(taken.any()):
            return rows.sum() * 0.0
        log_q_NK = (rows[taken] @ self._lm_head().T).log_softmax(-1)
        p_NK = batch.target_NV[of_BAk[taken]].softmax(-1)
        if model.ids_K is not None:
            p_NK = p_NK[:, model.ids_K.to(device)]
        weight_N = self._weight_k.to(device).expand(of_BAk.shape)[taken]
        return -(weight_N * (p_NK * log_q_NK).sum(-1)).sum() / weight_N.sum()


def _anchors(used_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Sample roots of blocks, int64 [B, A], without replacement; counted positions come first if there are enough."""
    counts = used_BT.clone()
    counts[:, 0] = False  # the first token has no row before it
    noise_BT = torch.rand(used_BT.shape, generator=generator).to(used_BT.device) + counts
    noise_BT[:, 0] = -1.0
    return noise_BT.topk(min(_ANCHORS, used_BT.shape[1] - 1), dim=-1).indices


def training(options: Config) -> HeadTraining:
    """Return the network of the options, and its training.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than the draft vocabulary.
    """
    target = options.target

    def build(config: BlockNetworkConfig, target: FrozenTarget, ids_K: Tensor | None) -> BlockNetwork:
        network = BlockNetwork(config, ids_K=ids_K)
        network.draw()
        network.begin_near(target.model)
        return network

    def keep(blocks: Iterable[list[int]], folder: Path) -> dict[str, Any]:
        Trigram.fit(blocks, vocabulary_of(target), least=TRIGRAM_LEAST).save(folder)
        return {"trigram_bytes": (folder / FILE).stat().st_size, "trigram_least": TRIGRAM_LEAST}

    return HeadTraining(
        target=target,
        part=BlockNetwork,
        recipe=recipe_for("diffuspec", f"block network of {target}", target, options.share),
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.slots,
        config=partial(
            BlockNetwork.config_for,
            norm_heads=True,
            mlp_width=options.mlp_width,
            layers=options.layers,
            slots=options.slots,
        ),
        build=build,
        num_scored=num_scored(options),
        objective=BlockLoss,
        unroll=unrolled,
        keep=keep,
    )
