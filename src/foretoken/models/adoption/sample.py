"""The part of a large model that its probes and trials run, so that they take as long for 7 B as for 1 B.

They ask what the code of a family computes, not what its weights are. So one layer of each kind is enough: the shortest
run of consecutive layers that has every kind in it. Two layers are of one kind if everything but their weights is
equal: classes, numbers and flags of their modules, hooks, forwards of their own, the shapes of their weights, small
buffers, and what the config lists by layer. A model in which a layer computes with its own index has no two layers of
one kind, and is run whole.

    embedding ─ [a, b) of the layers ─ final norm ─ some rows of the head

Quantised layers of the run compute by native products there, each of which is first compared with the plain product on
some outputs: the plain one expands a whole matrix at every call.

Letters: T rows, K inner dimension, C rows of the head that are scored, O outputs.
"""

import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight, product, rows_of
from foretoken.forward.span import Span, within
from foretoken.forward.ssm.layout import Mixer
from foretoken.forward.stored_weight import RoundedWeight, StoredWeight
from foretoken.native import build
from foretoken.native.apart import packed_layer
from foretoken.native.dense_weights import can_round, find_parameters

_COLUMNS = 512
_FEWEST = 2  # layers: one alone would not show what happens between two
_COMPARED = 32  # outputs of a native product
_SMALL_BUFFER = 4096  # elements that are compared by value
_FACTORS = frozenset({"layer_scalar"})  # buffers that are weights: Gemma 4's
_OF_MODULES = frozenset(vars(nn.Module()))  # kept by torch for every module
_NUMBERS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


