"""What a certificate holds: parts that each pass or fail, and the numbers after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ALPHA = 1e-4
"""Of one statistical test, all of its looks together: how often a sound recipe may be accused."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a certificate.

    Attributes:
        name: which part.
        passed: whether it holds; a part that does not apply to the recipe is left out of the certificate.
        summary: one line.
        details: the numbers, ready for JSON.
    """

    name: str
    passed: bool
    summary: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """What was proved of one recipe, and how; docs/certify.md says what each part means."""

    method: str
    settings: dict[str, Any]
    model: str
    promise: str
    quick: bool
    sections: tuple[Section, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every part holds."""
        return all(section.passed for section in self.sections)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and ``passed``."""
        return {**asdict(self), "sections": [asdict(section) for section in self.sections], "passed": self.passed}

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        lines = [f"{self.method} {settings}".rstrip() + f" on {self.model}: promises {self.promise}"]
        lines += [f"  {'pass' if each.passed else 'FAIL'}  {each.name:<12} {each.summary}" for each in self.sections]
        lines.append(f"{'passed' if self.passed else 'FAILED'} in {self.seconds:.1f} s")
        return "\n".join(lines)
