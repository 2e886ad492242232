"""Models that are made on demand, by the prefix of their name (``grown:base:100m``, ``shape:100m``).

Each kind is an entry point of the group ``foretoken.models``, named as the prefix; foretoken-lab has these two. A grown
model computes the function of another model, its origin, at a larger size, so parts of the origin can serve it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core import extensions
from foretoken.core.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor

_OF_THE_LAB = ("grown", "shape")


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


def _no_origin(name: str, config: Any) -> Origin | None:
    return None


@dataclass(frozen=True, slots=True)
class MadeModels:
    """A kind of models that are made on demand.

    Attributes:
        folder: a model's name -> its checkpoint, made if it is not there yet.
        origin_of: name and configuration of a model -> its original, if it has one.
    """

    folder: Callable[[str], Path]
    origin_of: Callable[[str, Any], Origin | None] = _no_origin


def folder_of_made(name: str) -> Path | None:
    """The checkpoint of a model that is made on demand; None: the name is of another kind.

    Raises:
        ConfigError: the distribution that makes it is not installed, or there is no such model.
    """
    prefix, colon, _ = name.partition(":")
    if not colon or not (prefix in _OF_THE_LAB or prefix in extensions.declared(extensions.MODELS)):
        return None
    made: MadeModels = extensions.required(extensions.MODELS, prefix, f"model '{name}'")
    return made.folder(name)


def origin_of(name: str, config: Any) -> Origin | None:
    """The original of the model of this name; None: it was not grown.

    Args:
        config: of the model.
    """
    made: MadeModels | None = extensions.loaded(extensions.MODELS, name.partition(":")[0])
    return None if made is None else made.origin_of(name, config)


def shares(copies: int) -> list[float]:
    """Which share is read of each copy: powers of two that sum to one."""
    return [0.5**place for place in range(1, copies)] + [0.5 ** (copies - 1)]


def widened(weight: Tensor, copies: int) -> Tensor:
    """A matrix that reads and writes so many copies of a stream; of another parameter, its copies."""
    import torch

    written = torch.cat([weight] * copies)
    return written if weight.ndim < 2 else torch.cat([written * share for share in shares(copies)], 1)


def before_head(gain_D: Tensor, copies: int) -> Tensor:
    """The gain of a norm before a grown model's head: it carries the shares that the head, copies alone, does not."""
    import torch

    return torch.cat([gain_D * share for share in shares(copies)])
