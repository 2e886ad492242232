"""Compile decoder.c once per machine, with whatever C compiler the machine has; without one, do without.

The library is kept in the user's cache folder under a name made of the source, the compiler and the processor, so
that it is rebuilt exactly when one of them changes. Building takes a few seconds and happens at the first load of a
model that can use it. ``FORETOKEN_FUSED=0`` switches the fused decoder off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from foretoken.core.files import cache_folder

_HERE = Path(__file__).parent
_SOURCES = sorted(each.name for each in _HERE.iterdir() if each.suffix in (".c", ".h"))
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-pthread",
)
_ABI = 6

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled decoder, or None where it cannot be had (the reason is logged once)."""
    if os.environ.get("FORETOKEN_FUSED", "1") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        log.info("no C compiler found (cc, gcc, clang): the general CPU path is used; install one for speed")
        return None
    try:
        found = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("the fused CPU decoder could not be built, the general path is used: %s", detail.strip()[-500:])
        return None
    return declared(found)


def declared(found: ctypes.CDLL) -> ctypes.CDLL | None:
    """The library with what its functions take and give; None if it is another version's."""
    found.foretoken_abi.restype = ctypes.c_int64
    if found.foretoken_abi() != _ABI:
        return None
    found.foretoken_team_new.restype = ctypes.c_void_p
    found.foretoken_team_free.argtypes = [ctypes.c_void_p]
    found.foretoken_team_free.restype = None
    found.foretoken_forward.argtypes = [ctypes.c_void_p] * 3
    found.foretoken_linear.argtypes = [ctypes.c_void_p] * 2
    found.foretoken_move.argtypes = [ctypes.c_void_p]
    found.foretoken_move.restype = None
    for function in (found.foretoken_forward, found.foretoken_linear):
        function.restype = ctypes.c_int64
    return found


def _compiler() -> list[str] | None:
    asked = os.environ.get("CC")
    if asked:
        return shlex.split(asked)
    for name in ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def _built(compiler: list[str]) -> Path:
    """Path of the library, compiled now if it is not there yet."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    key = hashlib.sha256()
    for name in _SOURCES:
        key.update((_HERE / name).read_bytes())
    key.update("\0".join([version, _processor(), *_FLAGS]).encode())
    folder = cache_folder()
    target = folder / f"decoder-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unfinished = Path(scratch) / "decoder.so"
        command = [*compiler, *_FLAGS, "-shared", str(_HERE / "decoder.c"), "-lm", "-o", str(unfinished)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        os.replace(unfinished, target)  # another process may have been faster: either file is right
    return target


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
