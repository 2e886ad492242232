"""Every catalogue entry has a method card that cites the same paper, gives the same promise and names every knob."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from foretoken import catalog

CARDS = Path(__file__).resolve().parents[2] / "docs" / "methods"
HEADINGS = [
    "Idea",
    "Needs",
    "Knobs",
    "Cost",
    "When it wins, when it loses",
    "Measured",
    "Differs from the paper",
    "Files",
]


def stem_of(entry: catalog.Entry) -> str:
    """The card's file; where a drafter and its verifier have one name, the verifier's says so."""
    shared = entry.kind == "verifier" and any(other.name == entry.name for other in catalog.entries("drafter"))
    return f"{entry.name}_verifier" if shared else entry.name


def card_of(entry: catalog.Entry) -> str:
    return (CARDS / f"{stem_of(entry)}.md").read_text(encoding="utf-8")


def field(card: str, name: str) -> str:
    found = re.search(rf"^\| {name} \| (.+) \|$", card, flags=re.MULTILINE)
    assert found, f"the card has no row '{name}'"
    return found.group(1)


def citations(text: str) -> set[str]:
    return set(re.findall(r"\d{4}\.\d{4,5}|https?://[^\s)>|]+", text))


every_entry = pytest.mark.parametrize("entry", catalog.entries(), ids=stem_of)


@every_entry
def test_card_says_what_the_catalogue_says(entry):
    card = card_of(entry)
    assert card.startswith(f"# {entry.name}\n")
    assert field(card, "kind") == entry.kind
    assert field(card, "promise").split(":")[0] == entry.promise
    assert field(card, "weights") == entry.weights
    assert citations(entry.paper) <= citations(field(card, "paper"))


@every_entry
def test_card_has_every_section_in_order(entry):
    assert re.findall(r"^## (.+)$", card_of(entry), flags=re.MULTILINE) == HEADINGS


@every_entry
def test_card_names_every_knob_with_its_default(entry):
    config = getattr(entry.load(), "Config", None)
    if config is None:
        return
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]*?)`? \|", card_of(entry), flags=re.MULTILINE))
    for knob in dataclasses.fields(config):
        required = knob.default is dataclasses.MISSING and knob.default_factory is dataclasses.MISSING
        default = "required" if required else str(knob.default)
        assert rows.get(knob.name) == default, f"the card's table of knobs must have {knob.name} with default {default}"


@every_entry
def test_files_that_a_card_names_exist(entry):
    root = CARDS.parents[1]
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./]+)`", card_of(entry)):
        assert (root / path).exists(), f"{path} is not there"


def test_no_card_without_an_entry():
    assert {path.stem for path in CARDS.glob("*.md")} == {stem_of(entry) for entry in catalog.entries()}
