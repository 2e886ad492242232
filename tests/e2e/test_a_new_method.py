"""A method of thirty lines and one entry, installed next to the product: whatever collects methods picks it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = '''"""Repeats the last token."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Drafter
from foretoken.core.tree import TokenTree
from foretoken.options.option import Checked, Option


class Stutter(Drafter):
    """Proposes the last token again and again."""

    name = "stutter"
    declared = Declared(variants=(Variant(), Variant(options={"times": 2}, one_rule=True)))

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options."""

        times: Annotated[int, Option("How often the token is repeated.", least=1)] = 3

    def __init__(self, config, target):
        self.times = config.times

    def propose(self, contexts, budgets):
        lengths = [min(self.times, budget.max_nodes, budget.max_depth) for budget in budgets]
        pairs = zip(contexts, lengths, strict=True)
        return [Draft(TokenTree([each.tokens[-1]] * length)) if length else NO_DRAFT for each, length in pairs]
'''
ENTRY = """from foretoken.catalog import Entry

STUTTER = Entry(
    name="stutter", kind="drafter", import_path="stutter.drafter:Stutter", summary="say it again", paper="-",
    promise="lossless", training="stutter.command:COMMAND",
)
"""
COMMAND = """from dataclasses import dataclass
from typing import Annotated

from foretoken.options.option import Option
from foretoken.train.command import Command, Common


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    '''Learn to stutter.'''
    stammer: Annotated[int, Option("How often.", above=0)] = 3


def run(config, session):
    return {"stammer": config.stammer}


COMMAND = Command(
    name="stutter", example="foretoken train stutter --out DIR", config=Config, run=run,
    say=lambda record, out: [f"{record['stammer']} times"],
)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where Python finds the method as an installed distribution with an entry point."""
    site = tmp_path_factory.mktemp("site")
    files = {
        "stutter/__init__.py": "",
        "stutter/drafter.py": DRAFTER,
        "stutter/entry.py": ENTRY,
        "stutter/command.py": COMMAND,
        "stutter-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: stutter\nVersion: 1.0\n",
        "stutter-1.0.dist-info/entry_points.txt": "[foretoken.methods]\nstutter = stutter.entry:STUTTER\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    paths = [str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def test_the_command_line_lists_it_with_its_options(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "foretoken", "methods", "stutter", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["kind"], found["summary"]) == ("drafter", "say it again")
    assert {"name": "times", "type": "int", "default": 3, "help": "How often the token is repeated."} in found[
        "options"
    ]


def test_the_command_line_trains_it(environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "foretoken",
        "train",
        "stutter",
        "--out",
        str(tmp_path),
        "--stammer",
        "5",
        "--json",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"stammer": 5}
    assert "5 times" in done.stderr


def test_exactness_and_card_tests_collect_it(environment: dict[str, str]) -> None:
    """The exactness tests run and pass; the tests of cards miss its card."""
    wanted = "stutter and (match or ratio or proposes or card)"
    tests = ["tests/golden/test_greedy_equality.py", "tests/golden/test_same_stream.py", "tests/unit/test_catalog.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rA", "-p", "no:cacheprovider", *tests, "-k", wanted]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    passed = {line.split("::", 1)[1] for line in lines if line.startswith("PASSED")}
    failed = {line.split("::", 1)[1].split(" - ")[0] for line in lines if line.startswith("FAILED")}
    same_tokens = "test_every_lossless_recipe_gives_the_plain_greedy_tokens"
    assert {
        "test_a_variant_proposes_its_declared_drafts[stutter]",
        "test_a_variant_proposes_its_declared_drafts[stutter-2]",
    } <= passed, done.stdout
    for rule in ("match", "ratio"):  # of a fixed length or an adaptive one
        assert any(f"{same_tokens}[stutter-{rule}-{count}]" in passed for count in (5, "auto")), done.stdout
    assert not any("[stutter-2-match" in name for name in passed)  # this variant is declared to need one rule only
    assert "test_card_has_the_tables_of_its_method[stutter]" in failed
    assert not any(name.startswith(same_tokens) for name in failed)
