"""Training that goes on from a learned part: the same weights at first, for a target that may be another one.

A wider MLP begins as the narrow one (Chen et al., 2016, Net2Net: the function is preserved): what its new channels
give is multiplied by zero until training says otherwise.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.learned_part import LearnedConfig

_OPTIONS = {  # that decide a field
    "algorithm": "--algorithm",
    "draft_vocab_size": "--draft-vocab-size",
    "norm_before_residual": "--plain-residual",
    "mlp_width": "--mlp-width",
    "layers": "--layers",
}
_OWNERS = frozenset(each.name for each in fields(LearnedConfig))
_MLP_WIDTH = "mlp_width"
_INTO_CHANNELS, _OUT_OF_CHANNELS = ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.down_proj.weight"


class Learning(Protocol):
    """A part that is trained, or was."""

    config: Any

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any: ...


def begin_as(part: Learning, start: Learning, folder: Path, free: Collection[str] = ()) -> None:
    """Take a learned part's weights.

    Args:
        folder: where ``start`` was read, for messages.
        free: fields that no weight depends on, and that may differ.
    Raises:
        MismatchError: it has another shape, a narrower MLP apart; the field that differs is named.
    """
    if getattr(start.config, _MLP_WIDTH, 0) < getattr(part.config, _MLP_WIDTH, 0):
        free = {*free, _MLP_WIDTH}
    for each in fields(part.config):
        theirs, ours = getattr(start.config, each.name, None), getattr(part.config, each.name)
        if each.compare and each.name not in _OWNERS and each.name not in free and theirs != ours:
            option = f" ({_OPTIONS[each.name]})" if each.name in _OPTIONS else ""
            raise MismatchError(
                f"--start {folder}: its {each.name} is {theirs}, but {ours} is trained here: ask for the same shape"
                f"{option}, or leave --start out"
            )
    theirs, ours = start.state_dict(), part.state_dict()
    if different := sorted(theirs.keys() ^ ours.keys()):
        side = "has" if different[0] in theirs else "lacks"
        raise MismatchError(
            f"--start {folder}: it {side} {different[0]}, unlike the network to train: request the same shape, or "
            "leave --start out"
        )
    part.load_state_dict(
        {name: _as_wide(name, value.to(ours[name].dtype), ours[name]) for name, value in theirs.items()}
    )


def _as_wide(name: str, theirs: Tensor, ours: Tensor) -> Tensor:
    """Extend a matrix of an MLP to more channels; return every other tensor unchanged."""
    if name.endswith(_INTO_CHANNELS):
        return torch.cat((theirs, ours[len(theirs) :]))
    if name.endswith(_OUT_OF_CHANNELS):
        return torch.cat((theirs, torch.zeros_like(ours[:, theirs.shape[1] :])), dim=1)
    return theirs