class Sample:
    """Some layers of a model on its device, between its embedding and some rows of its head.

    Args:
        model: a causal LM of transformers.
        smallest: layers to run at least.
    Attributes:
        span: the layers.
        columns_C: the tokens that the head scores, int64, increasing.
        index_counts: whether a layer that has run computed something from its own index: then others of its kind may
            compute something else.
    Raises:
        UnsupportedArchitecture: the model's parts were not found, or a native product is not what the plain one is.
    """

    def __init__(self, model: Any, smallest: int = _FEWEST) -> None:
        self._model = model
        self._parts = anatomy.find(model)
        self._kinds = kinds(model)
        self.span = Span(*shortest_run(self._kinds, smallest))
        head: Any = self._parts.head
        vocab = int(getattr(head, "out_features", 0)) or len(head.weight)
        self.columns_C = torch.arange(0, vocab, -(-vocab // _COLUMNS))
        self._head = _some_of(head, self.columns_C)
        self._device = next(model.parameters()).device
        self.index_counts = self._runs = False
        self._native = list(self._native_layers())
        self._numbered: list[tuple[Any, int]] = [
            (module, index)
            for layer in self._parts.layers[self.span.first : self.span.last]
            for module in layer.modules()
            if type(index := getattr(module, "layer_idx", None)) is int
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, the model computes these layers only, and its head these columns. It may be entered twice."""
        if self._runs:
            yield
            return
        head = self._model.get_output_embeddings()  # packing may have replaced it
        swapped = [each for each in self._native if getattr(each[0], each[1]) is each[2]]
        for parent, name, _, layer in swapped:
            setattr(parent, name, layer)
        for module, number in self._numbered:
            module.layer_idx = _Index(number, self._count)
        whole = partial(_some, head, head.forward, self.columns_C.to(self._device))
        head.forward = whole if self._head is None else self._head.forward
        self._runs = True
        try:
            with within(self._parts, self.span):
                yield
        finally:
            self._runs = False
            del head.forward
            for module, number in self._numbered:
                module.layer_idx = number
            for parent, name, plain, _ in swapped:
                setattr(parent, name, plain)

    def free_native_layers(self) -> None:
        """Free the memory of native twins; from now on, quantised layers compute by plain products."""
        self._native = []

    def stand_ins(self) -> Iterator[tuple[int, int]]:
        """Each layer, and the one of its kind that runs."""
        run = {self._kinds[layer]: layer for layer in reversed(range(self.span.first, self.span.last))}
        yield from ((layer, run[kind]) for layer, kind in enumerate(self._kinds))

    def _count(self) -> None:
        self.index_counts = True

    def _native_layers(self) -> Iterator[tuple[nn.Module, str, nn.Module, nn.Module]]:
        """Parents, names, quantised layers and their native twins."""
        library = build.library()
        if library is None or next(self._model.parameters()).device.type != "cpu":
            return
        native = partial(_native, library=library)
        for layer in self._parts.layers[self.span.first : self.span.last]:
            for parent in list(layer.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, QuantisedLinear):
                        yield parent, name, child, native(child.quantised, child.bias).eval()
                    elif isinstance(child, QuantisedExperts) and child.weights:
                        experts = QuantisedExperts(child.weights, child.act_fn)
                        experts.pack(native)
                        yield parent, name, child, experts.eval()


def _native(weight: QuantisedWeight, bias: Tensor | None = None, *, library: Any) -> nn.Module:
    """A layer with native products, compared with plain ones."""
    layer, (outputs, inputs) = packed_layer(weight, bias, library), weight.shape
    which_O = torch.arange(0, outputs, -(-outputs // _COMPARED))
    x_TK = torch.randn(2, inputs, generator=torch.Generator().manual_seed(0))
    expected_TO = product(rows_of(x_TK if weight.order_K is None else x_TK[:, weight.order_K]), weight.rows(which_O))
    if bias is not None:
        expected_TO = expected_TO + bias[which_O].to(torch.float32)
    with torch.inference_mode():
        found_TO = layer(x_TK)[:, which_O]
    if not torch.allclose(found_TO, expected_TO, rtol=1e-5, atol=1e-6, equal_nan=True):
        raise UnsupportedArchitecture(f"the native product with '{weight.name}' is another one than the plain one")
    return layer


def _some(head: nn.Module, whole: Callable[[Tensor], Tensor], columns_C: Tensor, x: Tensor) -> Tensor:
    """A head's output in some columns; of other modules than linear layers all are computed."""
    if type(head) is not nn.Linear:
        return whole(x)[..., columns_C]
    return F.linear(x, head.weight[columns_C], None if head.bias is None else head.bias[columns_C])


def _some_of(head: nn.Module, columns_C: Tensor) -> QuantisedLinear | None:
    """Some columns of a quantised head; None of another one."""
    if not isinstance(head, QuantisedLinear):
        return None
    library = build.library()
    if isinstance(head.quantised, RoundedWeight) and library is not None and can_round(head.quantised):
        find_parameters(head.quantised, library)  # of all its rows, which takes torch much longer
    return QuantisedLinear(head.quantised.rows(columns_C), None if head.bias is None else head.bias[columns_C])


def shortest_run(kinds: Sequence[Hashable], smallest: int = 1) -> tuple[int, int]:
    """The first of the shortest runs ``[a, b)`` of at least so many elements in which every kind occurs."""
    every, best = len(set(kinds)), (0, len(kinds))
    for begin in range(len(kinds)):
        seen: set[Hashable] = set()
        for end in range(begin, len(kinds)):
            seen.add(kinds[end])
            if len(seen) == every and end + 1 - begin >= smallest:
                if end + 1 - begin < best[1] - best[0]:
                    best = begin, end + 1
                break
    return best


def kinds(model: Any) -> list[Hashable]:
    """Of each layer, everything that decides what its code computes, but for its weights."""
    config = model.config.get_text_config(decoder=True)
    layers = anatomy.find(model).layers
    listed = [
        value for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) == len(layers)
    ]
    return [
        (_kind_of(layer, index), tuple(_described(value[index]) for value in listed))
        for index, layer in enumerate(layers)
    ]


def _kind_of(layer: nn.Module, index: int) -> Hashable:
    found: list[Hashable] = []
    for name, module in layer.named_modules():
        found += [name, _described(type(module))]
        found += [
            (key, _described(value))
            for key, value in vars(module).items()
            if key not in _OF_MODULES and not (key.startswith("layer_") and value == index)
        ]
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            found.append(tuple(_described(each) for each in hooks.values()))
        for key, weight in module._parameters.items():
            found.append((key, None if weight is None else _of_tensor(weight, 1)))
        for key, buffer in module._buffers.items():
            most = 0 if key in _FACTORS else _SMALL_BUFFER
            found.append((key, None if buffer is None else _of_tensor(buffer, most)))
    return tuple(found)


def _described(value: Any) -> Hashable:
    """A value that two equal values share; an object of an unknown type is equal to itself only."""
    if isinstance(value, _NUMBERS):
        return type(value), value
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(_described(each) for each in value)
    if isinstance(value, dict):
        return dict, tuple((_described(key), _described(each)) for key, each in value.items())
    if isinstance(value, Tensor):
        return _of_tensor(value, _SMALL_BUFFER)
    if isinstance(value, QuantisedWeight):
        stored = value.kind.name if isinstance(value, StoredWeight) else None
        return value.shape, value.bits, value.group, value.signed, value.minimum, stored, value.order_K is None
    if isinstance(value, Mixer):  # of this layer's modules, which are described already
        return Mixer
    if isinstance(value, partial):
        return partial, _described(value.func), _described(value.args), _described(value.keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType, _described(value.__func__), type(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = tuple(_described(cell.cell_contents) for cell in value.__closure__ or ())
        return value.__code__, cells, _described(value.__defaults__), _described(value.__kwdefaults__)
    return type(value), id(value)


def _of_tensor(values: Tensor, most: int) -> Hashable:
    """Shape and dtype; of so few elements, their values."""
    shape = tuple(values.shape), values.dtype
    if values.is_meta or values.numel() > most:
        return shape
    return *shape, tuple(values.detach().flatten().tolist())


class _Index(int):
    """A layer's index that reports whether anything is computed from it or decided by it."""

    _count: Callable[[], None]

    def __new__(cls, value: int, count: Callable[[], None]) -> "_Index":
        made = super().__new__(cls, value)
        made._count = count
        return made

    def __hash__(self) -> int:
        return int.__hash__(self)


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operation(self: _Index, *others: Any) -> Any:
        self._count()
        return plain(self, *others)

    return operation


for _operation in (
    *("add", "sub", "mul", "mod", "truediv", "floordiv", "divmod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "neg", "float"),
):
    for _name in (f"__{_operation}__", f"__r{_operation}__"):
        if hasattr(int, _name):
            setattr(_Index, _name, _counted(_name))
