"""Triton's kernels on a CPU: the process that interprets them, and the same kernels with a bug planted.

Triton is interpreted only where TRITON_INTERPRET=1 was set before it was imported, and then all of it is: so a helper
that runs kernels is a process of its own and prints its results as one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])


def found_by(helper: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m helpers.NAME`` prints under the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FORETOKEN_NATIVE": "1", "PYTHONPATH": PATHS}
    command = [sys.executable, "-m", f"helpers.{helper}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compile_for_a_gpu(script: str, folder: Path) -> None:
    """Run a script that compiles kernels, in a process that interprets none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": PATHS}
    path = folder / "compiled.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def planted(kernel: ModuleType, old: str, new: str) -> Iterator[Any]:
    """A kernel's module with one passage of its source replaced; Triton reads the file when the kernel runs."""
    source = Path(str(kernel.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the kernel"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "planted.py"
        path.write_text(source.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("planted", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["planted"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
