"""Stand-ins for modules that large libraries import and that serving never calls.

The library's model code names torch.compile, distributed tensors, accelerate and scipy at its top, for training and for
other tasks: half of the time that its import takes. In a command, such modules are not run within
``with stand_ins():``. A name that is taken from one is a :class:`_Name`, which imports the real module once it is
called, subclassed, or looked into.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar

from foretoken.core.class_table import keep_table

T = TypeVar("T")

_SHAPES = "torch._meta_registrations"  # kernels in Python for tensors without values, for operators that have none in C
_AFTER_SHAPES = ("torch._decomp", "torch._refs")  # they import each other in a circle, which it has to enter
# Packages, with all that is below them. Those of transformers make objects of torch's distributed tensors at their top.
_PACKAGES = (
    "accelerate",
    "scipy.optimize",
    "torch._dynamo",
    "torch._meta_registrations",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.distributed.expert_parallel",
    "transformers.distributed.parallel_utils",
    "transformers.distributed.pipeline_parallel",
    "transformers.distributed.tensor_parallel",
    "transformers.integrations.deepgemm",
    "transformers.integrations.eager_paged",
    "transformers.integrations.flex_attention",
    "transformers.integrations.sonicmoe",
)


class _StandIn(ModuleType):
    """A module that was not run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for those
            raise AttributeError(name)
        return _REPLACED.get((self.__name__, name)) or _Name(self.__name__, name)


class _Name:
    """What ``from MODULE import NAME`` gives until the module is needed; a class, a function or any other object."""

    def __init__(self, module: str, name: str) -> None:
        self.__dict__.update(_module=module, _name=name)

    def _real(self) -> Any:
        module = _imported(self._module)
        return getattr(module, self._name) if hasattr(module, self._name) else _imported(f"{self._module}.{self._name}")

    def _is_there(self) -> bool:
        """Whether any object of the real class can exist."""
        return _is_real(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._real()(*args, **options)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._is_there() and isinstance(instance, self._real())

    def __subclasscheck__(self, kind: Any) -> bool:
        return self._is_there() and issubclass(kind, self._real())

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]

    def __contains__(self, item: Any) -> bool:
        return item in self._real()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real())

    def __len__(self) -> int:
        return len(self._real())

    def __or__(self, other: Any) -> Any:  # in a type that is never checked
        return Any

    __ror__ = __or__


def _marked_later(mark: str) -> Callable[[Any], Any]:
    """A decorator that returns the function that it is given, as those do that only mark it for the compiler."""

    def decorated(function: Any) -> Any:
        _FINDER.marks.append((mark, function))
        return function

    return decorated


def _disable(function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Any:
    """``torch._dynamo.disable``, applied in a call where something may have been compiled."""
    if function is None:
        return functools.partial(_disable, **options)

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        run = function
        if _is_real("torch._dynamo"):
            run = sys.modules["torch._dynamo"].disable(function, *args, **options)
        return run(*given, **named)

    return called


_REPLACED: dict[tuple[str, str], Any] = {
    ("torch._dynamo", "allow_in_graph"): _marked_later("allow_in_graph"),
    ("torch._dynamo", "assume_constant_result"): _marked_later("assume_constant_result"),
    ("torch._dynamo", "disable"): _disable,
}


def _is_real(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and not isinstance(found, _StandIn)


def _imported(module: str) -> ModuleType:
    """The real module, which takes the place of every stand-in that it needs."""
    with _FINDER.switched(False):
        return importlib.import_module(module)


def with_all_kernels(make: Callable[[], T]) -> T:
    """The result of a function that computes on the device "meta"; called again if that needs kernels in Python."""
    try:
        return make()
    except NotImplementedError:
        if _SHAPES not in _FINDER.left_out:
            raise
        _imported(_SHAPES)
    return make()


class _Finder:
    """Finds the packages where they are, and makes stand-ins of them while ``active``.

    Attributes:
        marks: what to do with functions once there is a compiler: the decorator's name and the function.
        left_out: modules that stand-ins were made of, and that were not run since.
    """

    def __init__(self) -> None:
        self.active = False
        self.marks: list[tuple[str, Any]] = []
        self.left_out: set[str] = set()
        self._lock = RLock()

    @contextmanager
    def switched(self, active: bool) -> Iterator[None]:
        with self._lock:
            before, self.active = self.active, active
            if not active:
                self._leave()
            try:
                yield
            finally:
                self.active = before
                if not before:
                    self._leave()

    def _leave(self) -> None:
        """Take the stand-ins out of the table of modules, and out of the packages that they are in."""
        for name in [name for name, module in list(sys.modules.items()) if isinstance(module, _StandIn)]:
            module = sys.modules.pop(name)
            package, _, last = name.rpartition(".")
            if vars(sys.modules.get(package, module)).get(last) is module:
                delattr(sys.modules[package], last)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        listed = any(name == each or name.startswith(f"{each}.") for each in _PACKAGES)
        if not listed and name not in ("transformers.utils.import_utils", *_AFTER_SHAPES):
            return None
        needed = not self.active and name != _SHAPES and _SHAPES in self.left_out
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        if name in _AFTER_SHAPES:
            if needed:
                spec.loader = _WithShapes()  # type: ignore[assignment]
            return spec
        if needed:
            _imported(_SHAPES)
        if not listed:
            _run_after(spec.loader, keep_table)
        elif self.active and (name != _SHAPES or _can_leave_out_shapes()):
            spec.loader = self  # type: ignore[assignment]  # it has what a loader needs
        else:
            self.left_out.discard(name)
            if name == "torch._dynamo":
                _run_after(spec.loader, self._mark)
        return spec

    def _mark(self, compiler: ModuleType) -> None:
        while self.marks:
            mark, function = self.marks.pop()
            getattr(compiler, mark)(function)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.left_out.add(spec.name)
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing but what generators of random numbers need."""
        if module.__name__ == _SHAPES:
            from torch._opaque_base import OpaqueBaseMeta

            sys.modules["torch"]._C._set_generator_metaclass(OpaqueBaseMeta)


class _WithShapes:
    """The loader of a module that is imported together with the shapes."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _imported(_SHAPES)
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def _can_leave_out_shapes() -> bool:
    """Whether torch is one with which that was tried; what the module does besides differs between releases."""
    return hasattr(sys.modules["torch"]._C, "_set_generator_metaclass")


def _run_after(loader: Any, then: Callable[[ModuleType], None]) -> None:
    """Let a loader call a function with the module that it has run."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        then(module)

    loader.exec_module = exec_module


_FINDER = _Finder()


def allow_stand_ins() -> None:
    """Allow them in this process, which is a command's own; in a user's program, imports stay as they are.

    The finder stays for the marks.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Where they are allowed, import stand-ins in place of modules above that were not imported before."""
    if _FINDER not in sys.meta_path:
        yield
        return
    with _FINDER.switched(True):
        yield
