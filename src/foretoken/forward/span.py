"""A span of layers: a forward that begins or ends in the middle of the model, and hands hidden states on.

    tokens ── embedding ── layers[0] ─ … ─ layers[a] ═ … ═ layers[b-1] ─ … ─ layers[L-1] ── final norm ── head
              depth 0                      └── Span(first=a, last=b) ──┘                    └ of the wanted rows ┘

Depth e is the residual stream after e layers. A forward of [e, L) can continue from the
output of a forward of [0, e): together they are the whole forward, and every layer has been run once for every row.

Letters: T packed rows, R tapped rows, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward.anatomy import Anatomy
from foretoken.forward.hidden_states import Depth, watching


@dataclass(frozen=True, slots=True)
class Span:
    """The layers that a forward runs, its input, and the depths that it keeps.

    Attributes:
        first, last: layers to run, ``first <= layer < last``; the wanted rows go from there through the final norm
            and the head (an early exit where ``last`` is below the number of layers).
        entering_TD: input of layer ``first``, the output of an earlier forward; None: the embeddings.
        taps: depths to keep, increasing, ``first < depth <= last``.
        tap_rows: packed rows to keep of them; None: all.
        final_norm: False if the head is to read the rows as they are.
    """

    first: int
    last: int
    entering_TD: Tensor | None = None
    taps: tuple[int, ...] = ()
    tap_rows: Sequence[int] | None = None
    final_norm: bool = True


@contextmanager
def within(parts: Anatomy, span: Span) -> Iterator[dict[int, Tensor]]:
    """While inside, a forward of the library's model runs the span only; tapped depths appear in the dictionary.

    A layer outside of the span returns its input. The library's own loop, with the arguments of its layers (rotary
    tables, masks, embeddings by layer), stays as it is.
    """
    hidden: dict[int, Tensor] = {}
    skipped = [layer for number, layer in enumerate(parts.layers) if not span.first <= number < span.last]
    if not span.final_norm:
        skipped.append(parts.final_norm)
    entered = False

    def keep(depth: Depth, values: Any) -> None:
        if isinstance(values, tuple) and all(each is None for each in values[1:]):  # weights of attention, say
            (values, *_) = values
        if not isinstance(values, Tensor):
            raise UnsupportedArchitecture(f"{type(parts.body).__name__}: its layers give more than the hidden states")
        if values.dim() != 3:
            raise UnsupportedArchitecture(f"{type(parts.body).__name__}: its layers do not give one state a token")
        # a copy: the next layer may add to it in place
        hidden[int(depth)] = values[0].clone() if span.tap_rows is None else values[0][list(span.tap_rows)]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal entered
        entered = True
        assert span.entering_TD is not None
        rows_1TD = span.entering_TD[None]
        return ((rows_1TD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows_1TD})

    with ExitStack() as hooks:
        if span.entering_TD is not None:
            begin = parts.layers[span.first] if span.first < len(parts.layers) else parts.final_norm
            hooks.enter_context(begin.register_forward_pre_hook(enter, with_kwargs=True))
        with passed_by(skipped), watching(parts, span.taps, keep):
            yield hidden
    if span.entering_TD is not None and not entered:
        raise UnsupportedArchitecture(f"{type(parts.body).__name__}: its forward does not pass through its layers")


@contextmanager
def passed_by(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, these layers return their input."""
    found = list(modules)
    with forwards_replaced(found, [_same] * len(found)):
        yield


@contextmanager
def forwards_replaced(modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Tensor]]) -> Iterator[None]:
    """While inside, each of these modules computes another forward."""
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _same(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
