"""The base of every reader of a quantised format; the formats are in the modules next to this one.

Letters: O outputs, K inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight


class Format(Protocol):
    """How one checkpoint's layers are quantised.

    Attributes:
        mark: the tensor, by its last name, that only a quantised layer has.
    """

    mark: str

    def read(self, layer: "Layer") -> QuantisedWeight:
        """The layer's weight, exactly.

        Raises:
            ModelError: tensors are missing, do not fit each other, or are not supported.
        """
        ...


@dataclass(frozen=True)
class Layer:
    """The tensors of one quantised layer.

    Attributes:
        name: of the module.
        parts: by their last names.
        outputs, inputs: of the layer, by the model's config.
        used: the parts that were read.
    """

    name: str
    parts: Mapping[str, Tensor]
    outputs: int
    inputs: int
    used: set[str] = field(default_factory=set)

    def part(self, key: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """A tensor of that shape and one of these dtypes."""
        found = self.optional(key, shape, dtypes)
        if found is None:
            raise ModelError(f"the quantised layer '{self.name}' lacks its tensor '{self.name}.{key}'")
        return found

    def optional(self, key: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
        """The same; None if there is no such tensor."""
        self.used.add(key)
        found = self.parts.get(key)
        if found is None:
            return None
        if tuple(found.shape) != shape or found.dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise ModelError(
                f"the tensor '{self.name}.{key}' is {list(found.shape)} of {str(found.dtype).removeprefix('torch.')}: "
                f"{list(shape)} of {wanted} is needed"
            )
        if found.is_floating_point() and not found.isfinite().all():
            raise ModelError(f"the quantised layer '{self.name}' has scales that are not finite ('{self.name}.{key}')")
        return found

    def refuse_the_rest(self, *known: str) -> None:
        """Refuse a layer with unread tensors: their meaning would not be computed."""
        unread = sorted(set(self.parts) - self.used - set(known))
        if unread:
            raise ModelError(
                f"the quantised layer '{self.name}' has a tensor '{self.name}.{unread[0]}', which is not read"
            )


SCALES = (torch.float16, torch.bfloat16, torch.float32)


def groups(layer: Layer, size: int) -> int:
    """How many groups of :func:`group_size` a row has.

    Raises:
        ModelError: a row is no whole number of groups.
    """
    if size == -1:
        return 1
    if layer.inputs % size:
        raise ModelError(
            f"the quantised layer '{layer.name}' has rows of {layer.inputs}, which are no groups of {size} (group_size)"
        )
    return layer.inputs // size


def group_size(config: Mapping[str, Any], default: int | None = None) -> int:
    """Inputs that share a scale, by a ``quantization_config``; -1 for a whole row.

    Raises:
        ModelError: it says something else, or nothing where nothing is the default.
    """
    found = config.get("group_size", default)
    if type(found) is not int or (found < 1 and found != -1):
        raise ModelError(f"its quantization_config says group_size={found!r:.60}: a whole number, or -1 for rows")
    return found


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Settings within a ``quantization_config``; none where there are none.

    Raises:
        ModelError: it is something else than settings.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise ModelError(f"its quantization_config says {key}={found!r:.60}, which is no JSON object")
    return found or {}


def setting(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """A setting of a ``quantization_config`` that must be one of these.

    Raises:
        ModelError: it is something else.
    """
    found = config.get(key, default)
    if not any(isinstance(found, type(each)) and found == each for each in known):  # 4.0 is no 4, and 1 is not true
        says = ", ".join(repr(each) for each in known)
        raise ModelError(f"its quantization_config says {key}={found!r:.60}: {says} can be read")
    return found
