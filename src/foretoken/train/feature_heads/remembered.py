"""What the target says about a text, kept on disk: a block that is read again costs no forward of the target.

A file a block, named by the hash of its tokens: the states in bfloat16, which positions count, and the most probable
next tokens with their log-probabilities. A run that goes on after a stop finds them; a finished run removes them.

Letters: B blocks, T tokens of one, F width of the fused states, M kept tokens, N used positions of one block.
"""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.train.feature_heads.batches import Batches, TrainingBatch

KEPT_TOKENS = 64  # M
MOST_BYTES = 8 << 30
FREE_SHARE = 0.25  # of the free disk, at most


class Remembered:
    """Batches of another source; each block is computed once.

    Args:
        batches: computes those that are not kept.
        folder: of the files.
        vocabulary: V.
    Attributes:
        most_bytes: of the files.
    """

    def __init__(self, batches: Batches, folder: Path, vocabulary: int) -> None:
        self._batches, self._folder, self._vocabulary = batches, folder, vocabulary
        folder.mkdir(exist_ok=True)
        self.most_bytes = min(MOST_BYTES, int(shutil.disk_usage(folder).free * FREE_SHARE))
        self._bytes = sum(each.stat().st_size for each in folder.iterdir())

    def __call__(self, tokens_BT: Tensor) -> TrainingBatch:
        rows = [row.contiguous() for row in tokens_BT.cpu()]
        paths = [self._folder / hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest() for row in rows]
        for number, path in enumerate(paths):
            if not path.exists():
                if self._bytes > self.most_bytes:
                    return self._batches(tokens_BT)
                self._keep(self._batches(tokens_BT[number : number + 1]), path)
        found, device = [load_file(path, device=str(tokens_BT.device)) for path in paths], tokens_BT.device
        return TrainingBatch(
            tokens_BT,
            torch.stack([each["states_TF"].float() for each in found]),
            torch.stack([each["used_T"] for each in found]),
            torch.empty(0, self._vocabulary, device=device),
            (
                torch.cat([each["ids_NM"].long() for each in found]),
                torch.cat([each["log_p_NM"].float() for each in found]),
            ),
        )

    def forget(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder)

    def _keep(self, batch: TrainingBatch, path: Path) -> None:
        log_p_NM, ids_NM = batch.target_NV.log_softmax(-1).topk(min(KEPT_TOKENS, self._vocabulary), dim=-1)
        kept = {"states_TF": batch.states_BTF[0].bfloat16(), "used_T": batch.used_BT[0]}
        part = path.with_suffix(".part")
        save_file({**kept, "ids_NM": ids_NM.int(), "log_p_NM": log_p_NM.half()}, part)
        os.replace(part, path)  # a file that was cut is written again
        self._bytes += path.stat().st_size
