"""Check whether a generated text has the right answer: its final number, or the same words.

This module does not execute generated code.
"""

from __future__ import annotations

import re
import string
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)-?\$?\.\d+")
_SAID = re.compile(r"answer is", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_KEEP = str.maketrans("", "", string.punctuation)


def final_number(text: str) -> Fraction | None:
    """Return the final number of a worked answer: the first after ``####``, else after "answer is", else the last one.

    None if there is no such number; if there is a ``####``, only a number after it counts.
    """
    if "####" in text:
        return _number(_NUMBER.search(text.rpartition("####")[2]))
    said = list(_SAID.finditer(text))
    if said and (match := _NUMBER.search(text, said[-1].end())):
        return _number(match)
    return _number(next(reversed(list(_NUMBER.finditer(text))), None))


def normalise(text: str) -> str:
    """Return SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_KEEP)).split())


def holds(output: str, answer: str) -> bool:
    """Return whether the output contains the answer's words (in normal form) as a run, with at most as many other
    words.
    """
    found, wanted = normalise(output).split(), normalise(answer).split()
    starts = range(len(found) - len(wanted) + 1)
    inside = any(found[start : start + len(wanted)] == wanted for start in starts)
    return bool(wanted) and inside and len(found) <= 2 * len(wanted)


def _number(match: re.Match[str] | None) -> Fraction | None:
    return None if match is None else Fraction(match[0].replace("$", "").replace(",", ""))
