"""``foretoken train``: the commands that train something, made from what their methods declare (train/command.py)."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import Parameter, Signature, getdoc
from pathlib import Path
from typing import Any

import typer

from foretoken import catalog
from foretoken.cli.learn.training import counting, found_device, progress
from foretoken.cli.shared.console import emit_json, note, passing_note, quiet_transformers
from foretoken.cli.shared.extended import ExtendedGroup, command_of_function
from foretoken.cli.shared.flags import parameter_of
from foretoken.cli.shared.options import name_values
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_folder
from foretoken.train.command import Command, Loop, Session, options
from foretoken.train.stopping import stoppable

_DRAFT = "foretoken.train.draft_command:COMMAND"  # of no entry of the catalogue
_LEFT_BY_A_RUN = ("run/claim.json", "training.json", "config.json")


class Group(ExtendedGroup):
    """The group; commands of methods are collected when one is first looked for."""

    path = "train."
    _collected = False

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them."""
        self._collect()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of them."""
        self._collect()
        return super().get_command(ctx, cmd_name)

    def command_of(self, name: str, declared: Any) -> Any:
        """The command that a Command describes, or a function's."""
        if not isinstance(declared, Command):
            return super().command_of(name, declared)
        epilog = f"Example: {declared.example}"
        return command_of_function(name, _function(declared), help=getdoc(declared.config), epilog=epilog)

    def _collect(self) -> None:
        if self._collected:
            return
        self._collected = True
        for command in commands():
            made = self.command_of(command.name, command)
            name_values(made)
            self.commands.setdefault(command.name, made)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Train small learned parts for a target of yours: drafts, heads, adapters, judges.",
    epilog="Example: foretoken train draft --target ./my-model --corpus chats.jsonl --out my-draft --minutes 30",
)


def commands() -> Iterator[Command]:
    """``draft``, then what the catalogue's entries name; imported when a command of this group is looked for."""
    named = (entry.training for entry in catalog.entries() if entry.training is not None)
    for place in (_DRAFT, *dict.fromkeys(named)):
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
    """Check the options that all commands share, train, and print the result."""
    config = command.config(**given)
    check_folder(config.place, "--out")
    _check_own(config.place)
    minutes = config.minutes if isinstance(config, Loop) else None
    with stoppable(config.place, minutes):
        config = replace(config, device=found_device(config.device))
        quiet_transformers(config.verbose)
        with passing_note("loading torch"):
            import torch
        if config.threads is not None:
            torch.set_num_threads(config.threads)
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
