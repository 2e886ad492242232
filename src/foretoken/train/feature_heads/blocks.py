"""The loss of a network that fills a block of slots in one pass: the target's distribution at every slot.

    loss = mean over slots j of all blocks, weighted e^(-(j - 1) / gamma), of  -sum over kept v of p_j(v) log q_j(v)

p_j is the target's distribution at slot j given the true text before it; q_j is the network's, given the text up
to the root. Many blocks of a text are computed at once; their roots are sampled among reply positions.

Paper: DFlash, arXiv:2602.06036 (position-weighted loss, random anchors). Differs: the loss uses the target's whole
distribution instead of its token, and covers every slot, also after a token that would have been rejected.

Letters: B sequences, T positions, A anchors of a sequence, k slots, N used positions, W width, K draft vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.train.feature_heads.batches import Batches
from foretoken.train.feature_heads.objective import HeadObjective

_ANCHORS = 32  # blocks of one sequence


class BlockLoss(HeadObjective):
    """Sum the loss over all slots; 0 where a micro-batch has no counted position. ``steps`` is k.

    The network has a method ``many_blocks``: (states [B, T, F], tokens [B, T], roots [B, A], embedding) -> inputs of
    the LM head, [B, A, k, W].
    """

    name = "block_cross_entropy"

    def __init__(self, batches: Batches, embedding_VW: Tensor, lm_head: Callable[[], Tensor], steps: int) -> None:
        self._batches, self._embedding_VW, self._lm_head, self._slots = batches, embedding_VW, lm_head, steps
        gamma = steps / 2  # DFlash: 4 for 8 slots, 7 for 16
        self._weight_k = torch.tensor([math.exp(-slot / gamma) for slot in range(steps)])

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        batch = self._batches(tokens_BT)
        used_BT = batch.used_BT
        device = used_BT.device
        row_BT = torch.full(used_BT.shape, -1, dtype=torch.int64, device=device)
        row_BT[used_BT] = torch.arange(int(used_BT.sum()), device=device)
        anchors_BA = _anchors(used_BT, generator)
        blocks: Any = model
        rows = blocks.many_blocks(batch.states_BTF, batch.tokens_BT, anchors_BA, self._embedding_VW)
        at_BAk = anchors_BA[..., None] + torch.arange(self._slots, device=device)  # row a + j - 1 is p_j
        inside = at_BAk < used_BT.shape[1]
        sequence = torch.arange(len(used_BT), device=device)[:, None, None]
        of_BAk = torch.where(inside, row_BT[sequence, at_BAk.clamp_max(used_BT.shape[1] - 1)], -1)
        taken = of_BAk >= 0
        if not bool(taken.any()):
            return rows.sum() * 0.0
        log_q_NK = (rows[taken] @ self._lm_head().T).log_softmax(-1)
        p_NK = batch.target_NV[of_BAk[taken]].softmax(-1)
        ids_K: Tensor | None = getattr(model, "ids_K", None)
        if ids_K is not None:
            p_NK = p_NK[:, ids_K.to(device)]
        weight_N = self._weight_k.to(device).expand(of_BAk.shape)[taken]
        return -(weight_N * (p_NK * log_q_NK).sum(-1)).sum() / weight_N.sum()


def _anchors(used_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Sample roots of blocks, int64 [B, A], without replacement; counted positions come first if there are enough."""
    counts = used_BT.clone()
    counts[:, 0] = False  # the first token has no row before it
    noise_BT = torch.rand(used_BT.shape, generator=generator).to(used_BT.device) + counts
    noise_BT[:, 0] = -1.0
    return noise_BT.topk(min(_ANCHORS, used_BT.shape[1] - 1), dim=-1).indices


def slot_by_slot(
    network: Any, states_BTF: Tensor, tokens_BT: Tensor, embedding_VW: Tensor, steps: int, wanted_BC: Tensor
) -> Iterator[Tensor]:
    """Yield slot after slot of the blocks of all columns, as unroll.py does for chains of pairs.

    For s = 0, 1, ..: the requested columns, [N, W]: slot s + 1 of the block with the root x_{c+1}.
    """
    length = tokens_BT.shape[1]
    anchors_BA = torch.arange(1, length, device=tokens_BT.device).expand(len(tokens_BT), -1)
    rows = network.many_blocks(states_BTF, tokens_BT, anchors_BA, embedding_VW)
    for step in range(min(steps, rows.shape[2], length - 1)):
        yield rows[:, :, step][wanted_BC]
