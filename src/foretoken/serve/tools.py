"""Tool calls in a model's output: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

The form of Hermes and of Qwen's chat templates. Everything outside of a call stays text: no output is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ENDS = ("}" + CLOSE, CLOSE)  # what may follow the arguments, without spaces


class OutsideOfCalls:
    """The text between calls, for a reader of them.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._spaces = ""  # spaces after a call: they are text if text follows

    def _text(self, text: str) -> str:
        """Return text without the spaces between calls, and after the last."""
        if not self.num_calls:
            return text
        text, self._spaces = self._spaces + text, ""
        if text.strip():
            return text
        self._spaces = text
        return ""


class CallReader(OutsideOfCalls):
    """Parses a text in pieces: passes text and arguments on at once, and holds back a possible beginning of a call.

    Args:
        only: the answer consists of calls, and all text outside of them is markup, also where the answer is cut.
    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(self, *, only: bool = False) -> None:
        super().__init__()
        self._only = only
        self._held = ""
        self._arguments: Balance | None = None  # the call that is being parsed
        self._ending = False  # its arguments are complete, its end is missing

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Parse a piece.

        Args:
            final: this is the last piece: the text held back is text.
        Returns:
            text outside of calls, and the new parts of calls as OpenAI streams them: ``index``, a piece of the
            arguments, and at the start of a call its ``id``, ``type`` and name.
        """
        self._held += text
        out, news = "", dict[int, dict[str, Any]]()
        while True:
            if self._arguments is not None:
                piece = self._arguments.take(self._held)
                self._held = self._held[len(piece) :]
                if piece:
                    add_piece(news, {"index": self.num_calls - 1, "function": {"arguments": piece}})
                if not self._arguments.closed:
                    break
                self._arguments, self._ending = None, True
            elif self._ending:
                if not self._end(final):
                    break
            else:
                plain, call, more = self._next(final)
                out += self._text(plain)
                if call is not None:
                    add_piece(news, {"index": self.num_calls, **call})
                    self.num_calls += 1
                if not more:
                    break
        return "" if self._only else out, [*news.values()]

    def _next(self, final: bool) -> tuple[str, dict[str, Any] | None, bool]:
        """Return the text up to the next call, the call if there is one, and whether more can be parsed now."""
        held = self._held
        begin = held.find(OPEN)
        if begin < 0:
            keep = 0 if final else possible_begin(held)
            self._held = held[len(held) - keep :]
            return held[: len(held) - keep], None, False
        inside = begin + len(OPEN)
        if (head := _HEAD.match(held, inside)) is not None and (name := _json(head[1])) is not None:
            self._arguments, self._held = Balance(), held[head.end() :]
            return held[:begin], begun(name, ""), True
        end = held.find(CLOSE, inside)
        if end < 0 and not final:
            self._held = held[begin:]
            return held[:begin], None, False
        stop = len(held) if end < 0 else end + len(CLOSE)
        call = whole_call(held[inside : len(held) if end < 0 else end])
        self._held = held[stop:]
        return held[: begin if call is not None else stop], call, bool(self._held)

    def _end(self, final: bool) -> bool:
        """Remove the end of a call; return whether it was there, or other text is."""
        tail = "".join(self._held.split())
        if any(each.startswith(tail) and len(tail) < len(each) for each in _ENDS):
            if final:
                self._held, self._ending = "", False
            return final
        if tail.startswith(_ENDS):
            self._held = self._held[self._held.find(CLOSE) + len(CLOSE) :]
        self._ending = False
        return True


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
    found = _json(text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return begun(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def begun(name: Any, arguments: str) -> dict[str, Any]:
    """Return a call with a new id, in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def possible_begin(text: str, mark: str = OPEN) -> int:
    """Return the length of the longest suffix of the text that may begin a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
