"""The page of messages quotes what the program writes, as headings: the site's search weighs them most."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BETWEEN_LITERALS = re.compile(r"\"\s+f?\"")


def test_every_quoted_message_is_one_of_the_program() -> None:
    quoted = re.findall(r"^### `(.+?)`$", (ROOT / "docs/messages.md").read_text("utf-8"), re.M)
    assert len(quoted) >= 15
    files = (path for kind in ("*.py", "*.json") for path in (ROOT / "src/foretoken").rglob(kind))
    source = "\n".join(path.read_text("utf-8") for path in files if path.stat().st_size < 100_000)  # no tokenizers
    source = BETWEEN_LITERALS.sub("", source)
    assert [words for words in quoted if words not in source] == []
