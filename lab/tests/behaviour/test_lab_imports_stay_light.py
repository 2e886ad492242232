"""Help of the lab's commands imports nothing that computes, and other commands import nothing of the lab."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "scipy", "matplotlib", "foretoken_lab")


def imported(command: str) -> set[str]:
    look = f"from foretoken.cli.main import main\nmain({command.split()!r})\nimport sys\n"
    look += f"print('|', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("command", ["--help", "analyze --help", "eval --help", "bench verify --help", "train base -h"])
def test_help_imports_the_commands_alone(command):
    assert imported(command) == {"foretoken_lab"}


@pytest.mark.parametrize("command", ["--version", "generate --help", "bench --methods ngrm", "zoo list"])
def test_other_commands_do_not_import_the_lab(command):
    assert imported(command) == set()
