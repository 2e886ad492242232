"""A wheel decodes where it is installed: without a compiler, with the library that it brought."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from foretoken.native import variants

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "tests" / "helpers" / "installed_decoder.py"


@pytest.mark.slow
@pytest.mark.skipif(variants.compiler_command() is None, reason="no C compiler on this machine")
@pytest.mark.skipif(not variants.of_this_machine(), reason="wheels bring nothing for this kind of machine")
def test_a_wheel_brings_its_decoder(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, env={**os.environ, "FORETOKEN_PREBUILT": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    assert not any("foretoken_lab" in name for name in zipfile.ZipFile(wheel).namelist())
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, str(INSTALLED)],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("installed, ")


@pytest.mark.parametrize(
    ("platform", "kinds"), [("linux-aarch64", {"neon-dotprod", "neon"}), ("linux-x86_64", {"amx", "x86_64"})]
)
def test_a_cross_compiler_gets_the_processors_of_its_platform(platform: str, kinds: set[str]) -> None:
    pytest.importorskip("setuptools", minversion="77")
    listed = (
        "import runpy, setuptools; setuptools.setup = lambda **_: None;"
        "print(*(each.name for each in runpy.run_path('setup.py')['prebuilt']()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", listed],
        cwd=ROOT,
        env={**os.environ, "_PYTHON_HOST_PLATFORM": platform, "FORETOKEN_PREBUILT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert kinds <= set(done.stdout.split())
    assert all(("neon" in name) == platform.endswith("aarch64") for name in done.stdout.split())
