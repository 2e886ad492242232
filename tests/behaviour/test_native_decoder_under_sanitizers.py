"""The native decoder under the compiler's sanitizers: no foreign memory, nothing undefined, no race."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from foretoken.native import variants
from helpers.compiled import compiled

COMPILER = variants.compiler_command()
DRIVER = Path(__file__).parents[1] / "helpers" / "native_driver.c"

SANITIZERS = {
    # a trap in the place of a report: the compiler takes half the time; -fno-sanitize-recover=all says where it was.
    # Calls in the place of inlined checks, and no check of every pointer and sum of pointers besides that of its access
    # to memory: half of the rest
    "address and undefined behaviour": (
        "address,undefined",
        [
            "-fsanitize-undefined-trap-on-error",
            "-fno-sanitize=null,object-size,pointer-overflow",
            *("--param", "asan-instrumentation-with-call-threshold=0"),
        ],
        [],
    ),
    # a child of a process with threads may start none under this sanitizer
    "threads": ("thread", [], ["nofork"]),
}


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("name", SANITIZERS)
def test_the_decoder_is_clean(name: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    kinds, options, arguments = SANITIZERS[name]
    # so that few rows lie in several tiles of columns, and in several panels; and so that less has to be compiled
    small = ["-DTILE=32", "-DPANEL=6", "-DMOST_CODED=4"]
    flags = [f"-fsanitize={kinds}", *options, *small]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    works = subprocess.run(
        [*COMPILER, *flags, str(empty), "-o", str(tmp_path / "empty")], capture_output=True, check=False
    )
    if works.returncode or subprocess.run([str(tmp_path / "empty")], capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler lacks -fsanitize={kinds}")
    own = [*(flag for flag in variants.FLAGS if flag not in ("-O3", "-fPIC")), *variants.NATIVE]
    # optimised, or with line numbers, the compiler takes two to three times as long; no access is left out either way
    program = compiled(DRIVER, COMPILER, [*own, "-O0", *flags])
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    found = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert (found.returncode, found.stdout.strip()) == (0, "fine"), found.stderr[-4000:]
