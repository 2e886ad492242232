"""The kinds of processors that a wheel has libraries for: those of another architecture under emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from foretoken.native import variants
from helpers.compiled import compiled

DRIVER = Path(__file__).parents[2] / "helpers" / "native_driver.c"
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]
SMALL = ("-O0", "-DTILE=32", "-DPANEL=6", "-DMOST_CODED=4")  # less to compile; every loop is as it is


def driver(compiler: list[str], options: tuple[str, ...]) -> str:
    """The program that prints a hash of the bits of each kind of decoder."""
    flags = [flag for flag in variants.FLAGS if flag not in ("-O3", "-fPIC")]
    return str(compiled(DRIVER, compiler, [*flags, *SMALL, *options]))


def said(*command: str) -> str:
    done = subprocess.run([*command, "bits"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def reference() -> str:
    """What another kind of processor, which fuses products with additions, too, makes of the same model."""
    compiler = variants.compiler_command()
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    name = {"x86_64": "avx2", "aarch64": "neon"}.get(platform.machine())
    variant = next((each for each in variants.VARIANTS if each.name == name), None)
    if variant is None or not set(variant.needs) <= set(variants.processor().split()):
        pytest.skip("this processor is of no kind to compare with")
    return said(driver(compiler, variant.options))


# asked before the reference is compiled
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    "variant",  # the processors of today have the dot products; a program takes a dozen seconds to compile
    [
        pytest.param(each, id=each.name, marks=() if "dotprod" in each.name else pytest.mark.full_product)
        for each in variants.of_architecture("aarch64")
    ],
)
def test_neon_has_the_bits_of_other_processors(variant: variants.Variant, reference: str) -> None:
    program = driver([CROSS], (*variant.options, "-static"))
    found = said(EMULATOR, program)
    assert found == reference
    assert found.splitlines()[-1] == "fine"
    assert len(set(found.splitlines())) == len(found.splitlines()) > 6  # kinds that differ
