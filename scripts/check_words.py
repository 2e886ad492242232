"""Count words and turns of phrase that the project avoids, and fail when a file uses more of them than before.

    python scripts/check_words.py             compare with scripts/words.json; exit 1 if a file has more than it may
    python scripts/check_words.py --list F    print each place in the file or folder F
    python scripts/check_words.py --lower     write the present counts, where they are lower; refuse to raise one

CONTRIBUTING.md has the glossary: what to write instead. Only prose is read: comments, docstrings, messages and names of
tests in Python files, comments of C files, and Markdown outside of code. A file that is not in words.json may have
none.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "scripts" / "words.json"
SKIP = ("lab/results/", "scripts/check_words.py", "src/foretoken/zoo/", "LICENSE")

AVOID = {
    "persons for things": r"who|whom|whose|nobody|somebody|everybody|anybody",
    "dear": r"dear|dearer|dearest",
    "behind": r"behind",
    "beside": r"beside",
    "odd": r"odd|oddly",
    "tell, said": r"tell|tells|told|said",
    "asked": r"asked",
    "what-clauses": r"what (?:is|was|are|were|has|had|stands?|stood|falls?|fell|came|comes|lies|it|they|one|follows)",
    "law": r"law|laws",
    "purse, forgetful": r"purse|forgetful|forgets",
    "mended": r"mend|mends|mended",
    "room": r"room",
    "inversion": r"nor (?:is|are|was|does|do|did|has|have|can)|so (?:does|do|can|is|are|did) (?:an?|the)",
    "reckon": r"reckon\w*",
}
_ANY = re.compile(r"\b(?:" + "|".join(AVOID.values()) + r")\b", re.IGNORECASE)
# the paper's or the field's own use of such a word
_FINE = re.compile(
    r"scaling laws?|power laws?|law of large numbers|odd (?:number|position|row|head|bit)s?|\blaws?[:=,]"
    r"|\b(?:what|who)\b[^.?\n]*\?|\btell me\b",  # questions, and prompts that are given to models
    re.IGNORECASE,
)
_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"``[^`]*``|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|\{[^{}]*\}", re.DOTALL)
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def main() -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="PATH", help="print each place in a file or folder")
    parser.add_argument("--lower", action="store_true", help="store the present counts where they are lower")
    options = parser.parse_args()
    if options.list is not None:
        for name in tracked(options.list):
            for line, word in places(name):
                print(f"{name}:{line}: {word}")
        return 0
    counts = {name: count for name in tracked() if (count := sum(1 for _ in places(name)))}
    allowed: dict[str, int] = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else dict(counts)
    more = {name: count for name, count in counts.items() if count > allowed.get(name, 0)}
    for name, count in more.items():
        print(f"{name}: {count} avoided words, {allowed.get(name, 0)} before; see: {Path(__file__).name} --list {name}")
    if options.lower and not more:
        ALLOWED.write_text(json.dumps(dict(sorted(counts.items())), indent=0) + "\n")
    print(f"avoided words: {sum(counts.values())} in {len(counts)} files")
    return 1 if more else 0


def tracked(under: str = ".") -> list[str]:
    """The files that are read, by their names in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", under], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [
        name
        for name in listed
        if name.endswith((".py", ".md", ".c", ".h", ".inc")) and not name.startswith(SKIP) and (ROOT / name).exists()
    ]


def places(name: str) -> Iterator[tuple[int, str]]:
    """Each avoided word of a file, with its line."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for line, prose in _prose(name, text):
        kept = _FINE.sub(lambda found: " " * len(found[0]), _INLINE.sub(lambda found: _blank(found[0]), prose))
        for found in _ANY.finditer(kept):
            yield line + kept.count("\n", 0, found.start()), found[0]


def _prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    if name.endswith(".md"):
        yield 1, _CODE.sub(lambda found: _blank(found[0]), text)
    elif name.endswith(".py"):
        # f-strings are tokens of their own since Python 3.12
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT)}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in kinds and " " in token.string:  # a single word is a name or a key
                yield token.start[0], token.string
            elif token.type == tokenize.NAME and token.string.startswith("test_"):
                yield token.start[0], token.string.replace("_", " ")
    else:
        for found in _C_COMMENT.finditer(text):
            yield 1 + text.count("\n", 0, found.start()), found[0]


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


if __name__ == "__main__":
    sys.exit(main())
