"""Hidden states of a model of transformers, taken as they pass: one way for drafting, training and feature stores.

    embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── head
              0              1               L              "final"      depths

Depth e is the residual stream after e layers. Only requested depths are kept.

Letters: B sequences, T positions, D width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward.anatomy import Anatomy

FINAL: Literal["final"] = "final"
Depth = int | Literal["final"]


@contextmanager
def watching(parts: Anatomy, depths: Iterable[Depth], take: Callable[[Depth, Any], None]) -> Iterator[None]:
    """While inside, pass the hidden states at some depths to a callback.

    Args:
        depths: 0 is the first layer's input, e the output of layer e, "final" the output of the final norm.
        take: called with the depth and the module's output. Copy it to keep it, because the next layer may add to it in
            place; :func:`state_of` checks that it is one state a token.
    """
    with ExitStack() as hooks:
        for depth in depths:
            if depth == 0:
                hooks.enter_context(reads(parts.layers[0], lambda values: take(0, values)))
            else:
                part = parts.final_norm if depth == FINAL else parts.layers[int(depth) - 1]
                hooks.enter_context(part.register_forward_hook(_gives(depth, take)))
        yield


def reads(module: nn.Module, take: Callable[[Tensor], None]) -> Any:
    """Pass a module's input, its first argument by position or by name, to ``take`` until the handle is removed."""
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: take(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )


def _gives(depth: Depth, take: Callable[[Depth, Any], None]) -> Callable[..., None]:
    return lambda module, args, output: take(depth, output)


def state_of(values: Any, shape: tuple[int, ...], kind: str, depth: Depth) -> Tensor:
    """The hidden states in a layer's output, [B, T, D], not copied.

    Args:
        shape: B and T.
        kind: of the model, for the message.
    Raises:
        UnsupportedArchitecture: these are not one state a token.
    """
    values_BTD = values[0] if isinstance(values, tuple) else values
    if values_BTD.dim() != 3 or tuple(values_BTD.shape[:2]) != tuple(shape):
        raise UnsupportedArchitecture(
            f"{kind}: depth {depth} has the shape {list(values_BTD.shape)}, not one state a token"
        )
    return values_BTD
