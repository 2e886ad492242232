"""Models that are made on demand, by the prefix of their name (``grown:base:100m``, ``shape:100m``).

Each kind is an entry point of the group ``foretoken.models``, named as the prefix; foretoken-lab has these two. A grown
model computes the function of another model, its origin, at a larger size, so parts of the origin can serve it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from foretoken.core import extensions

_OF_THE_LAB = ("grown", "shape")


class Origin(Protocol):
    """The original of a grown model.

    Attributes:
        folder: of the original.
    """

    @property
    def folder(self) -> Path: ...

    def grows(self, kind: type) -> bool:
        """Whether a learned part of this kind serves models that were grown from the part's model."""
        ...

    def grown(self, part: Any, target: Any) -> Any:
        """A learned part of the original for the grown model.

        Raises:
            MismatchError: this one cannot serve it.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeModels:
    """A kind of models that are made on demand.

    Attributes:
        folder: a model's name -> its checkpoint, made if it is not there yet.
        origin_of: name and configuration of a model -> its original, if it has one.
    """

    folder: Callable[[str], Path]
    origin_of: Callable[[str, Any], Origin | None] = lambda name, config: None


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
