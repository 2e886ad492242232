"""README and quickstart keep their word: their Python blocks and their ``foretoken`` commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md", "docs/coming_from.md", "docs/serve.md")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"(<!-- not run: .*? -->\n)?^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    # a client needs a server: tests/e2e/test_serve.py
    return [each for left_out, each in found if not left_out and "OpenAI(base_url" not in each]


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if re.match(r"(echo .*\| )?foretoken ", line)))


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page, capsys):
    found = blocks(page, "python")
    assert found
    names: dict[str, object] = {}
    for block in found:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [each for each in commands() if "|" not in each])
def test_commands_run(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command, comments=True)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [each for each in commands() if "|" in each])
def test_commands_run_in_a_shell(command, tmp_path):
    # the console script of this very interpreter, wherever it is installed
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"


def test_pages_name_the_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pages = ("README.md", "CONTRIBUTING.md", "docs/benchmarks.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    targets = set(re.findall(r"(?:^|`)make (\w+)", text, flags=re.MULTILINE))
    assert {"demo", "test", "bench"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} is not there"
