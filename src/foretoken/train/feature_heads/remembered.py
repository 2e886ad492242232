"""What the target says about a text, kept on disk: a block that is read again costs no forward of the target.

A record a block: the hash of its tokens, the states in bfloat16, which positions count, and the most probable next
tokens with their log-probabilities. A run that goes on after a stop finds them; a finished run removes them.

Letters: B blocks, T tokens of one, F width of the fused states, M kept tokens, N used positions.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretoken.train.feature_heads.batches import Batches, TrainingBatch

KEPT_TOKENS = 64  # M
MOST_BYTES = 8 << 30
FREE_SHARE = 0.25  # of the free disk, at most


class Remembered:
    """Batches of another source; each block is computed once.

    Args:
        batches: computes those that are not kept.
        path: of the file.
        block, width, vocabulary: T, F and V.
    Attributes:
        most_bytes: of the file.
    """

    def __init__(self, batches: Batches, path: Path, block: int, width: int, vocabulary: int) -> None:
        self._batches, self._path, self._vocabulary = batches, path, vocabulary
        self._kept = min(KEPT_TOKENS, vocabulary)
        self._record: np.dtype = np.dtype(
            [
                ("key", "V16"),
                ("states", "<i2", (block, width)),
                ("used", "?", (block,)),
                ("ids", "<u4", (block, self._kept)),
                ("log_p", "<f2", (block, self._kept)),
            ]
        )
        path.touch()
        standing = path.stat().st_size // self._record.itemsize
        with path.open("rb+") as file:
            file.truncate(standing * self._record.itemsize)  # a record that was cut is written again
        keys = self._records()["key"] if standing else ()
        self._places = {key.tobytes(): place for place, key in enumerate(keys)}
        self.most_bytes = min(MOST_BYTES, int(shutil.disk_usage(path.parent).free * FREE_SHARE))

    def __call__(self, tokens_BT: Tensor) -> TrainingBatch:
        keys = [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in tokens_BT.cpu()]
        new = [row for row, key in enumerate(keys) if key not in self._places]
        if new and (len(self._places) + len(new)) * self._record.itemsize > self.most_bytes:
            return self._batches(tokens_BT)
        if new:
            self._keep([keys[row] for row in new], self._batches(tokens_BT[new]))
        records, device = self._records()[[self._places[key] for key in keys]], tokens_BT.device
        found = {
            name: torch.from_numpy(np.ascontiguousarray(records[name])) for name in ("states", "used", "ids", "log_p")
        }
        used_BT = found["used"]
        ids_NM, log_p_NM = (found[name][used_BT].to(device) for name in ("ids", "log_p"))
        return TrainingBatch(
            tokens_BT,
            found["states"].view(torch.bfloat16).to(device).float(),
            used_BT.to(device),
            log_p_NM.new_zeros(0, self._vocabulary, dtype=torch.float32),
            (ids_NM.long(), log_p_NM),
        )

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _records(self) -> np.ndarray:
        return np.memmap(self._path, dtype=self._record, mode="r")

    def _keep(self, keys: list[bytes], batch: TrainingBatch) -> None:
        log_p_NV = batch.target_NV.log_softmax(-1)
        log_p_NM, ids_NM = log_p_NV.topk(self._kept, dim=-1)
        records: np.ndarray = np.zeros(len(keys), self._record)
        used_BT = batch.used_BT.cpu().numpy()
        records["key"] = np.frombuffer(b"".join(keys), "V16")
        records["states"] = batch.states_BTF.bfloat16().view(torch.int16).cpu().numpy()
        records["used"] = used_BT
        records["ids"][used_BT] = ids_NM.cpu().numpy()
        records["log_p"][used_BT] = log_p_NM.half().cpu().numpy()
        with self._path.open("ab") as file:
            file.write(records.tobytes())
        for key in keys:
            self._places[key] = len(self._places)
