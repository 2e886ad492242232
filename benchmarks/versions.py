"""What a result must say beside the package's own provenance: the peers' versions and the script's command."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PEERS = ("llama-cpp-python", "gguf", "numpy", "scikit-learn")


def versions() -> dict[str, Any]:
    """Versions of the peers, and what llama.cpp was built for; None for what is absent."""
    found: dict[str, Any] = {}
    for name in _PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    try:
        import llama_cpp
    except ImportError:
        return found
    found["llama.cpp build"] = llama_cpp.llama_print_system_info().decode().strip()
    return found


def command(script: str) -> str:
    """The command line, with absolute paths cut to their last part: the rest is of no use on another machine."""
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{script}", *arguments])
