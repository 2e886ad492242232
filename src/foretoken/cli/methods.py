"""``foretoken methods``: the catalogue, and the options of one method."""

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from foretoken import catalog, zoo
from foretoken.cli.shared.console import emit, emit_json
from foretoken.cli.shared.options import Verbose, check_model_name
from foretoken.core.errors import ConfigError
from foretoken.options.recipe import RecipeOptions
from foretoken.options.tables import rows_of

_HEADINGS = {
    "drafter": "drafters (--method NAME): they propose tokens",
    "verifier": "verifiers (--set verifier=NAME): they accept or reject tokens",
    "plan": "plans (--set plan=NAME, verification.KEY=VALUE, stree.KEY=VALUE): how the target computes drafts",
}
_FIRST = ("auto", "draft_model", "ngram", "suffix", "suffix_first")  # the common options
_COMMON_OPTIONS = ("num_speculative_tokens", "verifier")  # options of every drafter, in addition to its Config


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show one method with its options; without it, list all.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="List first the drafters that need nothing else for this model."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per method.")] = False,
    verbose: Verbose = False,
) -> None:
    """List every drafter, verifier and plan, with its guarantee and its requirements.

    A drafter (--method) proposes tokens; a verifier (--set verifier=NAME) accepts or rejects them. The default verifier
    is the strongest lossless one for the draft. The default plan computes every part of the model.

    [bold]Examples[/bold]

      foretoken methods

      foretoken methods draft_model

      foretoken methods --model ./my-model
    """
    if name is not None and model is not None:
        raise ConfigError("--model sorts the list of all methods: leave out either --model or the name")
    if model is not None:
        check_model_name(model)
    if name is None:
        _list_all(json, model)
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
        if described[field] not in ("-", "none", "nothing"):
            emit(f"  {field:8} {described[field]}")
    if described["options"]:
        emit("\noptions (--set key=value)")
    for option in described["options"]:
        emit(f"  {option['name']} = {option['default']}    [{option['type']}]")
        emit(f"      {option['help']}")


def _list_all(json: bool, model: str | None) -> None:
    lacks = {} if model is None else {each.name: _lacks(each, model) for each in catalog.entries("drafter")}
    entries = sorted(catalog.entries(), key=lambda each: each.kind == "drafter" and bool(lacks.get(each.name)))
    if json:
        for entry in entries:
            sorted_by = {"lacks": lacks[entry.name]} if model is not None and entry.kind == "drafter" else {}
            emit_json({**_public(entry), **sorted_by})
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for kind, heading in _HEADINGS.items():
        here = [entry for entry in entries if entry.kind == kind]
        if model is not None and kind == "drafter":
            _list(f"drafters for {model} as it is (--method NAME)", [e for e in here if not lacks[e.name]], width)
            heading, here = f"drafters for {model} that need more", [e for e in here if lacks[e.name]]
        _list(heading, here, width, lacks)
    emit("* needs neither training nor data: start with these. 'foretoken methods NAME' shows the options of a method.")


def _list(heading: str, entries: Sequence[catalog.Entry], width: int, lacks: Mapping[str, str] = {}) -> None:
    """Print a heading, and two lines per entry; ``lacks`` replaces an entry's needs."""
    emit(heading)
    for entry in entries:
        mark = "*" if entry.name in _FIRST and entry.kind == "drafter" else " "
        details = [_promise(entry)]
        if entry.kind == "drafter" and lacks.get(entry.name):
            details.append(lacks[entry.name])
        elif entry.needs != "nothing":
            details.append(f"needs {entry.needs}")
        if entry.weights != "none":
            details.append(f"weights: {entry.weights}")
        if entry.paper != "-":
            details.append(entry.cited)
        emit(f"{mark} {entry.name:12} {entry.summary}")
        emit(textwrap.fill("; ".join(details), width, initial_indent=" " * 15, subsequent_indent=" " * 15))
    emit("")


def _promise(entry: catalog.Entry) -> str:
    """Return the guarantee of an entry with its default options."""
    if entry.own_rule is None:
        return entry.promise
    return f"approximate by default (verifier {entry.own_rule}), lossless with --set verifier=auto"


def _lacks(entry: catalog.Entry, model: str) -> str:
    """Return a drafter's missing requirements for a model from its files, or ""; no weights are read."""
    from foretoken.drafting.learned_part import lies_beside
    from foretoken.models.load import source_of

    declared = entry.load().declared
    if declared.finds_model:
        return ""
    if declared.draft_model:
        brought = zoo.drafts_for(zoo.DRAFT, model)
        return "" if brought else "add --draft-model MODEL, a smaller checkpoint with the same tokenizer"
    if declared.learned_part is not None and not declared.brought:
        part = catalog.imported(declared.learned_part)
        how = part.how(model, "DRAFT")
        return "" if lies_beside(part, source_of(model)) else f"needs a trained part: {how}"
    return "" if entry.needs == "nothing" else f"needs {entry.needs}"


def _find(name: str) -> list[catalog.Entry]:
    """Return the entries of a name: a drafter and its verifier may share one."""
    found = [entry for entry in catalog.entries() if entry.name == name]
    if found:
        return found
    known = sorted({entry.name for entry in catalog.entries()})
    raise ConfigError(f"unknown method '{name}': {catalog.remedy(name, known)}")


def _public(entry: catalog.Entry) -> dict[str, Any]:
    hidden = ("import_path", "training", "own_rule", "guarantee")
    names = [field.name for field in dataclasses.fields(entry) if field.name not in hidden]
    return {name: getattr(entry, name) for name in names} | {"promise": _promise(entry)}


def _describe(entry: catalog.Entry) -> dict[str, Any]:
    method = entry.load()
    options = rows_of(method.Config)
    if entry.kind == "plan":
        options = [{**option, "name": f"{method.settings_key}.{option['name']}"} for option in options]
    if entry.kind == "drafter":
        own = {"verifier": method.declared.own_verifier or "auto"}
        common = [row for row in rows_of(RecipeOptions) if row["name"] in _COMMON_OPTIONS]
        options += [{**row, "default": own.get(row["name"], row["default"])} for row in common]
    return {**_public(entry), "options": options}
