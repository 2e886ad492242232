"""A target to learn from: its model as the library itself computes it, its tokenizer, and where its files are.

``models.load`` makes a model that generates: packed, through our attention, without gradients. Here any causal model
of transformers is taken as it is, state-space layers included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load_as_is, source_of


@dataclass(frozen=True)
class Target:
    """A checkpoint, loaded.

    Attributes:
        name: what the user called it.
        folder: where its files are; for a hub id, in the hub's cache.
        model: of transformers, in eval mode and the checkpoint's own dtype.
        tokenizer: its own.
    """

    name: str
    folder: Path
    model: Any
    tokenizer: Any

    @cached_property
    def fingerprint(self) -> str:
        """What tells it from other checkpoints."""
        return fingerprint(self.folder)


def load(name: str, device: str = "cpu") -> Target:
    """Load a target to learn from.

    Args:
        name: ``zoo:NAME``, a local folder, or a hub id.
        device: "auto", "cpu", "cuda" or "cuda:N".
    Raises:
        ConfigError: unknown zoo model, or no such device.
        ModelError: the checkpoint is missing, incomplete or damaged.
    """
    model, tokenizer = load_as_is(name, device=device)
    folder = Path(cached_file(source_of(name), "config.json")).parent
    return Target(name, folder, model, tokenizer)
