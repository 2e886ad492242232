"""Parts of the readers of tool calls: the ends of objects and marks, and calls in OpenAI's form."""

import json
import uuid
from collections.abc import Iterable
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Balance:
    """Finds the end of a JSON object in a text that arrives in pieces.

    Args:
        quotes: characters that begin and end a string.
        brackets: characters that open, and those that close.
    """

    def __init__(self, quotes: str = '"', brackets: tuple[str, str] = ("{[", "}]")) -> None:
        self._quotes, self._brackets = quotes, brackets
        self._depth = 0
        self._quoted = ""  # by which character
        self._escaped = False
        self.closed = False

    def take(self, text: str) -> str:
        """Return the part of the text that belongs to the object."""
        for place, character in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quoted:
                    self._quoted = ""
            elif character in self._quotes:
                self._quoted = character
            elif character in self._brackets[0]:
                self._depth += 1
            elif character in self._brackets[1]:
                self._depth -= 1
                if not self._depth:
                    self.closed = True
                    return text[: place + 1]
        return text


def joined(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the calls from the pieces of a stream, without ``index``."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        add_piece(calls, piece)
    return [{key: value for key, value in call.items() if key != "index"} for call in calls.values()]


def add_piece(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Join a piece of a call to those of the same index."""
    known = calls.get(piece["index"])
    if known is None:
        calls[piece["index"]] = {**piece, "function": dict(piece["function"])}
    else:
        known["function"]["arguments"] += piece["function"]["arguments"]


def whole_call(text: str) -> dict[str, Any] | None:
    """Parse a call with another layout than that of the templates."""
    found = json_or_none(text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return begun(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def begun(name: Any, arguments: str) -> dict[str, Any]:
    """Return a call with a new id, in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def json_or_none(text: str) -> Any:
    """Parse a text; None: it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
