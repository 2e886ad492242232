"""gpt-oss's harmony: an answer is a sequence of messages with headers, in channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.F
     <|constrain|>json<|message|>{...}<|call|>

``analysis`` is reasoning. A message to a recipient is a call, wherever its header names it. All else is text.
"""

import re
from collections.abc import Sequence
from typing import Any

from foretoken.engine.text.detokenise import possible_begin
from foretoken.serve.tools import Balance, add_piece, begun

_MARKS = tuple(f"<|{each}|>" for each in ("channel", "start", "end", "call", "return", "message", "constrain"))
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Parses an answer in pieces, with the text of its marks.

    Args:
        only: the answer consists of calls, and all other text is left out.
        end: the token ``<|end|>``, up to which reasoning tokens are counted; None: they are not.
    Attributes:
        num_calls: calls that have begun.
    """

    def __init__(self, *, only: bool = False, end: int | None = None) -> None:
        self.num_calls = 0
        self._only = only
        self._held = ""
        self._kind = "begin"  # then: header, reasoning, call, text
        self._empty = True  # the call has no arguments yet
        self._balance = Balance()
        self._end, self._num, self._reasons = end, 0, False

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the first message, if that is reasoning."""
        return self._num if self._reasons else 0

    def count(self, tokens: Sequence[int]) -> None:
        """Count tokens of the answer."""
        for token in tokens:
            if self._end is None:
                return
            self._num += 1
            self._end = None if token == self._end else self._end

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return text and calls; see :class:`foretoken.serve.tool_reader.MarkedReader`."""
        return self.parts(text, final=final)[1:]

    def parts(self, text: str, *, final: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the new reasoning, text, and calls as OpenAI streams them."""
        self._held += text
        found, news = {"reasoning": "", "text": ""}, dict[int, dict[str, Any]]()
        while self._held:
            if self._kind == "begin":
                start = self._held.lstrip()
                if not final and "to=".startswith(start[:3]) and len(start) < 3:
                    break
                self._kind = "header" if start.startswith("to=") else "text"
            elif self._kind == "header":
                head, mark, rest = self._held.partition("<|message|>")
                if not mark:
                    break
                self._held = rest
                self._enter(head, news)
            elif not self._body(final, found, news):
                break
        return found["reasoning"], "" if self._only else found["text"], [*news.values()]

    def _enter(self, head: str, news: dict[int, dict[str, Any]]) -> None:
        recipient, channel = _TO.search(head), _CHANNEL.search(head)
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "text"
        if recipient is not None:
            self._kind, self._empty, self._balance = "call", True, Balance()
            add_piece(news, {"index": self.num_calls, **begun(recipient[1], "")})
            self.num_calls += 1
        elif self._kind == "reasoning" and not self._reasons:
            self._reasons = True

    def _body(self, final: bool, found: dict[str, str], news: dict[int, dict[str, Any]]) -> bool:
        """Read up to the next mark; return whether there is one."""
        mark = _MARK.search(self._held)
        keep = 0 if final else possible_begin(self._held, _MARKS)
        end = len(self._held) - keep if mark is None else mark.start()
        piece, self._held = self._held[:end], self._held[end:]
        if self._kind != "call":
            found[self._kind] += piece
        elif not self._balance.closed and ((piece := self._balance.take(piece)) or (mark and self._empty)):
            add_piece(news, {"index": self.num_calls - 1, "function": {"arguments": piece or "{}"}})
            self._empty = False
        if mark is not None:
            self._kind = "header" if mark[0] in ("<|channel|>", "<|start|>") else "text"
            if mark[0] != "<|channel|>":  # which belongs to the header
                self._held = self._held[len(mark[0]) :]
        return mark is not None
