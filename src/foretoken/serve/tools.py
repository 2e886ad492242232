"""Calls of functions in what a model writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

The form of Hermes and of Qwen's chat templates. What does not parse stays text: a reader loses nothing.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class CallReader:
    """Reads a text that comes in pieces: text is handed on, calls are held back until they are whole.

    Attributes:
        num_calls: calls that were read.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take in a piece.

        Args:
            final: nothing follows: what is held back is text.
        Returns:
            text that belongs to no call, and the calls that are complete now, with their ``index``.
        """
        self._held += text
        out, calls = "", []
        while True:
            begin = self._held.find(_OPEN)
            if begin < 0:
                keep = 0 if final else _possible_begin(self._held)
                out += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(_CLOSE, begin)
            if end < 0 and not final:
                out, self._held = out + self._held[:begin], self._held[begin:]
                break
            stop = len(self._held) if end < 0 else end + len(_CLOSE)
            call = _call(self._held[begin + len(_OPEN) : len(self._held) if end < 0 else end])
            out += self._held[:begin]
            if call is None:
                out += self._held[begin:stop]
            else:
                calls.append({"index": self.num_calls, **call})
                self.num_calls += 1
            self._held = self._held[stop:]
        return out, calls


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls."""
    rest, calls = CallReader().read(text, final=True)
    return (rest.strip() if calls else rest), [{k: v for k, v in call.items() if k != "index"} for call in calls]


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": found["name"], "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _possible_begin(text: str) -> int:
    """Length of the longest end of the text that may be the beginning of a call."""
    return next((size for size in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:size])), 0)
