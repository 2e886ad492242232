"""The wheel's own part: libraries of the native decoder, one for each kind of processor of this architecture.

A wheel that holds them needs no C compiler where it is installed. Where it is built without one, or with
FORETOKEN_PREBUILT=0, it holds the sources alone and is for any machine; they are compiled at the first use then.
FORETOKEN_PREBUILT=1 refuses to build such a wheel. With a cross compiler, the platform is named as for any package:
CC=aarch64-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-aarch64. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src", "foretoken", "native")

# by its path: the package itself needs torch to be imported
found = importlib.util.spec_from_file_location("variants", NATIVE / "variants.py")
variants = sys.modules["variants"] = importlib.util.module_from_spec(found)
found.loader.exec_module(variants)


ASKED = os.environ.get("FORETOKEN_PREBUILT", "")


def prebuilt() -> list:
    """The variants to compile; none where that is not possible, or not wished for."""
    system, _, machine = sysconfig.get_platform().partition("-")
    if ASKED == "0" or (ASKED != "1" and (system != "linux" or variants.compiler_command() is None)):
        return []
    return variants.of_architecture(machine)


class BuildWithLibraries(build_py):
    """Copies the package, then compiles the libraries beside the copy."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # sources change: they are compiled when they are used
            return
        folder = Path(self.build_lib, *NATIVE.parts[1:], "prebuilt")
        for left in folder.glob("*.so"):  # of a build of other sources
            left.unlink()
        compiler = variants.compiler_command()

        def compile_one(variant) -> None:
            target = folder / variant.library.name
            try:
                variants.compile_library(compiler, variant.options, target)
            except (OSError, subprocess.SubprocessError) as error:
                detail = str(getattr(error, "stderr", None) or error)
                problem = f"the decoder for {variant.name} cannot be compiled: {detail[-2000:]}"
                if ASKED == "1":
                    raise SystemExit(problem) from None
                self.warn(problem)  # an old compiler does not know every processor
                return
            variants.seal(target)

        chosen = prebuilt()
        if chosen:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, chosen))


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python: libraries are loaded through ctypes. Without them, for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class WithLibraries(Distribution):
    """Says whether there are any: then the package is installed where platforms keep theirs."""

    def has_ext_modules(self) -> bool:
        return bool(prebuilt())


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
