"""JSON schemas in the form that llguidance compiles: without keywords that forbid nothing, and with a clear refusal.

Common libraries write keywords that llguidance refuses although they restrict nothing: zod writes ``propertyNames:
{"type": "string"}`` for each record, and pydantic writes formats that only it knows. JSON Schema treats an unknown
format as an annotation.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from foretoken.core.errors import ConfigError

# JSON as json.dumps writes it: a model that may put spaces anywhere may go on with them for ever
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalProperties", "propertyNames", "not", "if", "then", "else", "contains")
_FORMATS = 32  # unknown formats of one schema; more of them are an error
_LONGEST = 120  # characters of llguidance's message that are shown


def compilable(schema: Any) -> Any:
    """Return an equivalent schema that llguidance compiles; it must not be changed.

    Raises:
        ConfigError: a keyword restricts the text and is not supported; the message names it.
    """
    try:
        return _compilable(json.dumps(schema))
    except ConfigError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(str(error)[:_LONGEST]) from None


@lru_cache(256)  # the tools of an agent come with each request, and a trial costs as much as the compilation
def _compilable(text: str) -> Any:
    """Simplify the schema in a JSON text, until a trial compiles it."""
    from llguidance import LLMatcher

    schema = json.loads(text)
    formats: set[str] = set()
    for _ in range(_FORMATS):
        found = _simplified(schema, formats)
        grammar = LLMatcher.grammar_from_json_schema({} if found is True else found, defaults=LAYOUT)
        failed, said = LLMatcher.validate_grammar_with_warnings(grammar, None)
        if not failed:
            return found
        why = " ".join(" ".join(said).split())
        unknown = re.match(r"Unknown format: (.+)$", why)
        if unknown is None or unknown[1] in formats:
            raise ConfigError(_in_words(why))
        formats.add(unknown[1])
    raise ConfigError(f"the schema has more than {_FORMATS} formats that are not known: leave them out")


def _in_words(why: str) -> str:
    keys = re.match(r"Unimplemented keys: \[(.+?)\]", why)
    if keys is None:
        return why[:_LONGEST]
    names = keys[1].replace('"', "'")
    return f"the schema's {names} restricts the text and cannot be enforced here: leave it out, and check the answer"


def _simplified(schema: Any, formats: Collection[str]) -> Any:
    """Return a schema without idle keywords, at any depth.

    Args:
        formats: values of ``format`` to leave out.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            found[name] = {each: _simplified(inner, formats) for each, inner in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [_simplified(inner, formats) for inner in value]
        elif name in _SINGLE:
            found[name] = _simplified(value, formats)
        elif not (name == "format" and value in formats) and not (name == "uniqueItems" and value is False):
            found[name] = value
    return _with_named_properties(found) if "propertyNames" in found else found


def _with_named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Express ``propertyNames`` by properties and patterns, where it restricts the names at all."""
    names = schema["propertyNames"]
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    if names in (True, {}, {"type": "string"}):
        return rest
    if (
        not isinstance(names, dict)
        or not set(names) <= {"type", "enum", "const", "pattern"}
        or "patternProperties" in rest
    ):
        return schema
    value = rest.get("additionalProperties", True)
    if "pattern" in names and not {"enum", "const"} & set(names) and not rest.get("properties"):
        return {**rest, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    allowed = names.get("enum", [names["const"]] if "const" in names else None)
    if not isinstance(allowed, list) or "pattern" in names or not all(isinstance(each, str) for each in allowed):
        return schema
    own = {name: inner for name, inner in (rest.get("properties") or {}).items() if name in allowed}
    return {**rest, "properties": {**dict.fromkeys(allowed, value), **own}, "additionalProperties": False}
