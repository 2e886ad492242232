"""The original of a grown model (grown.py), and how weights grow with the copies of its stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Origin:
    """The original of a grown model.

    Attributes:
        folder: of the original.
        width, layers: of the original.
        copies: of the original's stream in that of the grown model.
        grown_layers: of the grown model.
        shared: whether the final norm carries shares, and the tables the original's numbers.
    """

    folder: Path
    width: int
    layers: int
    copies: int
    grown_layers: int
    shared: bool = True

    @property
    def first_share(self) -> float:
        """The first copy in the grown model's normed output, relative to the original's output."""
        return 0.5 if self.copies > 1 and self.shared else 1.0

    def check_shared(self, title: str, target: str) -> None:
        """Refuse a part that computes with the original's final norm or tables, where the grown model has others.

        Raises:
            MismatchError: it has.
        """
        if not self.shared:
            raise MismatchError(
                f"the {title} of '{self.folder.name}' does not serve '{target}': models with a final norm of gain "
                "1 + w do not grow with their parts; train one for it"
            )

    def depth(self, depth: int) -> int:
        """The depth of the grown model at which the first copy in the stream is the original's at ``depth``."""
        return sum(layer * self.layers // self.grown_layers < depth for layer in range(self.grown_layers))

    def grows(self, kind: type) -> bool:
        """Whether a learned part of this kind serves models that were grown from the part's model."""
        from foretoken_lab.models import grown_parts

        return grown_parts.grows(kind)

    def grown(self, part: Any, target: Any) -> Any:
        """A learned part of the original for the grown model; see grown_parts.py."""
        from foretoken_lab.models import grown_parts

        return grown_parts.grown(part, target, self)


def shares(copies: int) -> list[float]:
    """Which share is read of each copy: powers of two that sum to one."""
    return [0.5**place for place in range(1, copies)] + [0.5 ** (copies - 1)]


def widened(weight: Tensor, copies: int) -> Tensor:
    """A matrix that reads and writes so many copies of a stream; of another parameter, its copies."""
    written = torch.cat([weight] * copies)
    return written if weight.ndim < 2 else torch.cat([written * share for share in shares(copies)], 1)


def before_head(gain_D: Tensor, copies: int) -> Tensor:
    """The gain of a norm before a grown model's head: it carries the shares that the head, copies alone, does not."""
    return torch.cat([gain_D * share for share in shares(copies)])
