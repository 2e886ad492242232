"""Groups of commands to which other distributions add (core/extensions.py); a command is imported when it is used."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.shared.options import name_values
from foretoken.core import extensions
from foretoken.core.errors import ConfigError

_OF_THE_LAB = ("analyze", "eval", "bench.serve", "bench.verify", "train.base")


class ExtendedGroup(TyperGroup):
    """A group with the commands of its own, and those that are declared below its name.

    Attributes:
        path: what stands before the name of a command in an entry point: nothing, or the group's name and a dot.
    """

    path = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Its own commands, then those of other distributions."""
        for name in self._declared():
            self.get_command(ctx, name)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name; None: there is none.

        Raises:
            ConfigError: it comes with foretoken-lab, which is not installed.
        """
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        if cmd_name not in self._declared():
            if self.path + cmd_name in _OF_THE_LAB:
                command = self.path.replace(".", " ") + cmd_name
                raise ConfigError(f"'foretoken {command}' comes with foretoken-lab; {extensions.GET_LAB}")
            return None
        made = self.command_of(cmd_name, extensions.loaded(extensions.COMMANDS, self.path + cmd_name))
        name_values(made)
        self.commands[cmd_name] = made
        return made

    def command_of(self, name: str, declared: Any) -> Any:
        """The command that an entry point's application or function describes."""
        if isinstance(declared, typer.Typer):
            made: Any = typer.main.get_command(declared)
            made.name = name
            return made
        return command_of_function(name, declared)

    def _declared(self) -> list[str]:
        """Names of the commands of other distributions, of this group alone."""
        names = [name for name in extensions.declared(extensions.COMMANDS) if name.startswith(self.path)]
        return [name for each in names if "." not in (name := each.removeprefix(self.path))]


def command_of_function(name: str, function: Any, **described: Any) -> Any:
    """The command that typer makes of a function.

    Args:
        described: its help and epilog, where they are not the docstring's.
    """
    made = typer.Typer()
    made.callback()(lambda: None)  # a group even with one command in it
    made.command(name, **described)(function)
    return typer.main.get_group(made).commands[name]
