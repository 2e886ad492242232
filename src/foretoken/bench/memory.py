"""Memory: the peak of the process, and the bytes of an object's own tensors."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OURS = "foretoken"


def peak_device_bytes() -> int | None:
    """Return the peak memory on the GPU; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def tensor_bytes(thing: Any, apart_from: Iterable[Any] = ()) -> int:
    """Return the bytes of the tensors and arrays that an object holds, directly or indirectly; shared ones count once.

    Args:
        thing: an object of this package, a module, or a container of these; other references are not followed.
        apart_from: objects with tensors that do not count.
    """
    known: set[int] = set()
    seen: set[int] = set()
    for other in apart_from:
        known.update(place for place, _ in _buffers(other, seen))
    return sum(dict(each for each in _buffers(thing, seen) if each[0] not in known).values())


def _buffers(thing: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """Yield address and size of every buffer below an object; skips those in ``seen``."""
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if (
            isinstance(each, Tensor) and each.layout != torch.strided
        ):  # packed weights, which the library does not expose
            yield id(each), each.numel() * each.element_size()
        elif isinstance(each, Tensor):
            storage = each.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        elif isinstance(each, np.ndarray):
            yield each.ctypes.data, each.nbytes
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, nn.Module) or type(each).__module__.partition(".")[0] == _OURS:
            waiting += vars(each).values() if hasattr(each, "__dict__") else ()
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            waiting += [getattr(each, name) for name in slots if hasattr(each, name)]
