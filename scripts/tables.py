"""Writes the tables of the documentation that follow from declarations, between their markers.

    python scripts/tables.py

A page holds ``<!-- table: NAME -->`` and, after the table, ``<!-- end of table -->``. On the card of a method NAME is
``method`` (the catalogue's entry) or ``knobs`` (its Config); on other pages a set of options, as in ``SamplingParams``,
``layouts`` (of published drafters), or a table of the reference (foretoken_lab/reference.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from foretoken import catalog
from foretoken.drafting.published.layouts import LAYOUTS
from foretoken.options.model import EngineOptions, ModelOptions
from foretoken.options.recipe import RecipeOptions
from foretoken.options.sampling import SamplingParams
from foretoken_lab.option_tables import knobs, markdown, parameters
from foretoken_lab.public_surface import FORMATS
from foretoken_lab.reference import command_rows, exit_codes, http_fields, metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->\n)", flags=re.DOTALL)
SETS = {each.__name__: each for each in (SamplingParams, ModelOptions, EngineOptions, RecipeOptions)}

_DRAFTS = "any draft, under a lossless verifier"
_MEANING = {  # of a promise, where an entry says nothing else
    "lossless": _DRAFTS,
    "same distribution": "each token is distributed as if drawn from the target",
    "same text": "the tokens of plain greedy decoding",
    "same stream": "a seeded request yields the same tokens with any drafter, or none",
    "approximate": "distortion and KL are reported per request, and bounded by `max_distortion`",
}


def method(entry: catalog.Entry) -> list[str]:
    """The table at the top of a card."""
    rows = [
        ("kind", entry.kind),
        ("paper", linked(entry.paper)),
        ("promise", f"{entry.promise}: {entry.guarantee or _MEANING[entry.promise]}{_own_rule(entry)}"),
        ("needs", entry.needs),
        ("weights", entry.weights),
    ]
    return markdown(("", ""), rows)


def _own_rule(entry: catalog.Entry) -> str:
    """A lossy verifier of the same name, or one that is the drafter's default."""
    lossy = {each.name: each for each in catalog.entries("verifier") if each.promise == "approximate"}
    if entry.kind != "drafter" or entry.name not in lossy:
        return ""
    default = entry.load().declared.own_verifier == entry.name
    which = "its own verifier, the default," if default else "its paper's verifier"
    return f"; {which} is [approximate]({lossy[entry.name].card}.md)"


def linked(paper: str) -> str:
    """A citation with links to arXiv and to pages."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)
    return re.sub(r"(?<!\()\bhttps?://[^\s,;]+", r"<\g<0>>", text)


def layouts() -> list[str]:
    """The layouts of published drafters, those that are run first."""
    rows = {
        (each.name, f"`{each.method}`" if each.method else "-", each.refused or "-")
        for each in LAYOUTS
        if each.method or each.refused
    }
    return markdown(("layout", "method", "why it is not run"), sorted(rows, key=lambda row: (row[1] == "-", row)))


def reference(name: str) -> list[str]:
    """A table of commands, exit codes, metrics or HTTP fields."""
    tables: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[Sequence[str]]]]] = {
        "commands": (("command", "purpose"), command_rows),
        "exit_codes": (("code", "when"), exit_codes),
        "metrics": (("metric", "kind", "labels", "meaning"), metrics),
        "formats": (("file", "format"), lambda: [(name, str(number)) for name, number in FORMATS.items()]),
    }
    head, rows = tables.get(name, (("field", "type", "meaning"), lambda: http_fields(name)))
    return markdown(head, rows())


def rewritten(page: str, table: Callable[[str], list[str]]) -> str:
    """A page with its tables as they are declared now."""
    return PLACE.sub(lambda place: place[1] + "\n".join(["", *table(place[2]), ""]) + "\n" + place[3], page)


@cache
def pages() -> dict[Path, str]:
    """Every page that has a table, as it should be."""
    entries = {entry.card: entry for entry in catalog.entries()}
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if not PLACE.search(page):
            continue
        entry = entries.get(path.stem) if path.parent.name == "methods" else None

        def table(name: str, entry: catalog.Entry | None = entry) -> list[str]:
            if name == "layouts":
                return layouts()
            if entry is None and name not in SETS:
                return reference(name)
            if entry is None:
                return parameters(SETS[name], over_http=SETS[name] is SamplingParams)
            return method(entry) if name == "method" else knobs(entry.load().Config)

        found[path] = rewritten(page, table)
    return found


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
