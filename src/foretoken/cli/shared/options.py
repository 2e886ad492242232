"""Options that several commands share, declared once: the same name, the same meaning, the same help."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from foretoken import zoo
from foretoken.cli.shared.console import note, passing_note, quiet_transformers
from foretoken.cli.shared.flags import Flags
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_name, home_expanded
from foretoken.core.importing import gc_paused
from foretoken.models.gguf.magic import is_gguf
from foretoken.options.model import EngineOptions, ModelOptions

HELP_NAMES = ["-h", "--help"]

_MODEL = "Model"
_METHOD = "Method"
_MOST_REPEATS = 10_000


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A Hugging Face folder, a GGUF file, a hub id, zoo:NAME, or grown:NAME:SIZE.",
        rich_help_panel=_MODEL,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="A drafter; 'foretoken methods' lists them.",
        show_default="suffix; with --draft-model draft_model",
        rich_help_panel=_METHOD,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="The draft checkpoint, of the model's vocabulary; zoo:base brings zoo:draft.",
        rich_help_panel=_METHOD,
    ),
]
Loading = Annotated[ModelOptions, Flags(_MODEL)]
Engine = Annotated[EngineOptions, Flags(_MODEL, only=("max_num_seqs",))]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An option of the method, num_speculative_tokens, verifier, or verification.*. Repeatable.",
        rich_help_panel=_METHOD,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show what the libraries print, and tracebacks of internal errors.")
]

# The same option in another panel of the help: Annotated[float, temperature_option("Sampling")]


def temperature_option(panel: str) -> Any:
    """``--temperature`` of one number."""
    return typer.Option("--temperature", help="0 is greedy decoding.", rich_help_panel=panel)


def seed_option(panel: str) -> Any:
    """``--seed`` of commands that always have one."""
    return typer.Option("--seed", help="Seeds the sampling.", rich_help_panel=panel)


def repeats_option(words: str, panel: str | None = None) -> Any:
    """``--repeats`` of what is timed."""
    return typer.Option("--repeats", min=1, max=_MOST_REPEATS, help=words, rich_help_panel=panel)


def json_option(words: str, panel: str | None = None) -> Any:
    """``--json``, a switch: what a command has to say, as JSON on stdout and nothing else there."""
    return typer.Option("--json", help=words, rich_help_panel=panel)


def out_option(words: str, panel: str | None = None, **more: Any) -> Any:
    """``--out``, the file or the folder that a command makes."""
    return typer.Option("--out", "-o", metavar="PATH", help=words, rich_help_panel=panel, **more)


def suite_option(panel: str | None = None, note: str = "") -> Any:
    """``--suite``, the prompts that something is measured on."""
    return typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Prompts to measure on: a named suite's, or a file in Spec-Bench format (turns, the first is used, and "
        f"category; .gz and .xz are read too). {note}".rstrip(),
        show_default="a bundled file of 30",
        rich_help_panel=panel,
    )


def corpus_option(panel: str | None = None) -> Any:
    """``--corpus``, text of the user's own."""
    return typer.Option(
        "--corpus",
        metavar="FILE",
        help="JSON Lines of chats or texts, or plain text. Repeatable.",
        rich_help_panel=panel,
    )


def limit_option(panel: str | None, words: str, *, least: int | None = 1, **more: Any) -> Any:
    """``--limit``: so many of every category or task at most; ``least`` None: the tasks check it themselves."""
    return typer.Option("--limit", metavar="N", min=least, help=words, rich_help_panel=panel, **more)


def answer_length_option(panel: str) -> Any:
    """``--max-tokens`` where a task has a length of its own."""
    return typer.Option(
        "--max-tokens", help="Tokens of an answer at most.", show_default="the task's", rich_help_panel=panel
    )


def data_option(panel: str | None = None) -> Any:
    """``--data``, the folder of the corpora."""
    return typer.Option(
        "--data", metavar="DIR", help="The folder of the corpora; short for FORETOKEN_DATA.", rich_help_panel=panel
    )


def prompt_length_option(panel: str) -> Any:
    """``--prompt-tokens``, for tasks whose prompts are cut to a length."""
    return typer.Option(
        "--prompt-tokens",
        min=1,
        metavar="N",
        help="Tokens of a prompt, for keys and qmsum.",
        show_default="the task's",
        rich_help_panel=panel,
    )


def name_values(command: Any) -> None:
    """Give every option of a kind the same word for its value in the help, and switches none: they take no value.

    Paragraphs are one line each, which the terminal breaks where it ends.

    Args:
        command: of typer; the commands in it are looked through, too.
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
    """By the type: its choices, or what stands for a number, a path, a text."""
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
    """Import the engine, keep the libraries quiet, and load a model.

    A path that looks like a folder but is not there is refused here, in plain words, before the import.
    """
    check_model_name(model)
    from foretoken import LLM

    # seconds of importing; a large model, or a download, takes minutes
    with passing_note(f"loading {model}"), gc_paused():
        quiet_transformers(verbose)
        llm = LLM(model, speculative_config=config, **({} if loading is None else asdict(loading)), **options)
    explain(llm)
    return llm


def check_vocabulary(model: str, draft: str, **placement: Any) -> None:
    """Refuse a draft model with other tokens before the weights of either are read."""
    from foretoken.engine import before_weights

    before_weights.check_vocabulary(model, draft, **placement)


def check_methods(model: str, configs: Iterable[Mapping[str, Any]], **placement: Any) -> None:
    """Refuse what several recipes lack before the weights of their target are read."""
    from foretoken.engine import before_weights

    for config in configs:
        before_weights.check(model, config, **placement)


def explain(llm: Any) -> None:
    """Say what the method has measured and chosen by itself, if it has."""
    recipe = llm.recipe
    for part, name in ((recipe.drafter, recipe.method), (recipe.plan, recipe.plan.settings_key)):
        if part.explanation:
            note(f"{name}: {part.explanation}")
    if recipe.explanation:
        note(recipe.explanation)


def check_model_name(model: str) -> None:
    """Refuse an unknown zoo name, or a path that does not exist.

    Raises:
        ConfigError: the message names the remedy.
    """
    if not model:
        raise ConfigError("--model is empty: name a folder, a GGUF file, a hub id or zoo:base")
    check_name(model, "--model ")
    if model.startswith(zoo.PREFIX):
        zoo.path(model)
    elif home_expanded(model).is_file():
        if not is_gguf(home_expanded(model)):
            raise ConfigError(
                f"--model {model} is a file: name the folder of a saved Hugging Face checkpoint, or a GGUF file"
            )
    elif (model.startswith((".", "/", "~")) or model.endswith(".gguf")) and not home_expanded(model).exists():
        raise ConfigError(f"--model {model}: there is no such folder or file")
