"""Texts as unit vectors. Each text is encoded alone: in a padded batch its last bits would differ.

Letters: T tokens, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.last_states import LastStates

_MOST_TOKENS = 256  # maximum tokens of a text; the rest is ignored


class Encoder(Protocol):
    """Encodes text as vectors.

    Attributes:
        name: identifies the weights; stored vectors depend on it.
    """

    name: str

    def encode(self, text: str) -> np.ndarray:
        """Return a unit vector, float32 [D]."""
        ...


class TargetEncoder:
    """The mean of a causal model's last hidden states: needs no additional model, but is not trained for retrieval.

    Args:
        model: the target, or another model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.name = f"last states of {fingerprint_of(model.source)}"
        self._model = model
        self._states = LastStates(model)
        self._cache = model.new_cache(1)

    def encode(self, text: str) -> np.ndarray:
        most = min(_MOST_TOKENS, self._model.max_length)
        tokens = list(self._model.tokenizer(text)["input_ids"])[:most] or [0]
        slot = self._cache.acquire()
        try:
            self._cache.reserve(slot, len(tokens))
            batch = PackedBatch()
            batch.add_chunk(slot, 0, tokens, wanted=1)
            output = self._model.forward(batch, DensePlan(self._cache, batch), span=self._states.span)
        finally:
            self._cache.release(slot)
        return _unit(self._states.of(output, range(len(tokens))).mean(dim=0))


class FolderEncoder:
    """An encoder of transformers or sentence-transformers from a local folder: mean of its last states.

    Args:
        folder: contains ``config.json``, weights and tokenizer; nothing is downloaded.
    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ModelError(f"encoder {folder}: cannot be loaded ({str(error).splitlines()[0]})") from None
        self.name = f"mean of {fingerprint_of(str(folder))}"

    @torch.inference_mode()
    def encode(self, text: str) -> np.ndarray:
        inputs = self._tokenizer(text, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt")
        return _unit(self._model(**inputs).last_hidden_state[0].mean(dim=0))


def _unit(mean_D: Tensor) -> np.ndarray:
    vector: np.ndarray = mean_D.float().numpy()
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
