"""Options that several commands share: one name, one meaning, one help text."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from foretoken import zoo
from foretoken.cli.shared.console import note, passing_note, quiet_transformers
from foretoken.cli.shared.flags import Flags
from foretoken.cli.shared.settings import DRAFT_MODEL_HELP, RecipeFlags
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_name, home_expanded
from foretoken.core.importing import lean_imports
from foretoken.models.gguf.magic import is_gguf
from foretoken.options.model import EngineOptions, ModelOptions

HELP_NAMES = ["-h", "--help"]

_MODEL = "Model"
_METHOD = "Method"
_model = functools.partial(typer.Option, rich_help_panel=_MODEL)
_method = functools.partial(typer.Option, rich_help_panel=_METHOD)
_MOST_REPEATS = 10_000


Model = Annotated[
    str, _model("--model", "-m", metavar="MODEL", help="A Hugging Face folder, a GGUF file, a hub id, or zoo:NAME.")
]
DraftModel = Annotated[str | None, _method("--draft-model", metavar="MODEL", help=DRAFT_MODEL_HELP)]
Recipe = Annotated[RecipeFlags, Flags(_METHOD)]
Loading = Annotated[ModelOptions, Flags(_MODEL)]
Engine = Annotated[EngineOptions, Flags(_MODEL)]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the output of the libraries, and tracebacks of internal errors.")
]

# The same option in another panel of the help: Annotated[int, repeats_option("Timed runs.", "Measuring")]


def repeats_option(words: str, panel: str | None = None) -> Any:
    """``--repeats`` of a timed measurement."""
    return typer.Option("--repeats", min=1, max=_MOST_REPEATS, help=words, rich_help_panel=panel)


def json_option(words: str, panel: str | None = None) -> Any:
    """``--json``, a switch: print the results as JSON on stdout, and nothing else there."""
    return typer.Option("--json", help=words, rich_help_panel=panel)


def out_option(words: str, panel: str | None = None, **more: Any) -> Any:
    """``--out``, the file or the folder of the results."""
    return typer.Option("--out", "-o", metavar="PATH", help=words, rich_help_panel=panel, **more)


def suite_option(panel: str | None = None, note: str = "") -> Any:
    """``--suite``, the prompts of a measurement."""
    return typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Prompts of the measurement: a named suite, or a file in Spec-Bench format (first of turns, and "
        f"category; .gz and .xz work too). {note}".rstrip(),
        show_default="a bundled file of 30 prompts",
        rich_help_panel=panel,
    )


def limit_option(panel: str | None, words: str, *, least: int | None = 1, **more: Any) -> Any:
    """``--limit``: maximum number per category or task; ``least`` None: the tasks check it themselves."""
    return typer.Option("--limit", metavar="N", min=least, help=words, rich_help_panel=panel, **more)


def data_option(panel: str | None = None) -> Any:
    """``--data``, the folder of the corpora."""
    return typer.Option(
        "--data", metavar="DIR", help="Folder of the corpora; sets FORETOKEN_DATA.", rich_help_panel=panel
    )


def name_values(command: Any) -> None:
    """Use the same metavar for all options of a type in the help, and none for switches.

    Each paragraph becomes one line, and the terminal wraps it.

    Args:
        command: typer's command; includes its subcommands.
    """
    if command.help:
        command.help = "\n\n".join(map(_one_line, command.help.split("\n\n")))
    shown = command.get_help_option(typer.Context(command, help_option_names=HELP_NAMES))
    for param in (*command.params, *([] if shown is None else [shown])):
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.opts[0].startswith("-"):
            param.metavar = param.metavar or _word(param)
        else:  # the metavar of an argument is its name
            param.metavar = param.metavar or param.opts[0].upper()
            param.display_type_rich = functools.partial(_shown, _word(param))
    for inner in getattr(command, "commands", {}).values():
        name_values(inner)


def _one_line(paragraph: str) -> str:
    return paragraph if paragraph.startswith(" ") else " ".join(paragraph.split("\n"))


def _shown(word: str | None, ctx: typer.Context) -> str | None:
    return word


def _word(option: Any) -> str | None:
    """Return the metavar of a type: its choices, or a word for a number, a path, a text."""
    if option.type_descriptor.is_choice:
        return "|".join(each.value for each in option.type_descriptor.choices)
    kind = option.type_descriptor.annotation
    for each, word in ((int, "N"), (float, "X"), (Path, "PATH"), (str, "TEXT")):
        if each in (kind, *get_args(kind)):
            return word
    return None


def load_model(
    model: str, config: dict[str, Any], *, verbose: bool, loading: ModelOptions | None = None, **options: Any
) -> Any:
    """Import the engine, silence the libraries, and load a model.

    A path that looks like a folder but does not exist is refused before the import.
    """
    check_model_name(model)
    from foretoken import LLM

    # imports take seconds; a large model, or a download, takes minutes
    with passing_note(f"loading {model}"), lean_imports():
        quiet_transformers(verbose)
        llm = LLM(model, speculative_config=config, **({} if loading is None else asdict(loading)), **options)
    explain(llm)
    return llm


def named_folders(given: Iterable[str]) -> dict[str, str]:
    """Return the folders of ``--lora NAME=DIR`` by name.

    Raises:
        ConfigError: one has no name, no folder that exists, or a name that another has.
    """
    found: dict[str, str] = {}
    for each in given:
        name, _, folder = each.partition("=")
        if not name.strip() or not folder or not Path(folder).expanduser().is_dir():
            raise ConfigError(f"--lora {each}: write NAME=DIR, with a LoRA folder that exists")
        if name in found:
            raise ConfigError(f"--lora: '{name}' names two folders: rename one")
        found[name] = folder
    return found


def check_methods(model: str, configs: Iterable[Mapping[str, Any]], **placement: Any) -> None:
    """Refuse missing parts of several recipes before reading their target's weights."""
    from foretoken.engine import before_weights

    for config in configs:
        before_weights.check(model, config, **placement)


def explain(llm: Any) -> None:
    """Report the method's own measurements and choices, if it has any."""
    for each in llm.recipe.explanations:
        note(each)


def check_model_name(model: str, option: str = "--model") -> None:
    """Refuse an unknown zoo name, or a path that does not exist.

    Args:
        option: that the name was given with, for the message.
    Raises:
        ConfigError: the message names the remedy.
    """
    if not model:
        raise ConfigError(f"{option} is empty: name a folder, a GGUF file, a hub id or zoo:base")
    check_name(model, f"{option} ")
    if model.startswith(zoo.PREFIX):
        zoo.path(model)
    elif home_expanded(model).is_file():
        if not is_gguf(home_expanded(model)):
            raise ConfigError(
                f"{option} {model} is a file: name the folder of a saved Hugging Face checkpoint, or a GGUF file"
            )
    elif (model.startswith((".", "/", "~")) or model.endswith(".gguf")) and not home_expanded(model).exists():
        raise ConfigError(f"{option} {model}: there is no such folder or file")
