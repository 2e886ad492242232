"""Contents of an ordinary install: a clone has all files, a wheel only the declared ones."""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
import zlib
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("place", "package", "kinds"),
    [
        (".", "foretoken", {".c", ".h", ".inc", ".jsonl", ".safetensors", ".typed"}),
        ("lab", "foretoken_lab", {".jsonl"}),
    ],
)
def test_every_data_file_is_declared_as_package_data(place: str, package: str, kinds: set[str]) -> None:
    declared = tomllib.loads((ROOT / place / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    carried = {
        file
        for each, patterns in declared.items()
        for pattern in patterns
        for file in (ROOT / place / "src" / each.replace(".", "/")).glob(pattern)
    }
    beside = {
        file
        for file in (ROOT / place / "src" / package).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc", ".md") and "__pycache__" not in file.parts
    }
    assert {file.suffix for file in beside} >= kinds
    assert beside - carried == set()


def test_the_wheel_holds_no_lab() -> None:
    """Packages are found below src alone, where there is nothing but foretoken."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"] == {
        "find": {"where": ["src"]}
    }
    assert [each.name for each in (ROOT / "src").iterdir() if each.is_dir() and each.suffix != ".egg-info"] == [
        "foretoken"
    ]


def test_the_lab_is_of_the_same_version() -> None:
    product, lab = (tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"] for place in (".", "lab"))
    assert lab["version"] == product["version"]
    assert f"foretoken=={product['version']}" in lab["dependencies"]


def test_the_wheel_stays_small() -> None:
    """Under 60 MB: weights are nearly all of it, and deflate takes about a fifth off them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    zoo = ROOT / "src" / "foretoken" / "zoo"
    left_out = {file for pattern in settings["exclude-package-data"]["foretoken.zoo"] for file in zoo.glob(pattern)}
    carried = [file for file in zoo.rglob("*") if file.is_file() and file not in left_out]
    unpacked = {"mamba", "longspec"}
    unpacked |= {f"{name}-tasks" for name in ("hybrid", "moe", "long")}
    assert {file.parent.name for file in left_out} == unpacked
    assert sum(len(zlib.compress(file.read_bytes(), 1)) for file in carried) < 58e6


def test_tracked_files_stay_below_200_megabytes() -> None:
    """The files of a working tree; a clone with ``--depth 1`` transfers about three quarters of it."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: git cannot list its files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in paths if path.exists()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:8]
    assert sum(sizes.values()) < 200e6, ", ".join(f"{path}: {sizes[path] / 1e6:.0f} MB" for path in largest)


def test_the_product_stays_below_50000_lines_of_code() -> None:
    """Without blank lines, comments and docstrings; the lab is not counted."""
    sources = sorted((ROOT / "src" / "foretoken").rglob("*.py"))
    assert len(sources) > 300
    assert sum(num_lines_of_code(path.read_text(encoding="utf-8")) for path in sources) < 50_000


def num_lines_of_code(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_lines_of_code_are_counted_without_docstrings_and_comments() -> None:
    text = '"""Doc."""\n\n# a comment\nx = 1\n\n\ndef f():\n    """Doc."""\n    return x\n'
    assert num_lines_of_code(text) == 3
