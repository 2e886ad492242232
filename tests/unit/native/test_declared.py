"""Structures are read from the headers that declare them: the C compiler and ctypes agree on every offset."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from foretoken.drafting.feature_heads.native import chains, pairs
from foretoken.methods.diffuspec.native import lattice, paths
from foretoken.native import structs, variants
from foretoken.native.declared import ADDRESS, Header

COMPILER = variants.compiler_command()
OTHERS = {"_Filler": "Filler", "_Fill": "Fill", "_Search": "Search"}  # private in Python


def structures() -> list[type[ctypes.Structure]]:
    found = [
        each
        for module in (structs, chains, pairs, lattice, paths)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, ctypes.Structure) and each.__module__ == module.__name__
    ]
    assert len(found) == 25
    return found


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
def test_the_compiler_and_ctypes_agree_on_every_offset() -> None:
    assert COMPILER is not None
    claims = []
    for each in structures():
        name = OTHERS.get(each.__name__, each.__name__)
        claims.append(f"sizeof({name}) == {ctypes.sizeof(each)}")
        claims += [f"offsetof({name}, {field[0]}) == {getattr(each, field[0]).offset}" for field in each._fields_]
    # syntax alone: no code is made
    command = [*COMPILER, *(flag for flag in variants.FLAGS if flag != "-O3"), *variants.NATIVE, "-fsyntax-only"]

    def said(claims: list[str]) -> str:
        asserted = "".join(f'_Static_assert({claim}, "{claim}");\n' for claim in claims)
        source = f"{variants.unit()}\n#include <stddef.h>\n{asserted}"
        return subprocess.run([*command, "-x", "c", "-"], input=source, text=True, capture_output=True).stderr

    assert "static assertion failed" not in (errors := said(claims)), errors
    assert "error" not in errors, errors
    assert 'static assertion failed: "sizeof(Matrix) == 3"' in said(["sizeof(Matrix) == 3"])


def test_a_field_that_is_not_understood_is_an_error(tmp_path: Path) -> None:
    header = tmp_path / "types.h"
    header.write_text("typedef struct { int64_t a, b; const float *c; } Fine;\ntypedef struct { long a[3]; } Not;\n")
    read = Header(header)
    assert read.fields("Fine") == [("a", ctypes.c_int64), ("b", ctypes.c_int64), ("c", ADDRESS)]
    with pytest.raises(ValueError, match="Not"):
        read.fields("Not")
    with pytest.raises(ValueError, match="Missing"):
        read.fields("Missing")
    with pytest.raises(ValueError, match="FIRST"):
        read.names("FIRST")
