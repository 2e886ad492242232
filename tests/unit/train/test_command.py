"""Training commands as data: options derived from a Config, and rules for every declared command."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest

from foretoken import catalog
from foretoken.cli.learn.train import commands
from foretoken.cli.main import main
from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import Command, Common, Loop, options

COMMANDS = {command.name: command for command in commands()}


@dataclass(frozen=True, kw_only=True)
class Mine(Loop):
    """A Config of a third-party method."""

    target: Annotated[str, Option("The model.", "-t")]
    width: Annotated[int, Option("How wide.", above=0)] = 3
    seed: Annotated[int, Option("Of nothing else.", least=0)] = 7


def test_own_options_come_first_and_the_required_ones_before_all() -> None:
    found = list(options(Mine))
    assert [each.name for each in found][:6] == ["target", "out", "width", "seed", "minutes", "tokens"]
    assert {each.name for each in found} == {each.name for each in fields(Mine)}
    by_name = {each.name: each for each in found}
    assert by_name["seed"].option.help == "Of nothing else."
    assert by_name["seed"].default == 7
    assert by_name["as_json"].option.flag("as_json") == "--json"
    assert by_name["checkpoint_every"].option.flag("checkpoint_every") == "--checkpoint-every"
    assert by_name["target"].default is MISSING


@pytest.mark.parametrize(
    "given",
    [{"width": 0}, {"minutes": float("nan")}, {"minutes": float("inf")}, {"checkpoint_every": -1.0}, {"rate": 0.0}],
)
def test_what_must_be_positive_is_checked_by_its_name(given: dict[str, Any]) -> None:
    assert Mine(target="x", out=Path("y")).width == 3
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"^{name}={value} must be"):
        Mine(target="x", out=Path("y"), **given)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_declared_command_describes_itself(command: Command) -> None:
    assert issubclass(command.config, Common)
    assert command.example.startswith(f"foretoken train {command.name} ")
    described = list(options(command.config))
    flags = [each.option.flag(each.name) for each in described]
    assert len(set(flags)) == len(flags)
    assert all(flag in flags for flag in command.example.split() if flag.startswith("--"))
    assert all(each.option.help.endswith(".") for each in described)


def test_every_entry_s_command_is_there_under_its_place_in_the_catalogue() -> None:
    named = [catalog.imported(entry.training) for entry in catalog.entries() if entry.training is not None]
    assert {command.name for command in named} >= {"kangaroo", "sprinter", "eagle"}
    assert {command.name for command in named} <= set(COMMANDS)


def test_the_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import sys\nfrom foretoken.cli.main import main\n"
        f"for name in {['', *COMMANDS]!r}:\n"
        "    assert main(['train', *name.split(), '--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command.example.split()[-1] in done.stdout for command in COMMANDS.values())


@pytest.mark.parametrize("name", ["eagle", "dovetail", "mtp", "scylla"])
def test_unrolled_steps_are_bounded_by_the_parser(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", "zoo:draft", "--out", "x", "--corpus", "x.jsonl", "--steps", "99999999999999999999"]
    assert main(["train", name, *given]) == 2
    assert "--steps" in capsys.readouterr().err
