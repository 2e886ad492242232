"""The form that a text must have: a JSON schema, a regular expression, a choice or a grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import plain, reject_unknown_keywords, without_idle

_UNASKED: Mapping[str, tuple[Any, ...]] = {  # values of vLLM's further fields that ask for nothing
    **dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), (None, False)),
    **dict.fromkeys(("whitespace_pattern", "structural_tag"), (None,)),
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the whole text; exactly one of these. The names are vLLM's.

    Attributes:
        json: a JSON schema, as a mapping or as text; True: any JSON. The layout is that of ``json.dumps``.
        json_object: True: any JSON object.
        regex: a regular expression for the whole text.
        choice: the allowed texts.
        grammar: a Lark grammar; its start rule matches the whole text.
        reasoning: the text before it. "open": the text begins inside the reasoning, which "</think>" ends; "optional":
            it may begin with "<think>"; None: no reasoning.
    Raises:
        ConfigError: none or several are set, or one has the wrong type.
    """

    json: Mapping[str, object] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        kinds = [each.name for each in fields(self) if each.name != "reasoning"]
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if self.reasoning not in (None, "open", "optional"):
            raise ConfigError(f"structured_outputs.reasoning={self.reasoning!r:.60} must be 'open', 'optional' or None")
        if len(given) != 1:
            names = ", ".join(kinds)
            raise ConfigError(f"structured_outputs has {given or 'nothing'}: give exactly one of {names}")
        kind, value = self.kind, self.value
        fits = {
            "json": isinstance(value, (Mapping, str)) or value is True,
            "json_object": value is True,
            "choice": isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_text, value)),
        }.get(kind, _is_text(value))
        if not fits or (kind == "choice" and not value):
            wanted = {"json": "a schema", "json_object": "true", "choice": "a list of texts, none of them empty"}
            raise ConfigError(f"structured_outputs.{kind}={value!r:.60} must be {wanted.get(kind, 'a text')}")

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(each.name for each in fields(self) if getattr(self, each.name) not in (None, False))

    @property
    def value(self) -> Any:
        """The schema, expression, texts or grammar that is given."""
        return getattr(self, self.kind)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "StructuredOutputs":
        """Build from a mapping; an unknown key is an error that offers the nearest name."""
        known = [each.name for each in fields(cls)]
        values = without_idle(values, _UNASKED)
        for key in values:
            if key not in known:
                raise ConfigError(f"structured_outputs has the unknown key {key!r}: {nearest(str(key), known)}")
        return cls(**values)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def structure(name: str, value: Any) -> StructuredOutputs | None:
    """The form that a text must have."""
    if isinstance(value, Mapping):
        return StructuredOutputs.from_dict(value)
    if value is not None and not isinstance(value, StructuredOutputs):
        raise ConfigError(f"{name}={value!r:.60} must be StructuredOutputs, or a mapping like {{'json': SCHEMA}}")
    return value


StructuredOutputs.__init__ = reject_unknown_keywords(StructuredOutputs.__init__, None, _UNASKED)  # type: ignore[method-assign]
