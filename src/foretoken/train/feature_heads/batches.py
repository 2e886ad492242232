"""Training batches of draft networks: the target's states and distributions, computed or read from a store.

Letters: B sequences, T positions, N used positions, F width of the fused depths, K draft vocabulary, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.drafting.feature_heads.state_network import NetworkConfig
from foretoken.forward.hidden_states import FINAL, Depth
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.trainer import Blocks, StoredFeatures

BY_COVERAGE = 0
COVERAGE = 0.985  # of the predicted tokens; of other text as long as that counted, some percent less
STEP = 256
_COUNTED = 1 << 17  # tokens that the draft vocabulary is chosen from; fewer miss rare ones: 1 << 15 covered 3 % less


@dataclass(frozen=True)
class TrainingBatch:
    """One micro-batch.

    Attributes:
        tokens_BT: x; padding is 0, and never used.
        states_BTF: the target's states, the depths side by side.
        used_BT: bool, positions that count.
        target_NV: the target's logits at the used positions.
        top: where these are not kept: of each used position, the most probable tokens and their log-probabilities.
    """

    tokens_BT: Tensor
    states_BTF: Tensor
    used_BT: Tensor
    target_NV: Tensor
    top: tuple[Tensor, Tensor] | None = None

    def p_NK(self, ids_K: Tensor | None) -> Tensor:
        """The target's probabilities of some tokens (None: all) at the used positions; the others have the rest."""
        if self.top is None:
            if ids_K is None:
                return self.target_NV.softmax(-1)
            ids_K = ids_K.to(self.target_NV.device)
            return (self.target_NV[:, ids_K] - self.target_NV.logsumexp(-1, keepdim=True)).exp_()
        place_NM, log_p_NM = self.top
        p_NM = log_p_NM.exp()
        size = self.target_NV.shape[1]
        if ids_K is not None:
            size = len(ids_K)
            ids_K, ids_NM = ids_K.to(place_NM.device), place_NM
            place_NM = torch.searchsorted(ids_K, ids_NM).clamp_max_(size - 1)
            p_NM = p_NM * (ids_K[place_NM] == ids_NM)
        return p_NM.new_zeros(len(p_NM), size).scatter_add_(1, place_NM, p_NM)


Batches = Callable[[Tensor], TrainingBatch]


class CountedPositions(Protocol):
    """Decides which positions count; train/replies.py does."""

    def used(self, tokens_BT: Tensor) -> Tensor:
        """bool [B, T]."""
        ...


class AllPositions:
    """All but the last of a block, because its next token is missing."""

    def used(self, tokens_BT: Tensor) -> Tensor:
        """bool [B, T]."""
        used_BT = torch.ones(tokens_BT.shape, dtype=torch.bool, device=tokens_BT.device)
        used_BT[:, -1] = False
        return used_BT


def depths_read(config: NetworkConfig, num_layers: int) -> tuple[Depth, ...]:
    """The states that a network reads, in the order in which they are fused."""
    return (FINAL,) if config.taps.final else config.taps.of(num_layers)


class FromTokens:
    """Batches from tokens: the target is run on them.

    Args:
        depths: see :func:`depths_read`.
    """

    def __init__(self, target: FrozenTarget, replies: CountedPositions, depths: tuple[Depth, ...]) -> None:
        self._target, self._replies, self._depths = target, replies, depths

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> TrainingBatch:
        states = self._target.states(tokens_BT)
        used_BT = self._replies.used(tokens_BT)
        states_BTF = torch.cat([states[depth] for depth in self._depths], dim=-1)
        return TrainingBatch(tokens_BT, states_BTF, used_BT, target_logits(self._target, states[FINAL][used_BT]))


class FromFeatures:
    """Batches from a feature store: only the target's LM head is run, and not even that if logits are stored."""

    def __init__(
        self, target: FrozenTarget, replies: CountedPositions, stored: StoredFeatures, depths: tuple[Depth, ...]
    ) -> None:
        self._target, self._replies, self._stored, self._depths = target, replies, stored, depths

    @torch.no_grad()
    def __call__(self, numbers_B1: Tensor) -> TrainingBatch:
        device = self._target.device
        found = self._stored.sequences(numbers_B1.flatten().tolist())
        states = [torch.cat([each.hidden[depth].float() for depth in self._depths], dim=-1) for each in found]
        tokens_BT = pad_sequence([each.tokens_N.long() for each in found], batch_first=True)
        used_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        for used_T, each in zip(used_BT, found, strict=True):  # sequence by sequence: padding belongs to no reply
            used_T[: len(each)] = self._replies.used(each.tokens_N[None])[0]
        rows = [used_T[: len(each)] for used_T, each in zip(used_BT, found, strict=True)]
        if FINAL in found[0].hidden:
            final_ND = torch.cat([each.hidden[FINAL][taken] for each, taken in zip(found, rows, strict=True)])
            target_NV = target_logits(self._target, final_ND.float().to(device))
        else:
            stored = [(each.logits_NV, taken) for each, taken in zip(found, rows, strict=True)]
            target_NV = torch.cat([logits[taken] for logits, taken in stored if logits is not None]).float().to(device)
        states_BTF = pad_sequence(states, batch_first=True).to(device)
        return TrainingBatch(tokens_BT.to(device), states_BTF, used_BT.to(device), target_NV)


def batches_of(
    target: FrozenTarget, counted: CountedPositions, stored: StoredFeatures | None, depths: tuple[Depth, ...]
) -> Batches:
    """Return batches from a feature store, or from tokens where there is none."""
    if stored is None:
        return FromTokens(target, counted, depths)
    return FromFeatures(target, counted, stored, depths)


def target_logits(target: FrozenTarget, rows_ND: Tensor) -> Tensor:
    """Logits of the target's LM head; [0, V] for no rows."""
    return target.logits(rows_ND) if len(rows_ND) else rows_ND.new_zeros(0, target.vocabulary)


def frequent(
    blocks: Blocks, tokens_of: Callable[[Tensor], Tensor], count: int, vocabulary: int, most: int | None = None
) -> list[int]:
    """The most frequent tokens at the beginning of a run's text, increasing; the position in the text is restored.

    Args:
        tokens_of: a block -> those of its tokens that are predicted, int64 [N].
        count: K; BY_COVERAGE: as many, in steps of ``STEP``, as make up ``COVERAGE`` of the predicted ones.
        vocabulary: V; if fewer than K tokens occur, the lowest other ids are added.
        most: tokens of the text that are read.
    """
    state = blocks.state()
    seen: Counter[int] = Counter()
    for _ in range(max(1, min(most or _COUNTED, _COUNTED) // blocks.block)):
        seen.update(tokens_of(blocks.next(1)).tolist())
    blocks.resume(state)
    order = sorted(range(vocabulary), key=lambda token: (-seen[token], token))
    if count == BY_COVERAGE:
        covered, wanted = list(itertools.accumulate(seen[token] for token in order)), COVERAGE * seen.total()
        enough = next(place for place, sum_ in enumerate(covered, 1) if sum_ >= wanted)
        count = min(vocabulary, -(-enough // STEP) * STEP)
    return sorted(order[:count])
