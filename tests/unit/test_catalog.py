"""Every catalogue entry has a method card: paper, promise and knobs are the catalogue's, and its files exist."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from foretoken import catalog
from foretoken.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)
CARDS = ROOT / "docs" / "methods"
RESULTS = ROOT / "lab" / "results"
PAGES = [page for page in sorted(RESULTS.glob("*.md")) if page.stem not in ("README", "mutants")]  # of measurements
MEASURED = re.compile(r"<!-- measured: .*?<!-- end of measured -->\n", flags=re.DOTALL)
FIRST_LINE = r"(?:<!-- measured: first_line \w+ -->\n\n)?\*\*It .+\n(?:\n<!-- end of measured -->\n)?"
MAX_WORDS = 500
OPTIONS = {"vocabtrim", "pearl"}  # options next to several methods, without an entry of their own
_PAPERS, _, _ = (CARDS / "README.md").read_text(encoding="utf-8").partition("\nThe same runs measured")
OF_PAPERS = sorted({card for card in re.findall(r"\]\(([\w./]+\.md)\)", _PAPERS) if "results" not in card})
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
    return entry.card


def card_of(entry: catalog.Entry) -> str:
    return (CARDS / f"{entry.card}.md").read_text(encoding="utf-8")


def written(card: str) -> str:
    """A card without its tables, which are made."""
    return MEASURED.sub("", tables.PLACE.sub("", card))


def section(card: str, heading: str) -> str:
    return card.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def commands(card: str) -> list[list[str]]:
    """The command lines of a card's code blocks that call ``foretoken``, as arguments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("foretoken ")]


@functools.cache
def tree_of_commands():
    return typer.main.get_command(app)


def check_parses(arguments: list[str]) -> None:
    """Walk typer's tree of commands as the command line does, up to where values would be read and the command run.

    An unknown command or option, an option without its value, or an argument that is missing or too many is an error.
    """
    command, context = tree_of_commands(), None
    while True:
        context = command.context_class(command, parent=context, info_name=command.name)
        values, rest, _ = command.make_parser(context).parse_args(arguments)
        names = command.list_commands(context) if isinstance(command, TyperGroup) else []  # some are collected by this
        subcommands = {name: command.get_command(context, name) for name in names}
        if rest and subcommands:
            assert rest[0] in subcommands, f"foretoken has no command {rest[0]!r}"
            command, arguments = subcommands[rest[0]], rest[1:]
            continue
        assert not rest, f"{rest} is left over"
        missing = [each.name for each in command.params if each.required and values.get(each.name) in (None, ())]
        assert not missing, f"{missing} is missing"
        return


every_entry = pytest.mark.parametrize("entry", catalog.entries(), ids=stem_of)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.stem)
def test_tables_are_as_they_are_declared(page):
    assert page.read_text(encoding="utf-8") == tables.pages()[page], "run make fix"


@every_entry
def test_card_has_the_tables_of_its_method(entry):
    card = card_of(entry)
    assert re.match(rf"# {entry.name}\n\n(?:{FIRST_LINE}\n)?<!-- table: method -->\n", card)
    has_knobs = bool(dataclasses.fields(entry.load().Config))
    assert ("<!-- table: knobs -->" in section(card, "Knobs")) == has_knobs


@pytest.mark.parametrize("card", OF_PAPERS)
def test_the_card_of_a_paper_s_method_begins_with_whether_it_pays(card):
    assert re.match(rf"# .+\n\n{FIRST_LINE}", (CARDS / card).read_text(encoding="utf-8"))


def test_a_table_that_is_not_as_declared_is_seen():
    entry = catalog.find("ngram", "drafter")
    card = card_of(entry).replace("| `prompt_lookup_max` | `4` |", "| `prompt_lookup_max` | `5` |")
    made = tables.rewritten(card, lambda name: tables.knobs(entry.load().Config))
    assert "`prompt_lookup_max` | `4`" in made


@every_entry
def test_card_has_every_section_in_order(entry):
    card = card_of(entry)
    assert re.findall(r"^## (.+)$", card, flags=re.MULTILINE) == HEADINGS
    assert all(section(card, heading).strip() for heading in HEADINGS)


@every_entry
def test_card_is_short(entry):
    assert len(written(card_of(entry)).split()) <= MAX_WORDS


@every_entry
def test_card_names_source_and_tests_that_exist(entry):
    named = re.findall(r"`((?:src|tests|docs|lab)/[\w./]+)`", card_of(entry))
    for path in named:
        assert (ROOT / path).exists(), f"{path} is not there"
    files = re.findall(r"`((?:src|tests)/[\w./]+)`", section(card_of(entry), "Files"))
    assert any(path.startswith("src/foretoken/") for path in files)
    assert any(path.startswith("tests/") for path in files)
    module = f"src/{entry.import_path.partition(':')[0].replace('.', '/')}.py"
    assert any(module.startswith(path) for path in files), f"the card does not name {module}"


@every_entry
def test_files_that_a_card_names_lie_in_its_folder(entry):
    for folder, names in re.findall(r"`(src/[\w/]+/)` holds ((?:`\w+\.py`(?:, | and )?)+)", card_of(entry)):
        for name in re.findall(r"`(\w+\.py)`", names):
            assert (ROOT / folder / name).exists(), f"{folder}{name} is not there"


@every_entry
def test_card_links_its_measurement(entry):
    links = re.findall(r"\]\(([^)#]+)", section(card_of(entry), "Measured"))
    pages = [(CARDS / link).resolve() for link in links]
    assert any(page.is_relative_to(RESULTS) and page.suffix == ".md" and page.exists() for page in pages)


@every_entry
def test_commands_of_a_card_parse(entry):
    for arguments in commands(card_of(entry)):
        check_parses(arguments)


@pytest.mark.parametrize(
    "wrong",
    ["bensh", "bench --mehtods ngram", "certify --method", "bench verify --model m too_much", "generate --seed 1 a b"],
)
def test_a_wrong_command_does_not_parse(wrong):
    with pytest.raises(Exception, match=r"(?i)no command|no such option|requires an argument|left over"):
        check_parses(wrong.split())


def test_no_card_without_an_entry():
    assert {path.stem for path in CARDS.glob("[a-z]*.md")} == {stem_of(entry) for entry in catalog.entries()} | OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_card_of_an_option_is_like_the_others(name):
    card = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", card, flags=re.MULTILINE) == HEADINGS
    assert len(written(card).split()) <= MAX_WORDS
    for path in re.findall(r"`((?:src|tests|docs|lab)/[\w./]+)`", card):
        assert (ROOT / path).exists(), f"{path} is not there"
    for arguments in commands(card):
        check_parses(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_has_its_command_its_machine_and_its_file(page):
    text = page.read_text(encoding="utf-8")
    assert re.search(
        r"^```\n(?:.*\n)*?(?:\w+=\S+ )?(?:foretoken|python (?:lab/)?benchmarks/)", text, flags=re.MULTILINE
    )
    assert re.search(r"EPYC|Xeon|H200", text)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"
