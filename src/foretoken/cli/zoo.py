"""``foretoken zoo``: the small models that are bundled or that one command creates, and their folders."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken import zoo as models
from foretoken.cli.shared.console import emit, emit_json

app = typer.Typer(
    no_args_is_help=True,
    help="The zoo's models and their folders. Any option for a model accepts [bold]zoo:NAME[/bold].",
    epilog="Example: foretoken zoo path base",
    rich_markup_mode="rich",
)


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model, with its provenance.")] = False,
) -> None:
    """List the models, one per line: name, bundled or not, description, and the command that creates a missing one."""
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
            hint = "" if model.folder else f" (create it: {model.how})"
            emit(f"{models.PREFIX}{name}\t{state}\t{model.description}{hint}")


@app.command("path", epilog="Example: ls $(foretoken zoo path base)")
def show_path(name: Annotated[str, typer.Argument(help="A model of the zoo, with or without 'zoo:'.")]) -> None:
    """Print the folder of a model: an ordinary Hugging Face folder that other programs can load."""
    emit(str(models.path(name)))
