"""Training that goes on from a learned part: the same weights at first, for a target that may be another one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.learned_part import LearnedConfig

_OWNERS = frozenset(each.name for each in fields(LearnedConfig))


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
        MismatchError: it has another shape; the field that differs is named.
    """
    for each in fields(part.config):
        theirs, ours = getattr(start.config, each.name, None), getattr(part.config, each.name)
        if each.name not in _OWNERS and each.name not in free and theirs != ours:
            raise MismatchError(
                f"--start {folder}: its {each.name} is {theirs}, but {ours} is trained here: ask for the same shape, "
                "or leave --start out"
            )
    theirs, ours = start.state_dict(), part.state_dict()
    if odd := sorted(theirs.keys() ^ ours.keys()):
        side = "has" if odd[0] in theirs else "lacks"
        raise MismatchError(
            f"--start {folder}: it {side} {odd[0]}, unlike what is trained here: ask for the same shape, or leave "
            "--start out"
        )
    part.load_state_dict({name: value.to(ours[name].dtype) for name, value in theirs.items()})
