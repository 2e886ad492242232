"""A hook of mkdocs: the site holds the pages of results beside those of docs/, and links between them lead there.

What else a page links to, such as sources, is not in the site: there the words stay, and the link goes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent
_DOCS, _RESULTS = "docs/", "lab/results/"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the results, where they lie in the repository."""
    from mkdocs.structure.files import File

    for path in sorted((_ROOT / _RESULTS).rglob("*")):
        if path.is_file():
            name = path.relative_to(_ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository as links of the site.

    A block without a language is a command on a page of results, and a drawing, which must not be broken, elsewhere.
    """
    here = page.file.src_uri
    place = posixpath.dirname(here if here.startswith(_RESULTS) else _DOCS + here)

    def moved(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        aim = posixpath.normpath(posixpath.join(place, target))
        if not aim.startswith((_DOCS, _RESULTS)) or not (_ROOT / aim).is_file():
            return words
        inside = posixpath.relpath(aim.removeprefix(_DOCS), posixpath.dirname(here) or ".")
        return f"[{words}]({inside}{anchor or ''})"

    if here.startswith(_RESULTS):
        markdown = _BLOCK.sub(lambda block: f"```{block[1] or 'bash'}\n{block[2]}```", markdown)
    return _LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let a search for the words of a message find its remedy before pages that share some of the words."""
    here = page.file.src_uri
    if here == "messages.md" or here.startswith(_RESULTS):
        page.meta["search"] = {"boost": 2 if here == "messages.md" else 0.5}
    return html
