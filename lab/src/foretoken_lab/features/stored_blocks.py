"""A feature store as a run reads it: numbers of sequences in a shuffled order that a resumed run repeats.

The training loop passes blocks of integers about. Here they are the numbers of sequences, int64 [count, 1], and the
objective reads the features stored under them. Shards are shuffled, then the sequences of each, so that neighbours come
from the same shard: two shards are in memory at most.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.forward.hidden_states import FINAL
from foretoken_lab.features.store import Features, FeatureStore

HELD_OUT = 20  # one sequence in so many, the last ones of the store, is kept for the held-out measures
LOADED = 2  # shards in memory


class StoredBlocks:
    """The sequences of one feature store.

    Args:
        folder: of the store.
        depths: of the hidden states that are needed, increasing, next to the final ones or all logits.
        seed: of the order.
    Raises:
        InputError: something that is needed was not extracted; the message has the command.
    """

    def __init__(self, folder: Path, depths: Sequence[int], seed: int) -> None:
        self.store = FeatureStore(folder)
        index = self.store.index
        if not set(depths) <= set(index.layers) or (FINAL not in index.layers and index.top_logits != "all"):
            held = ", ".join(map(str, index.layers)) or "none"
            few, listed = ", ".join(map(str, depths)), ",".join(map(str, (*depths, FINAL)))
            raise InputError(
                f"{folder}: holds the depths {held}; needed are {few} and {FINAL} (or {few} and all logits): "
                f"extract them into another folder with: foretoken train features --depths {listed}"
            )
        self.hashes = [shard.sha256 for shard in index.shards]
        self._first = [0]  # number of each shard's first sequence, and of the one after the last
        for shard in index.shards:
            self._first.append(self._first[-1] + shard.sequences)
        self._kept = index.sequences // HELD_OUT
        self._trained = index.sequences - self._kept
        if not self._trained:
            raise InputError(f"{folder}: holds no features yet; let foretoken train features finish a shard")
        self.block = max(1, index.tokens // index.sequences)
        self._seed = seed
        self._given = 0
        self._order: list[int] = []
        self._order_of = -1
        self._loaded: dict[int, tuple[Features, list[tuple[int, int]]]] = {}

    @classmethod
    def of(cls, folder: Path, depths: Sequence[int], seed: int, target: Path) -> StoredBlocks:
        """Open a store and check that its features are those of a target.

        Args:
            target: the folder of the model.
        Raises:
            MismatchError: they are those of another one.
        """
        found = cls(folder, depths, seed)
        found.store.check_target(target)
        return found

    def next(self, count: int) -> Tensor:
        """The next sequences' numbers, int64 [count, 1]."""
        numbers = []
        for _ in range(count):
            turn, place = divmod(self._given, self._trained)
            if turn != self._order_of:
                self._order, self._order_of = self._shuffled(turn), turn
            numbers.append(self._order[place])
            self._given += 1
        return torch.tensor(numbers)[:, None]

    def held_out(self, count: int) -> Tensor:
        """Numbers of sequences that training never reads, int64 [<= count, 1]."""
        return torch.arange(self._trained, self._trained + min(count, self._kept))[:, None]

    def state(self) -> dict[str, Any]:
        """Where the order stands."""
        return {"given": self._given}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self._given = int(state["given"])

    def report(self) -> list[dict[str, Any]]:
        """The sequences read, for the record."""
        files = [{"name": shard.name, "sha256": shard.sha256} for shard in self.store.index.shards]
        return [
            {
                "name": "features",
                "share": 1.0,
                "tokens": self._given * self.block,
                "passes": round(self._given / self._trained, 2),
                "files": files,
                "data": dict(self.store.index.data),
            }
        ]

    def sequences(self, numbers: Sequence[int]) -> list[Features]:
        """The stored features of these sequences."""
        found = []
        for number in numbers:
            shard = next(i for i, first in enumerate(self._first[1:]) if number < first)
            features, spans = self._shard(shard)
            found.append(features.part(*spans[number - self._first[shard]]))
        return found

    def tokens(self, numbers: Tensor) -> Tensor:
        """The tokens of these sequences end to end, int64 [N]."""
        return torch.cat([each.tokens_N.long() for each in self.sequences(numbers.flatten().tolist())])

    def _shard(self, number: int) -> tuple[Features, list[tuple[int, int]]]:
        if number not in self._loaded:
            while len(self._loaded) >= LOADED:
                del self._loaded[next(iter(self._loaded))]
            features = self.store.shard(number)
            self._loaded[number] = (features, features.spans())
        return self._loaded[number]

    def _shuffled(self, turn: int) -> list[int]:
        """The order of one pass."""
        rng = random.Random(f"{self._seed}/{turn}")
        shards = list(range(len(self._first) - 1))
        rng.shuffle(shards)
        order: list[int] = []
        for shard in shards:
            inside = list(range(self._first[shard], min(self._first[shard + 1], self._trained)))
            rng.shuffle(inside)
            order += inside
        return order
