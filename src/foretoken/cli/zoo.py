"""``foretoken zoo``: the small models that come with the package or are made by one command, and where they lie."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken import zoo as models
from foretoken.cli.shared.console import emit, emit_json

app = typer.Typer(
    no_args_is_help=True,
    help="The zoo's models and where they lie. Write [bold]zoo:NAME[/bold] wherever a model is asked for.",
    epilog="Example: foretoken zoo path base",
    rich_markup_mode="rich",
)


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a model, with how it was made.")] = False,
) -> None:
    """One line a model: its name, whether it is bundled, and what it is; how to make the ones that are not."""
    for name in models.MODELS:
        model = models.find(name)
        state = "bundled" if model.bundled else "made here" if model.folder else "not bundled"
        if as_json:
            emit_json(
                {
                    "name": name,
                    "description": model.description,
                    "state": state,
                    "path": str(model.folder) if model.folder else None,
                    "command": model.how,
                    "training": model.record,
                }
            )
        else:
            hint = "" if model.folder else f" (make it: {model.how})"
            emit(f"{models.PREFIX}{name}\t{state}\t{model.description}{hint}")


@app.command("path", epilog="Example: ls $(foretoken zoo path base)")
def show_path(name: Annotated[str, typer.Argument(help="A model of the zoo, with or without 'zoo:'.")]) -> None:
    """Print the folder of a model: an ordinary Hugging Face folder, for any other program to load."""
    emit(str(models.path(name)))
