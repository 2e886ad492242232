"""Fields that a request body does not declare: refuse or translate those that change the answer, ignore the others.

near misspelling of a field of the same object    400, with that field's name
another program's name of a field                 translated; 400 if both spellings are there and differ
changes the answer, and has no equal              400, with the nearest remedy; a neutral value is accepted
everything else                                   accepted, and named in the header x-foretoken-ignored
"""

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

_SHORTEST = 3  # characters of a name that one edit may change; shorter names are near to everything
_TWO_EDITS = 7  # characters from which on two edits count as a misspelling
_MOST_CHECKED = 100  # unknown names of an object that are compared with its fields: more of them are no misspellings

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# another program's name -> the field here; a dot separates an object from its field
TRANSLATED: Mapping[str, str] = _TABLES["translated"]
NO_EQUAL: Mapping[str, Mapping[str, Any]] = _TABLES["no_equal"]  # fields: neutral values, and the remedy for others
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # the same limit on different paths


def check(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return an object of a body without its unknown null fields: clients often write whole objects.

    Args:
        known: the fields that the object may have.
    Raises:
        PydanticCustomError: a name is a near misspelling of a field that the object does not have.
    """
    found = {name: value for name, value in given.items() if value is not None or name in known}
    unknown = [name for name in found if name not in known and name not in NO_EQUAL]
    for name in unknown[:_MOST_CHECKED]:
        if (meant := next((each for each in near(name, known) if each not in given), None)) is not None:
            raise PydanticCustomError("unknown_field", "; did you mean '{meant}'?", {"name": name, "meant": meant})
    return found


@lru_cache(4096)
def near(name: str, known: frozenset[str]) -> tuple[str, ...]:
    """Return the fields that a name may be a misspelling of, the most similar first.

    A misspelling differs in case, ``_`` and ``-`` only, or in one edit, or in two from seven characters on. An edit
    inserts, deletes or replaces a character, or swaps two neighbours.
    """
    same = sorted(each for each in known if _plain(each) == _plain(name))
    return (*same, *(each for each in sorted(known) if each not in same and _is_near(name, each)))


def _is_near(name: str, field: str) -> bool:
    shorter = min(len(name), len(field))
    most = 2 if shorter >= _TWO_EDITS else 1
    # an edit changes two characters at most: this leaves out nearly all names before their edits are counted
    if shorter < _SHORTEST or abs(len(name) - len(field)) > most or len(set(name) ^ set(field)) > 2 * most:
        return False
    return _edits(name, field) <= most


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _edits(a: str, b: str) -> int:
    """Return the number of edits that turn a into b (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, start=1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, older[j - 2] + 1)
            row.append(best)
    return row[-1]


def translate(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a body with the fields of other programs under their names here.

    Args:
        known: the fields of the body.
    Raises:
        PydanticCustomError: two spellings of a field differ, or a field has no equal and a value that is not neutral.
    """
    found = {name: value for name, value in given.items() if value is not None or name in known}
    if found.get("top_p") == 0:
        found["top_p"] = 1e-9  # the smallest set of tokens: the best one
    if "stop" in found:
        stops = found["stop"]
        found["stop"] = [each for each in stops if each != ""] if isinstance(stops, list) else stops or None
    limit = next((name for name in _LIMITS if name in known), None)
    for name in list(found):
        if name in known:
            continue
        if name in NO_EQUAL:
            neutral, remedy = NO_EQUAL[name]["neutral"], NO_EQUAL[name]["remedy"]
            # the types are compared, since True equals 1 in Python
            value = found[name]
            if not any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in neutral):
                raise PydanticCustomError("unknown_field", ": {remedy}", {"name": name, "remedy": remedy})
            del found[name]
        elif limit is not None and (name in _LIMITS or TRANSLATED.get(name) == "max_tokens"):
            _move(found, name, limit, found.pop(name))
        elif name in TRANSLATED and TRANSLATED[name].split(".")[0] in known:
            _move(found, name, TRANSLATED[name], found.pop(name))
    return found


def _move(found: dict[str, Any], name: str, target: str, value: Any) -> None:
    """Set a field under its name here, unless it is there already with the same value."""
    place, _, inner = target.partition(".")
    if inner:
        outer = found.get(place)
        if outer is not None and not isinstance(outer, dict):
            return  # its own check refuses it
        owner = found[place] = dict(outer or {})
    else:
        owner, inner = found, place
    if owner.get(inner) is not None and owner[inner] != value:
        raise PydanticCustomError(
            "conflict", "is another name of {target}, and they differ: keep one", {"name": name, "target": target}
        )
    owner[inner] = value
