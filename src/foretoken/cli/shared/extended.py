"""Groups of commands that other distributions extend (core/extensions.py); commands are imported on use."""

from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.shared.options import name_values
from foretoken.core import extensions
from foretoken.core.errors import ConfigError

_OF_THE_LAB = (
    "analyze",
    "eval",
    "rag",
    "bench.serve",
    "bench.verify",
    "calibrate",
    "train.base",
    "train.features",
    "train.judge",
)


class ExtendedGroup(TyperGroup):
    """A group with its own commands and those that entry points declare for it.

    Attributes:
        path: prefix of a command's name in an entry point: empty, or the group's name and a dot.
    """

    path = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the group's own commands, then those of other distributions."""
        for name in self._declared():
            self.get_command(ctx, name)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; None: there is none.

        Raises:
            ConfigError: it is part of foretoken-lab, which is not installed.
        """
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        if cmd_name not in self._declared():
            if self.path + cmd_name in _OF_THE_LAB:
                command = self.path.replace(".", " ") + cmd_name
                raise ConfigError(f"'foretoken {command}' is part of foretoken-lab; {extensions.GET_LAB}")
            return None
        made = self.command_of(cmd_name, extensions.loaded(extensions.COMMANDS, self.path + cmd_name))
        name_values(made)
        self.commands[cmd_name] = made
        return made

    def command_of(self, name: str, declared: Any) -> Any:
        """Return the command of an entry point's application or function."""
        if isinstance(declared, typer.Typer):
            made: Any = typer.main.get_command(declared)
            made.name = name
            return made
        return command_of_function(name, declared)

    def _declared(self) -> list[str]:
        """List the commands of other distributions in this group."""
        names = [name for name in extensions.declared(extensions.COMMANDS) if name.startswith(self.path)]
        return [name for each in names if "." not in (name := each.removeprefix(self.path))]


def command_of_function(name: str, function: Any, **described: Any) -> Any:
    """Return typer's command for a function.

    Args:
        described: help and epilog that replace the docstring's.
    """
    made = typer.Typer()
    made.callback()(lambda: None)  # a callback makes it a group even with one command
    made.command(name, **described)(function)
    return typer.main.get_group(made).commands[name]
