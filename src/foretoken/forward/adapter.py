"""Adapters: low-rank corrections of a model's linear layers. Each request of a batch has its own, or none.

    y = W x + up (down x)          for the rows of its segment; the scale is in ``up``

Letters: R rank, K inputs, O outputs, T packed rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from foretoken.forward.batch import PackedBatch


class LowRank(NamedTuple):
    """The correction of one linear layer, float32: ``down_RK`` and ``up_OR``."""

    down_RK: Tensor
    up_OR: Tensor


class Packed(Protocol):
    """An adapter as native code reads it: the address of its corrections, and the largest rank of one."""

    address: int
    rank: int


@dataclass(frozen=True, eq=False)
class Adapter:
    """The corrections of one fine-tuning, next to a base model's weights.

    Attributes:
        name: for messages and clients.
        products: by the name of the module that each corrects.
        digest: the hash of its files.
        packed: for the base's native decoder; None: the base has none.
    """

    name: str
    products: Mapping[str, LowRank]
    digest: str
    packed: Packed | None = None


@contextmanager
def corrected(model: nn.Module, batch: PackedBatch) -> Iterator[None]:
    """While inside, the model's linear layers correct the rows of the segments that have an adapter."""
    rows: dict[Adapter, list[int]] = {}
    for segment in batch.segments:
        if segment.adapter is not None:
            rows.setdefault(segment.adapter, []).extend(range(segment.start, segment.start + segment.num_rows))
    with ExitStack() as hooks:
        for adapter, own in rows.items():
            for name, product in adapter.products.items():
                hooks.enter_context(model.get_submodule(name).register_forward_hook(_hook(product, own)))
        yield


def _hook(product: LowRank, rows: list[int]) -> Any:
    def correct(module: nn.Module, args: tuple[Tensor, ...], y_1TO: Tensor) -> Tensor:
        x_MK = args[0][0, rows].float()
        y_1TO = y_1TO.clone()
        y_1TO[0, rows] = (y_1TO[0, rows].float() + x_MK @ product.down_RK.T @ product.up_OR.T).to(y_1TO.dtype)
        return y_1TO

    return correct
