"""``foretoken methods``: the catalogue, and the options of one method."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from typing import Annotated, Any

import typer

from foretoken import catalog
from foretoken.cli.shared.console import emit, emit_json
from foretoken.cli.shared.options import Verbose
from foretoken.core.errors import ConfigError
from foretoken.options.tables import rows_of

_HEADINGS = {
    "drafter": "drafters (--method NAME): they propose tokens",
    "verifier": "verifiers (--set verifier=NAME): they decide which tokens stand",
    "plan": "plans (--set plan=NAME, verification.KEY=VALUE, stree.KEY=VALUE): how the target computes drafts",
}
_FIRST = ("draft_model", "ngram", "suffix", "suffix_first")  # what most people need
# of every drafter, beside those of its Config
_COMMON_OPTIONS = (
    {
        "name": "num_speculative_tokens",
        "type": "int | 'auto'",
        "default": "auto",
        "help": "draft tokens per step; auto chooses by measured acceptance and cost.",
    },
    {
        "name": "verifier",
        "type": "str",
        "default": "auto",
        "help": "which draft tokens stand; auto takes the strongest lossless rule that fits the draft.",
    },
)


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show one method with its options; without it, list all.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a method.")] = False,
    verbose: Verbose = False,
) -> None:
    """The catalogue: every drafter, verifier and plan, what each promises, and what it needs.

    A drafter goes with --method and proposes tokens; a verifier goes with
    --set verifier=NAME and decides which of them stand. The default verifier is
    the strongest lossless one that fits the draft. The default plan leaves
    nothing out.

    [bold]Examples[/bold]

      foretoken methods

      foretoken methods draft_model
    """
    if name is None:
        _list_all(json)
        return
    for entry in _find(name):
        _show(entry, json)


def _show(entry: catalog.Entry, json: bool) -> None:
    described = _describe(entry)
    if json:
        emit_json(described)
        return
    emit(f"{entry.name}: {entry.summary}")
    for field in ("kind", "promise", "needs", "weights", "paper"):
        emit(f"  {field:8} {described[field]}")
    if described["options"]:
        emit("\noptions (--set key=value)")
    for option in described["options"]:
        emit(f"  {option['name']} = {option['default']}    [{option['type']}]")
        emit(f"      {option['help']}")


def _list_all(json: bool) -> None:
    if json:
        for entry in catalog.entries():
            emit_json(_public(entry))
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for kind, heading in _HEADINGS.items():
        emit(heading)
        for entry in catalog.entries(kind):
            mark = "*" if entry.name in _FIRST and kind == "drafter" else " "
            details = f"{entry.promise}; needs {entry.needs}; weights: {entry.weights}; {entry.cited}"
            emit(f"{mark} {entry.name:12} {entry.summary}")
            emit(textwrap.fill(details, width, initial_indent=" " * 15, subsequent_indent=" " * 15))
        emit("")
    emit(
        "* needs no training of yours and no data: begin with these. 'foretoken methods NAME' shows the options of one."
    )


def _find(name: str) -> list[catalog.Entry]:
    """Of one name there may be a drafter and its verifier."""
    found = [entry for entry in catalog.entries() if entry.name == name]
    if found:
        return found
    known = sorted({entry.name for entry in catalog.entries()})
    raise ConfigError(f"unknown method '{name}': {catalog.remedy(name, known)}")


def _public(entry: catalog.Entry) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(entry) if field.name not in ("target", "training", "guarantee")]
    return {name: getattr(entry, name) for name in names}


def _describe(entry: catalog.Entry) -> dict[str, Any]:
    method = entry.load()
    options = rows_of(method.Config)
    if entry.kind == "plan":
        options = [{**option, "name": f"{method.settings_key}.{option['name']}"} for option in options]
    if entry.kind == "drafter":
        own = method.declared.own_verifier
        for common in _COMMON_OPTIONS:
            options.append({**common, "default": own} if own and common["name"] == "verifier" else common)
    return {**_public(entry), "options": options}
