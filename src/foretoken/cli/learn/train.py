"""``foretoken train``: the commands that train something, made from what their methods declare (train/command.py)."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from foretoken import catalog
from foretoken.cli.learn import features
from foretoken.cli.learn.training import counting, found_device, progress, terminating
from foretoken.cli.shared.console import emit_json, note, quiet_transformers
from foretoken.cli.shared.flags import parameter_of
from foretoken.cli.shared.options import name_values
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_folder
from foretoken.train.command import Command, Session, options

_ZOO = ("foretoken.train.zoo_commands:BASE", "foretoken.train.zoo_commands:DRAFT")  # of no method
_LEFT_BY_A_RUN = ("run/claim.json", "training.json", "config.json")


class Group(TyperGroup):
    """The group, whose commands are collected when somebody first looks for them."""

    _collected = False

    def list_commands(self, ctx: Any) -> list[str]:
        self._collect()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._collect()
        return super().get_command(ctx, cmd_name)

    def _collect(self) -> None:
        if self._collected:
            return
        self._collected = True
        made = typer.Typer()
        made.callback()(lambda: None)  # a group even if there is one command
        for command in commands():
            made.command(command.name, help=command.help, epilog=f"Example: {command.example}")(_function(command))
        for name, each in typer.main.get_group(made).commands.items():
            name_values(each)
            self.commands.setdefault(name, each)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Train the zoo's models, and small learned parts for a target of yours.",
    epilog="Example: foretoken train draft --target ./my-model --corpus chats.jsonl --out my-draft --minutes 30",
)
app.command(
    "features", epilog="Example: foretoken train features --target zoo:base --corpus my.jsonl --out my-features"
)(features.features)


def commands() -> Iterator[Command]:
    """Those of the zoo, then what the catalogue's entries name; imported when a command of this group is asked for."""
    named = (entry.training for entry in catalog.entries() if entry.training is not None)
    for place in (*_ZOO, *dict.fromkeys(named)):
        found: Command = catalog.imported(place)
        yield found


def _function(command: Command) -> Any:
    """The function from which typer makes a command: its signature is the Config."""

    def call(context: typer.Context, **given: Any) -> None:
        _run(command, context.obj or [], given)

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [parameter_of(each) for each in options(command.config)]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _run(command: Command, arguments: list[str], given: dict[str, Any]) -> None:
    """Check what all commands share, train, and say what came of it."""
    config = command.config(**{**given, "device": found_device(given["device"])})
    quiet_transformers(config.verbose)
    check_folder(config.place, "--out")
    _check_own(config.place)
    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    with terminating():
        record = command.run(config, Session(arguments, progress, counting, _prompts))
    if config.as_json:
        emit_json(record)
    for line in command.say(record, config.place):
        note(line)


def _check_own(folder: Path) -> None:
    """Refuse a folder that holds files of others, such as a home or a root folder; a run may go on in its own.

    Raises:
        ConfigError: names one of the files.
    """
    if not folder.is_dir() or any((folder / name).exists() for name in _LEFT_BY_A_RUN):
        return
    others = sorted(path.name for path in folder.iterdir() if path.name != "run" or any(path.iterdir()))
    if others:
        raise ConfigError(f"--out {folder}: there is {others[0]!r:.80} in it, of no training; name a folder to make")


def _prompts(suite: str | None) -> list[str]:
    from foretoken.bench.suite import read_suite

    return [prompt.text for prompt in read_suite(suite)]
