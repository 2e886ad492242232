"""The contents of a certificate: parts that each pass or fail, and their numbers."""

from dataclasses import asdict, dataclass, field
from typing import Any

ALPHA = 1e-4
"""Error rate of one statistical test over all of its looks: the probability that a sound recipe fails."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a certificate.

    Attributes:
        name: the part's name.
        passed: whether it holds; a part that does not apply to the recipe is omitted from the certificate.
        summary: one line.
        details: the numbers, ready for JSON.
    """

    name: str
    passed: bool
    summary: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """The proved properties of one recipe; docs/certify.md explains each part."""

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
        """Return the fields for JSON, with ``passed``."""
        return {**asdict(self), "sections": [asdict(section) for section in self.sections], "passed": self.passed}

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        lines = [f"{self.method} {settings}".rstrip() + f" on {self.model}: promises {self.promise}"]
        lines += [f"  {'pass' if each.passed else 'FAIL'}  {each.name:<12} {each.summary}" for each in self.sections]
        lines.append(f"{'passed' if self.passed else 'FAILED'} in {self.seconds:.1f} s")
        return "\n".join(lines)
