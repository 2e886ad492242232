"""Where a figure comes from: commit, versions, machine, settings and the command that gives it again."""

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence, Set
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("foretoken", "torch", "transformers", "safetensors", "tokenizers")
_ZOO = Path(__file__).resolve().parents[1] / "zoo"
_BUNDLED = re.compile(r"\b(?:zoo:|grown:(?:zoo:)?)([\w-]+)")
# a record that a run has written does not change what the next run measures
_CODE = ("src", "lab", ":(exclude)lab/results")


def provenance(arguments: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Everything that a reader needs to run it again.

    Args:
        arguments: the command line without the program's name.
        settings: chosen or derived values (model, dtype, threads, seed, suite ...), recorded as given. A model that
            is bundled is recognised by its name, ``zoo:NAME`` or ``grown:NAME:SIZE``, here or in ``arguments``.
    """
    return {
        "command": shlex.join(["foretoken", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(Path(__file__).resolve().parents[1]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "gpu": _gpu(),
        "models": bundled_weights(set(_BUNDLED.findall(f"{arguments} {settings}"))),
        **settings,
    }


def bundled_weights(models: Set[str]) -> dict[str, str]:
    """Checksums of the weights in the folders of bundled models, heads included.

    Those of ``draft`` are added: ``base`` finds its draft without an option. Keys are paths in the zoo without their
    suffix: ``base/model``, ``base/eagle/model``.
    """
    names = {*models, "draft"} if models else set()
    folders = [folder for name in names for folder in (_ZOO / name, _ZOO / f"{name}-tasks") if folder.is_dir()]
    files = sorted(path for folder in folders for path in folder.rglob("*.safetensors"))
    return {path.relative_to(_ZOO).with_suffix("").as_posix(): checksum(path) for path in files}


def checksum(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def git_commit(package: Path) -> str | None:
    """The commit that the package was imported from, with ``-dirty`` if code differs from it.

    None when the package is installed elsewhere: a virtual environment may lie inside some other repository.
    """
    try:
        root = _git(package, "rev-parse", "--show-toplevel")
        if Path(root) / "src" / package.name != package:
            return None
        dirty = _git(Path(root), "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
        return _git(package, "rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """The processor as its maker calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # never import it just to write "none"
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
