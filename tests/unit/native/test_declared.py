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
    assert len(found) == 23
    return found


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
def test_the_compiler_and_ctypes_agree_on_every_offset(tmp_path: Path) -> None:
    assert COMPILER is not None
    lines, expected = [], []
    for each in structures():
        name = OTHERS.get(each.__name__, each.__name__)
        fields = [field[0] for field in each._fields_]
        expected += [f"{name} {ctypes.sizeof(each)}", *(f"{name}.{f} {getattr(each, f).offset}" for f in fields)]
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{f} %zu\\n", offsetof({name}, {f}));' for f in fields]
    source = f"{variants.unit()}\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{ {' '.join(lines)} }}\n"
    program = tmp_path / "offsets"
    flags = [flag for flag in variants.FLAGS if flag not in ("-O3", "-fPIC")]
    small = ["-O0", "-DTILE=32", "-DPANEL=6", "-DMOST_CODED=4"]
    command = [*COMPILER, *flags, *small, *variants.NATIVE, "-x", "c", "-", "-lm", "-o", str(program)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == expected


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
