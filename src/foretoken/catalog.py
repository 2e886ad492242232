"""The catalogue: every drafter, verifier and plan of catalog.json, with its guarantee and its requirements.

A new method needs one folder and one entry there; its class declares its other needs (core/needs.py). Modules are
imported on first use. Third parties may add entries through the entry-point group ``foretoken.methods`` (an object of
type :class:`Entry`).
"""

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.importing import lean_imports


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method.

    Attributes:
        name: the name for users.
        kind: "drafter" or "verifier".
        import_path: "module:Class", imported on first use.
        summary: one line.
        paper: a citation with arXiv ids or addresses.
        promise: "lossless" for drafters and plans (any of them, under a lossless verifier); a verifier, or a plan that
            changes the distribution, states its own.
        own_rule: a drafter's own approximate verifier, its default: the drafter is lossless only with another verifier.
            None: it has no such rule.
        guarantee: the promise's meaning for this entry; empty: the general meaning (scripts/tables.py).
        needs: requirements in addition to the target model.
        weights: learned parts, or "none".
        training: "module:NAME" of its ``foretoken train`` command (train/command.py), which help imports without torch;
            None: it needs no training.
    """

    name: str
    kind: Literal["drafter", "verifier", "plan"]
    import_path: str
    summary: str
    paper: str
    promise: str = "lossless"
    own_rule: str | None = None
    guarantee: str = ""
    needs: str = "nothing"
    weights: str = "none"
    training: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "verifier" and self.promise == "lossless":
            raise ConfigError(f"verifier '{self.name}' lacks a promise: same text, same distribution, or approximate")

    @property
    def cited(self) -> str:
        """The paper's arXiv ids and addresses only."""
        return ", ".join(re.findall(r"arXiv:\d{4}\.\d{4,5}|https?://[^\s,;]+", self.paper)) or "-"

    @property
    def card(self) -> str:
        """The page in docs/methods/; if a drafter and its verifier share a name, the verifier's page says so."""
        shared = self.kind == "verifier" and any(other.name == self.name for other in entries("drafter"))
        return f"{self.name}_verifier" if shared else self.name

    def load(self) -> Any:
        """Import and return the class."""
        return imported(self.import_path)


def imported(place: str) -> Any:
    """Import and return the object "module:NAME"."""
    module, _, attribute = place.partition(":")
    with lean_imports():
        return getattr(importlib.import_module(module), attribute)


def _data(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_TABLE = tuple(Entry(**row) for row in _data("catalog.json"))
_OF_THE_FIELD: Mapping[str, str] = _data("catalog_elsewhere.json")  # methods under their names elsewhere


def entries(kind: str | None = None) -> list[Entry]:
    """Return all entries: the table's, then those of installed plug-ins."""
    return [entry for entry in (*_TABLE, *_plugins()) if kind is None or entry.kind == kind]


@cache
def _plugins() -> tuple[Entry, ...]:
    # this reads the metadata of every installed package: some milliseconds
    return tuple(point.load() for point in entry_points(group="foretoken.methods"))


_LABELS = {"drafter": "method", "verifier": "verifier", "plan": "plan"}  # the keys that select them


def find(name: str, kind: Literal["drafter", "verifier", "plan"]) -> Entry:
    """Return the entry of that name; the ConfigError for an unknown name has the nearest one or a replacement."""
    table = {entry.name: entry for entry in entries(kind)}
    if name not in table:
        other = next((_LABELS[entry.kind] for entry in entries() if entry.name == name), None)
        said = f"that is a {other}: write {other}={name}" if other else remedy(name, table)
        raise ConfigError(f"unknown {_LABELS[kind]} '{name}': {said}")
    return table[name]


def remedy(name: str, known: Iterable[str]) -> str:
    """Return the replacement for an unknown name: the nearest method in the catalogue, else the nearest name."""
    asked = name.lower().replace("-", "_")
    if asked.endswith("_mtp"):  # vLLM has a name for every family
        return "it is called 'mtp'"
    return _OF_THE_FIELD.get(asked) or nearest(name, known)
