"""The site's description: every page that it names is there, every page of docs/ is in it, and links have anchors."""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS.parent / "lab" / "results"
CONFIG = DOCS.parent / "mkdocs.yml"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_site_once():
    named = re.findall(r": ([\w/]+\.md)$", CONFIG.read_text("utf-8"), re.M)
    assert len(named) == len(set(named))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    cards = {name for name in pages if name.startswith("methods/")} - {"methods/README.md"}  # linked by the first page
    assert set(named) == pages - cards


def test_no_page_is_longer_than_a_quarter_of_an_hour():
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text("utf-8"))) for page in DOCS.rglob("*.md")}
    assert {name: count for name, count in words.items() if count > 1500} == {}


def test_every_card_is_reached_from_the_first_page():
    linked = re.findall(r"\]\(methods/([\w]+)\.md\)", (DOCS / "index.md").read_text("utf-8"))
    assert sorted(linked) == sorted(card.stem for card in (DOCS / "methods").glob("*.md"))


def test_nothing_is_fetched_from_elsewhere():
    text = CONFIG.read_text("utf-8")
    assert "font: false" in text
    assert not re.search(r"https?://", text)


def test_links_lead_to_headings_that_are_there():
    for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")):
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
            target = page.parent / link if link else page
            if target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_commands_of_results_are_broken_where_the_page_ends_and_drawings_are_not():
    hook = runpy.run_path(str(DOCS.parent / "site_pages.py"))["on_page_markdown"]
    text = "```\nforetoken methods\n```\n\n```json\n{}\n```\n\n```\nforetoken zoo list\n```\n"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="lab/results/x/bench.md"))
    assert re.findall(r"^```(\w*)$", hook(text, page=page), re.M) == ["bash", "", "json", "", "bash", ""]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="rag.md"))
    assert hook(text, page=page) == text
    wrapped = re.findall(r"\.language-(\w+) pre > code", (DOCS / "assets/site.css").read_text("utf-8"))
    assert wrapped == ["console", "bash"]


def test_every_link_of_the_site_leads_to_a_page_of_it():
    """Results are in it, next to the pages of docs/; words that led to a source stay as words."""
    hook = runpy.run_path(str(DOCS.parent / "site_pages.py"))["on_page_markdown"]
    pages = {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}
    pages |= {page.relative_to(DOCS.parent).as_posix(): page for page in RESULTS.rglob("*.md")}
    followed = 0
    for name, path in pages.items():
        text = hook(path.read_text("utf-8"), SimpleNamespace(file=SimpleNamespace(src_uri=name)))
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            aim = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
            assert (DOCS.parent if aim.startswith("lab/") else DOCS).joinpath(aim).is_file(), f"{name}: {link}"
            followed += 1
    assert followed > 200
    card = SimpleNamespace(file=SimpleNamespace(src_uri="methods/a.md"))
    words = "[m](../../lab/results/mutants.md), [s](../../src/foretoken/catalog.py), [c](../choose.md#x)"
    assert hook(words, card) == "[m](../lab/results/mutants.md), s, [c](../choose.md#x)"
