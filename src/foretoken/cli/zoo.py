"""``foretoken zoo``: the bundled models, and where they lie."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken import zoo as models
from foretoken.cli.console import emit

app = typer.Typer(
    no_args_is_help=True,
    help="The bundled models and where they lie. Write [bold]zoo:NAME[/bold] wherever a model is asked for.",
    epilog="Example: foretoken zoo path base",
    rich_markup_mode="rich",
)


@app.command("list")
def list_models() -> None:
    """One line a model: its name, and what it is."""
    for name in models.names():
        emit(f"{models.PREFIX}{name}\t{models.describe(name)}")


@app.command("path", epilog="Example: ls $(foretoken zoo path base)")
def show_path(name: Annotated[str, typer.Argument(help="A bundled model, with or without 'zoo:'.")]) -> None:
    """Print the folder of a bundled model: an ordinary Hugging Face folder, for any other program to load."""
    emit(str(models.path(name)))
