"""The site's description: every page that it names is there, every page of docs/ is in it, and links have anchors."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONFIG = DOCS.parent / "mkdocs.yml"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_site_once():
    named = re.findall(r": ([\w/]+\.md)$", CONFIG.read_text("utf-8"), re.M)
    assert len(named) == len(set(named))
    assert set(named) == {page.name for page in DOCS.glob("*.md")}


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
