"""The public interfaces from version 0.1.0 on, as lines that a test compares with a kept list.

Names of the library with their signatures, commands with their flags, HTTP paths with their fields, metrics, exit
codes, environment variables, entry points and formats of files. ``scripts/surface.py`` writes the list,
``tests/behaviour/public_surface.txt``; docs/stability.md has the promise.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import foretoken
from foretoken import catalog
from foretoken.core import draft, extensions, needs, protocols
from foretoken.core.draft import Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.datastore import layout
from foretoken.drafting.learned_part import FORMAT, FORMAT_KEY
from foretoken.engine import plan_file
from foretoken.engine.output import Completion, RequestOutput
from foretoken.methods.scylla import width
from foretoken.methods.sparse import calibration
from foretoken.options.option import Option
from foretoken.options.tables import rows_of
from foretoken.planner import trace
from foretoken.train import run_folder
from foretoken_lab import reference

_LIBRARY = (foretoken.LLM, foretoken.AsyncLLM, foretoken.SamplingParams, RequestOutput, Completion)
_FOR_METHODS = (  # what docs/extend.md builds on
    *(protocols.Drafter, protocols.Verifier, protocols.Context, protocols.Budget, protocols.Outcome),
    *(needs.Needs, needs.Offers, needs.Declared, catalog.Entry, Option, Draft, TokenTree, Verdict),
    *(draft.PointMass, draft.Coupled, draft.Sampled, draft.WithoutReplacement, draft.TopThenSampled, draft.HubPair),
)
FORMATS = {
    f"heads, adapters, judges, draft vocabularies: `config.json`, key `{FORMAT_KEY}`": FORMAT,
    f"datastores: `{layout.MANIFEST}`, key `version`": layout.VERSION,
    "plans of `foretoken plan --out`, key `version`": plan_file.VERSION,
    f"calibrations of sparse verification: `{calibration.FILE}`, key `format`": calibration.FORMAT,
    f"widths of scylla: `{width.FILE}`, key `format`": width.FORMAT,
    "runs of `foretoken train`: `run/claim.json`, key `format`": run_folder.FORMAT,
    f"answers of `foretoken plan --keep-trace`: `{trace.TRACE_FILE}`, key `format`": trace.FORMAT,
}


def lines() -> list[str]:
    """All lines, sorted within each kind."""
    kinds = (_library(), _commands(), _http(), _others())
    return [line for kind in kinds for line in sorted(set(kind))]


def _library() -> Iterator[str]:
    for name in sorted(foretoken._HOMES):
        yield f"import foretoken.{name}"
    for cls in (*_LIBRARY, *_FOR_METHODS):
        yield from _of_class(cls)


def _of_class(cls: type[Any]) -> Iterator[str]:
    home = f"{cls.__module__}.{cls.__qualname__}"
    if is_dataclass(cls):
        for each in fields(cls):
            needed = each.default is MISSING and each.default_factory is MISSING
            if not each.name.startswith("_"):
                yield f"field {home}.{each.name}{' (required)' if needed else ''}"
    elif "__init__" in vars(cls) and not getattr(cls, "_is_protocol", False):
        yield f"call {home}{_parameters(cls.__init__)}"
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or member is None or (is_dataclass(cls) and name in cls.__dataclass_fields__):
            continue
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function):
            yield f"method {home}.{name}{_parameters(function)}"
        elif isinstance(member, property) or type(member).__name__ == "cached_property":
            yield f"property {home}.{name}"
        elif not inspect.ismemberdescriptor(member):
            yield f"attribute {home}.{name}"


def _parameters(function: Any) -> str:
    """A signature without types; "=" marks an argument with a default."""
    given = inspect.signature(function).parameters.values()
    shown: list[str] = []
    for each in given:
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and "*" not in shown and not any(name.startswith("*") for name in shown):
            shown.append("*")
        star = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        shown.append(f"{star}{each.name}{'=' if each.default is not each.empty else ''}")
    return f"({', '.join(shown)})"


def _commands() -> Iterator[str]:
    for name, command in reference.commands():
        for each in command.params:
            shown = "/".join([*each.opts, *each.secondary_opts])
            takes = "" if getattr(each, "is_flag", False) else " VALUE"
            needed = " (required)" if each.required else ""
            yield f"command foretoken {name}: {shown if shown.startswith('-') else shown.upper()}{takes}{needed}"


def _http() -> Iterator[str]:
    for path, body in reference.BODIES.values():
        schema = body.model_json_schema()
        for field, each in schema["properties"].items():
            needed = " (required)" if field in schema.get("required", ()) else ""
            yield f"http POST {path}: {field}: {reference.type_of(each)}{needed}"
    for name, kind, labels, _ in reference.metrics():
        yield f"metric {name.strip('`')}: {kind} by {labels}"


def _others() -> Iterator[str]:
    for code, what in reference.exit_codes():
        yield f"exit code {code.strip('`')}: {what}"
    for group in sorted(
        value for name, value in vars(extensions).items() if name.isupper() and value[:10] == "foretoken."
    ):
        yield f"entry points {group}"
    yield "entry points foretoken.methods"
    for entry in catalog._TABLE:
        yield f"{entry.kind} {entry.name}: {entry.promise}"
        for row in rows_of(entry.load().Config):
            yield f"{entry.kind} {entry.name}: option {row['name']}{' (required)' * (row['default'] == 'required')}"
    for what, number in FORMATS.items():
        yield f"file {what}: {number}"
    sources = (path.read_text(encoding="utf-8") for path in Path(foretoken.__file__).parent.rglob("*.py"))
    for name in {name for text in sources for name in re.findall(r"\bFORETOKEN_[A-Z_]+", text)}:
        yield f"environment {name}"
