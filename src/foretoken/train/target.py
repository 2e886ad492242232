"""A target to learn from: its model as the library itself computes it, its tokenizer, and where its files are.

``models.load`` makes a model that generates: packed, through our attention, without gradients. Here any causal model
of transformers is taken as it is, state-space layers included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foretoken import zoo
from foretoken.core.errors import ConfigError, ModelError
from foretoken.models.fingerprint import fingerprint


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
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import cached_file

    place = _place(device)
    source = str(zoo.path(name)) if name.startswith(zoo.PREFIX) else str(Path(name).expanduser())
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype="auto", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
        folder = Path(cached_file(source, "config.json")).parent
    except Exception as error:
        # a damaged checkpoint fails wherever the library first stumbles over it; the remedy is the same
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"target '{name}' cannot be loaded ({reason}); fetch or save it again") from None
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"target '{name}': weights are missing from the checkpoint ('{missing[0]}', {len(missing)} in all); "
            "what it computes would be random"
        )
    return Target(name, folder, model.to(place).eval(), tokenizer)


def _place(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device='{device}': torch sees {torch.cuda.device_count()} CUDA devices; use device='cpu'")
    return place
