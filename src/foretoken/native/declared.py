"""Structures and enumerations of C as ctypes has them, read from the header that declares them.

Only the forms that our headers use are read: ``typedef struct { ... } Name;`` with fields of ``int64_t``, ``double``
and other numbers, of structures by value, and of pointers; and ``enum { A, B };``. A pointer to a structure is typed,
so that its object stays alive with the field; every other pointer is an address.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS = ctypes.c_void_p
_KINDS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double, "float": ctypes.c_float}
NUMBERS = tuple(_KINDS.values())
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"typedef struct \w*\s*\{(.*?)\}\s*(\w+);", re.DOTALL)
_ENUM = re.compile(r"\benum\s*\{(.*?)\}", re.DOTALL)
_KIND = re.compile(r"(?:const\s+)?(?:struct\s+)?(\w+)\s*(.*)", re.DOTALL)


class Header:
    """Structures and enumerations that a header declares.

    Args:
        path: of the header.
    """

    def __init__(self, path: Path) -> None:
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        self._path = path
        self._structs = {name: body for body, name in _STRUCT.findall(text)}
        self._enums = [[each.strip() for each in body.split(",") if each.strip()] for body in _ENUM.findall(text)]

    def fields(self, name: str, *known: type[ctypes.Structure]) -> list[tuple[str, Any]]:
        """The fields of a structure, in order.

        Args:
            name: of the structure in C.
            known: structures that its fields hold or point to, named as in C. A pointer to any other is an address.
        Raises:
            ValueError: the header has no such structure, or a field of a form that is not read here.
        """
        if name not in self._structs:
            raise ValueError(f"{self._path}: there is no structure {name}")
        classes = {each.__name__: each for each in known}
        found: list[tuple[str, Any]] = []
        for declaration in filter(None, (each.strip() for each in self._structs[name].split(";"))):
            matched = _KIND.fullmatch(declaration)
            assert matched is not None
            kind = matched[1]
            for declared in matched[2].split(","):
                pointers, field = declared.count("*"), declared.replace("const", "").replace("*", "").strip()
                if not field.isidentifier():
                    raise ValueError(f"{self._path}: '{declaration}' in {name} is not understood")
                found.append((field, self._type(name, kind, pointers, classes)))
        return found

    def _type(self, name: str, kind: str, pointers: int, classes: dict[str, type[ctypes.Structure]]) -> Any:
        if pointers == 1 and kind in classes:
            return ctypes.POINTER(classes[kind])
        if pointers:
            return ADDRESS
        if kind in classes:
            return classes[kind]
        if kind not in _KINDS:
            raise ValueError(f"{self._path}: {name} has a field of {kind}, which is not understood")
        return _KINDS[kind]

    def names(self, first: str) -> dict[str, int]:
        """The names of an enumeration in lower case, with their values.

        Args:
            first: its first name.
        Raises:
            ValueError: no enumeration begins with it.
        """
        for each in self._enums:
            if each[0] == first:
                return {name.lower(): value for value, name in enumerate(each)}
        raise ValueError(f"{self._path}: no enumeration begins with {first}")


def function(library: ctypes.CDLL, name: str, *kinds: Any) -> Callable[..., int]:
    """A function of native code that returns 0, or another number where it has no memory.

    Args:
        library: compiled sources.
        name: in C.
        kinds: of its arguments.
    """
    found = getattr(library, name)
    if found.argtypes is None:
        found.argtypes, found.restype = list(kinds), ctypes.c_int64
    return found
