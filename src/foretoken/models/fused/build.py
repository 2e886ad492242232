"""Compile decoder.c once per machine, with whatever C compiler the machine has; without one, do without.

The library is kept in the user's cache folder under a name made of the source, the compiler, its flags and the
processor, so that it is rebuilt exactly when one of them changes. Building takes some seconds and happens at the first
load of a model that can use it: one process builds, the others wait for it. A library is loaded only if nobody but its
owner, who runs this, can have written it. ``FORETOKEN_FUSED=0`` switches the fused decoder off.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from foretoken.core.files import own_cache_folder
from foretoken.models.fused import selftest

_HERE = Path(__file__).parent
_SOURCES = sorted(each.name for each in _HERE.iterdir() if each.suffix in (".c", ".h"))
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # products are fused with additions where the source says so
    "-Wno-psabi",
    "-Werror=incompatible-pointer-types",  # floats taken for units would be a wrong answer, not a warning
    "-pthread",
)
_ABI = 10
_SCRATCH = "building-"
_DIGEST = hashlib.sha256().digest_size

log = logging.getLogger(__name__)


class _Unfit(Exception):
    """A library that was built, but must not be used; the message says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled decoder, or None where it cannot be had (the reason is said once, in a warning)."""
    if os.environ.get("FORETOKEN_FUSED", "1") == "0":
        return None
    compiler = compiler_command()
    if compiler is None:
        log.warning(
            "no C compiler was found (gcc, cc, clang): the slower general CPU path is used; install one for speed"
        )
        return None
    try:
        return found_or_built(compiler)
    except (OSError, subprocess.SubprocessError, _Unfit) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("the fused CPU decoder cannot be used, the slower general path is: %s", detail.strip()[-500:])
        return None


def compiler_command() -> list[str] | None:
    """What ``CC`` says, else the first compiler that is there; None if there is none."""
    asked = os.environ.get("CC")
    if asked:
        return shlex.split(asked)
    for name in ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def found_or_built(compiler: list[str]) -> ctypes.CDLL:
    """The library of this source, compiler and machine; compiled now if it is not there, or damaged.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled or loaded.
    """
    name = f"decoder-{_key(compiler)}.so"
    with _folder() as folder:
        target = folder / name
        with contextlib.suppress(OSError, _Unfit):
            return _kept(target)
        with _alone(folder):
            with contextlib.suppress(OSError, _Unfit):  # another process may have built it meanwhile
                return _kept(target)
            log.warning("compiling the fused CPU decoder for this machine, once (some seconds, rarely minutes)")
            return _built(compiler, target)


def _built(compiler: list[str], target: Path) -> ctypes.CDLL:
    for left in target.parent.glob(f"{_SCRATCH}*"):  # of a process that was ended while it held the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
        unfinished = Path(scratch) / "decoder.so"
        command = [*compiler, *_FLAGS, "-shared", str(_HERE / "decoder.c"), "-lm", "-o", str(unfinished)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        unfinished.chmod(0o600)
        found = _loaded(unfinished)
        reason = selftest.failure(found)
        if reason is not None:
            raise _Unfit(f"what {compiler[0]} makes of it fails its self-test ({reason})")
        with unfinished.open("ab") as file:
            file.write(hashlib.sha256(unfinished.read_bytes()).digest())
        os.replace(unfinished, target)
        return found


def _kept(path: Path) -> ctypes.CDLL:
    """A library that was built before. Behind its content lies its digest: loading half a file ends the process.

    Raises:
        OSError, _Unfit: see :func:`_loaded`; or it is not what was built.
    """
    content = path.read_bytes()
    if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise _Unfit(f"{path} is damaged")
    return _loaded(path)


def _loaded(path: Path) -> ctypes.CDLL:
    """A library that nobody else can have written.

    Raises:
        OSError: it is not there, or no library.
        _Unfit: somebody else can have written it, or it is another version's.
    """
    mine = path.lstat()
    if not stat.S_ISREG(mine.st_mode) or not _ours(mine):
        raise _Unfit(f"{path} is not a file that only its owner, who runs this, can write")
    found = ctypes.CDLL(str(path))
    try:
        found.foretoken_abi.restype = ctypes.c_int64
        if found.foretoken_abi() != _ABI:
            raise _Unfit(f"{path} is another version's")
        found.foretoken_team_new.restype = ctypes.c_void_p
        found.foretoken_team_free.argtypes = [ctypes.c_void_p]
        found.foretoken_team_free.restype = None
        found.foretoken_move.argtypes = [ctypes.c_void_p]
        found.foretoken_move.restype = None
        found.foretoken_forward.argtypes = [ctypes.c_void_p] * 3
        found.foretoken_linear.argtypes = [ctypes.c_void_p] * 2
        found.foretoken_chain.argtypes = [ctypes.c_void_p] * 4
        found.foretoken_token_parts.argtypes = [
            *[ctypes.c_void_p] * 4,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_void_p] * 3,
        ]
        for function in (
            found.foretoken_forward,
            found.foretoken_linear,
            found.foretoken_chain,
            found.foretoken_token_parts,
        ):
            function.restype = ctypes.c_int64
    except AttributeError as error:
        raise _Unfit(f"{path} lacks a function ({error})") from None
    return found


def _key(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    key = hashlib.sha256()
    for name in _SOURCES:
        key.update((_HERE / name).read_bytes())
    key.update("\0".join([*compiler, version, _processor(), *_FLAGS]).encode())
    return key.hexdigest()[:20]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The cache folder, which nobody else can look into; a temporary one, gone afterwards, where it cannot be had."""
    folder = own_cache_folder()
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="foretoken-") as own:  # a loaded library does not need its file
        yield Path(own)


def _ours(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While inside, no other process builds in this folder; a process that ends gives the lock back."""
    try:
        import fcntl
    except ImportError:  # not on this system: two processes may build the same library, either is right
        yield
        return
    descriptor = os.open(folder / "build.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
