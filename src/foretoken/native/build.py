"""The compiled decoder of this machine: the wheel's library, else one compiled here, else none.

A wheel's library (variants.py) is used if it was made of the very sources next to this file, is whole, and has passed
its self-test on this machine. Else decoder.c is compiled and kept in the user's cache folder under a name made of
the source, the compiler, its flags and the processor: it is rebuilt exactly when one of them changes. Building takes
some seconds and happens at the first load of a model that can use it: one process builds, the others wait for it. A
cached library is loaded only if the current user owns it and no other user can write it. ``FORETOKEN_NATIVE=0``
switches the native decoder off; ``FORETOKEN_VARIANT=avx512-bf16`` selects that variant instead of the best one for this
processor, and compiles it if the wheel does not contain it.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from foretoken.core.errors import ConfigError
from foretoken.core.files import own_cache_folder
from foretoken.forward.switch import native_wanted, variant_wanted
from foretoken.native import selftest, variants

_ABI = 21
_SCRATCH = "building-"

log = logging.getLogger(__name__)


class _Unfit(Exception):
    """A library that was built, but must not be used; the message says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled decoder, or None if there is none (one warning gives the reason).

    Raises:
        ConfigError: ``FORETOKEN_NATIVE`` is neither 0 nor 1, or ``FORETOKEN_VARIANT`` names nothing that this processor
            can run.
    """
    if not native_wanted():
        return None
    able = _variants()
    ready = _ready_made(able)
    if ready is not None:
        return ready
    compiler = variants.compiler_command()
    if compiler is None:
        log.warning(
            "no C compiler was found (gcc, cc, clang): the slower general CPU path is used; install one for speed"
        )
        return None
    try:
        return found_or_built(compiler, variants.NATIVE if variant_wanted() is None else able[0].options)
    except (OSError, subprocess.SubprocessError, _Unfit) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("the native CPU decoder cannot be used, the slower general path is: %s", detail.strip()[-500:])
        return None


def is_ready() -> bool:
    """Whether a library of these sources is there, so that :func:`library` compiles nothing.

    Raises:
        ConfigError: as :func:`library`.
    """
    able, compiler, folder = _variants(), variants.compiler_command(), own_cache_folder()
    if any(each.library.is_file() for each in able):
        return True
    if compiler is None or folder is None:
        return False
    options = variants.NATIVE if variant_wanted() is None else able[0].options
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return (folder / f"decoder-{_key(compiler, options)}.so").is_file()
    return False


def origin() -> str | None:
    """Where the decoder of this machine is from, in a few words; None if there is none."""
    found = library()
    if found is None:
        return None
    path = Path(found._name)
    if path.parent != variants.PREBUILT:
        return "compiled on this machine"
    return f"installed, {path.name.removeprefix('decoder-').rpartition('-')[0]}"


def _variants() -> list[variants.Variant]:
    """Those that may be used here, the best first."""
    able, wanted = variants.of_this_machine(), variant_wanted()
    if wanted is None:
        return able
    chosen = [each for each in able if each.name == wanted]
    if not chosen:
        names = ", ".join(each.name for each in able) or "none that is known"
        raise ConfigError(f"FORETOKEN_VARIANT={wanted}: this processor can run {names}")
    return chosen


def found_or_built(compiler: list[str], options: Sequence[str] = variants.NATIVE) -> ctypes.CDLL:
    """The library of this source, compiler and machine; compiled now if it is not there, or damaged.

    Args:
        options: of the compiler.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled or loaded.
    """
    name = f"decoder-{_key(compiler, options)}.so"
    with _folder() as folder:
        target = folder / name
        with contextlib.suppress(OSError, _Unfit):
            return _kept(target)
        with _alone(folder):
            with contextlib.suppress(OSError, _Unfit):  # another process may have built it meanwhile
                return _kept(target)
            log.warning("compiling the native CPU decoder for this machine, once (some seconds, rarely minutes)")
            return _built(compiler, options, target)


def _built(compiler: list[str], options: Sequence[str], target: Path) -> ctypes.CDLL:
    for left in target.parent.glob(f"{_SCRATCH}*"):  # of a process that was ended while it held the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
        unfinished = Path(scratch) / "decoder.so"
        variants.compile_library(compiler, options, unfinished)
        unfinished.chmod(0o600)
        found = _own(unfinished)
        reason = selftest.failure(found)
        if reason is not None:
            raise _Unfit(f"the library that {compiler[0]} compiled fails its self-test ({reason})")
        variants.seal(unfinished)
        os.replace(unfinished, target)
        return found


def _kept(path: Path) -> ctypes.CDLL:
    """Load a library of the cache. A digest follows its content, because loading a truncated file crashes the process.

    Raises:
        OSError, _Unfit: see :func:`_own`; or its digest does not match.
    """
    if variants.sealed_digest(path) is None:
        raise _Unfit(f"{path} is damaged")
    return _own(path)


def _own(path: Path) -> ctypes.CDLL:
    """Load a library that no other user can have written.

    Raises:
        OSError: it is not there, or no library.
        _Unfit: another user can have written it, or it is another version's.
    """
    mine = path.lstat()
    if not stat.S_ISREG(mine.st_mode) or not _ours(mine):
        raise _Unfit(f"{path} is not a file of the current user that no other user can write")
    return _loaded(path)


def _loaded(path: Path) -> ctypes.CDLL:
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
        found.foretoken_forward.restype = found.foretoken_linear.restype = ctypes.c_int64
    except AttributeError as error:
        raise _Unfit(f"{path} lacks a function ({error})") from None
    return found


def _ready_made(able: Sequence[variants.Variant]) -> ctypes.CDLL | None:
    """The wheel's best library for this machine; None if it has none of these sources, or the library is unfit.

    It is as trustworthy as the code next to it. Its self-test runs once; a mark in the cache folder records success.
    """
    variant = next((each for each in able if each.library.is_file()), None)  # an old compiler leaves the newest out
    if variant is None:
        return None
    try:
        digest = variants.sealed_digest(variant.library)
        if digest is None:
            raise _Unfit(f"{variant.library} is damaged")
        found = _loaded(variant.library)
        folder, name = own_cache_folder(), hashlib.sha256(digest + variants.processor().encode()).hexdigest()[:20]
        if folder is None or not (folder / f"tried-{name}").is_file():
            reason = selftest.failure(found)
            if reason is not None:
                raise _Unfit(f"{variant.library} fails its self-test ({reason})")
            if folder is not None:
                (folder / f"tried-{name}").touch(mode=0o600)
    except (OSError, _Unfit) as error:
        log.warning("the native CPU decoder that was installed cannot be used: %s", error)
        return None
    log.info("the native CPU decoder is the one that was installed for this kind of processor (%s)", variant.name)
    return found


def _key(compiler: list[str], options: Sequence[str] = variants.NATIVE) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    return variants.key([*compiler, version, variants.processor(), *options])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The cache folder, private to the user; without one, a temporary folder that is removed afterwards."""
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
    """Hold the folder's build lock; the system releases it when a process ends."""
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
