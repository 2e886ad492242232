"""The commands' quick way to transformers: without torch's compiler and its tensors that are sharded over machines.

Model files of transformers mark functions for ``torch.compile`` and ask whether tensors are sharded; for that torch
imports its compiler, its distributed tensors and a computer algebra system: a sixth of the processor time to a first
answer. Commands that load a model to run it do neither. A program that uses the library may, so ``LLM`` imports all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from foretoken.core.importing import collector_at_rest

_COMPILER = "torch._dynamo"
_PARTS = ("_trace_wrapped_higher_order_op",)  # of it, from which names are imported


class _Marks(ModuleType):
    """In the compiler's place: its marks leave functions as they are."""

    __path__: list[str] = []  # noqa: RUF012  (how a module says that it is a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _mark


class _Part(ModuleType):
    """In the place of a part of the compiler: its names are imported when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            _put_back()
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **options)

        return call


def _mark(function: Any = None, *_: Any, **__: Any) -> Any:
    return _mark if function is None else function


@contextmanager
def quick_import() -> Iterator[None]:
    """While inside, transformers is imported without what only compiling and sharding need; afterwards both are there.

    Where the library, or the compiler, is imported already, nothing is left out.
    """
    with collector_at_rest():
        import torch

        if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
            yield
            return
        available = torch.distributed.is_available
        sys.modules[_COMPILER] = _Marks(_COMPILER)
        for part in _PARTS:
            sys.modules[f"{_COMPILER}.{part}"] = _Part(f"{_COMPILER}.{part}")
        torch.distributed.is_available = lambda: False
        try:
            try:
                importlib.import_module("transformers.models.auto.modeling_auto")
                importlib.import_module("transformers.modeling_utils")
            except Exception:  # of a version that asks more of the compiler: all of it, then
                _put_back()
                torch.distributed.is_available = available
                for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
                    del sys.modules[name]
            yield
        finally:
            _put_back()
            torch.distributed.is_available = available


def _put_back() -> None:
    """Let the next import of the compiler find the real one."""
    import torch

    if isinstance(sys.modules.get(_COMPILER), _Marks):
        for name in (_COMPILER, *(f"{_COMPILER}.{part}" for part in _PARTS)):
            sys.modules.pop(name, None)
        vars(torch).pop("_dynamo", None)
