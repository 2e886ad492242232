"""One line of ``foretoken doctor``: a check, its facts, and the remedy."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name, a word or two.
        status: "ok"; "warn": it works, but slower or not as intended; "fail": it does not work.
        found: the facts.
        remedy: what to do; empty if all is well.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def found(check: str, facts: str, *, warn: str = "", fail: str = "") -> Finding:
    """A finding; its status follows from the kind of remedy that is given."""
    return Finding(check, "fail" if fail else "warn" if warn else "ok", facts, fail or warn)


def worst(findings: list[Finding]) -> int:
    """The exit code of several findings: 0 if all is well, 1 with a warning, 2 with a failure."""
    return max((EXIT_CODES[each.status] for each in findings), default=0)
