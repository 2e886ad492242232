"""Tool calls in a model's output, in the form of its family (tool_formats.py), from a text that comes in pieces.

Everything outside of a call stays text. The pieces of a call's arguments join to valid JSON once the call is whole.
"""

import ast
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from foretoken.engine.text.detokenise import possible_begin
from foretoken.serve.harmony import HarmonyReader
from foretoken.serve.tool_formats import HARMONY, HERMES, PYTHONIC, ToolFormat
from foretoken.serve.tools import CLOSE, OPEN, Balance, add_piece, begun, json_or_none, whole_call

_LONGEST_HEAD = 400  # characters between a call's begin and its arguments
_LIST = re.compile(r"\[\s*(?:[^\W\d][\w.]*\s*(?:\(.*)?)?", re.DOTALL)  # of calls, perhaps cut
_WORD = re.compile(r'("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"][^{}\[\],:"]*?)\s*(:|(?=[{}\[\],]|$))')
_OBJECT = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ENDS = ("}" + CLOSE, CLOSE)  # what may follow the arguments of Hermes' calls, without spaces
_Pieces = dict[int, dict[str, Any]]


def reader_of(form: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, only: bool) -> "Reader":
    """Return the reader of a form.

    Args:
        tools: the properties of each function's arguments, by its name.
        only: the answer consists of calls, and all text outside of them is markup.
    """
    if form is HERMES:
        return HermesReader(form, tools, only=only)
    if form is HARMONY:
        return HarmonyReader(only=only)
    if form is PYTHONIC:
        return PythonReader(form, tools, only=only)
    return (ObjectReader if form.head is None else MarkedReader)(form, tools, only=only)


class _Outside:
    """The text outside of calls: without the spaces between calls, and after the last.

    Args:
        only: the answer consists of calls, and all text outside of them is markup, also where the answer is cut.
    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, only: bool = False) -> None:
        self.num_calls = 0
        self._spaces = ""  # spaces after a call: they are text if text follows
        self._form = form
        self._tools = tools
        self._only = only
        self._held = ""
        self._ids: set[str] = set()

    def _begin(self, news: _Pieces, call: dict[str, Any], written: str | None = None) -> None:
        """Add a call, with the id that the model has written if that is new."""
        if written is not None and written not in self._ids:
            call["id"] = written
        elif self._form.short_ids:
            call["id"] = uuid.uuid4().hex[:9]
        self._ids.add(call["id"])
        add_piece(news, {"index": self.num_calls, **call})
        self.num_calls += 1

    def _text(self, text: str) -> str:
        """Return text without the spaces between calls, and after the last."""
        if not self.num_calls:
            return text
        text, self._spaces = self._spaces + text, ""
        if text.strip():
            return text
        self._spaces = text
        return ""


class MarkedReader(_Outside):
    """Reads calls with marks around the name and the arguments."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, only: bool = False) -> None:
        super().__init__(form, tools, only=only)
        self._part = self._outside
        self._opened = ""
        self._properties: Mapping[str, Any] = {}
        self._balance = Balance()
        self._empty = True  # no argument was read
        self._closer = 0

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Parse a piece: passes text and arguments on at once, and holds back a possible beginning of a call.

        Args:
            final: this is the last piece: the text held back is text.
        Returns:
            text outside of calls, and the new parts of calls as OpenAI streams them: ``index``, a piece of the
            arguments, and at the start of a call its ``id``, ``type`` and name.
        """
        self._held += text
        news: _Pieces = {}
        out: list[str] = []
        while self._part(final, out, news):
            pass
        return "" if self._only else "".join(out), [*news.values()]

    # each part reads as far as possible, and returns whether another part may go on

    def _outside(self, final: bool, out: list[str], news: _Pieces) -> bool:
        held = self._held
        places = [(held.find(each), -len(each), each) for each in self._form.opens if each in held]
        if not places:
            keep = 0 if final else possible_begin(held, self._form.opens)
            out.append(self._text(held[: len(held) - keep]))
            self._held = held[len(held) - keep :]
            return False
        place, _, self._opened = min(places)
        out.append(self._text(held[:place]))
        self._held = held[place + len(self._opened) :]
        self._part = self._head
        return True

    def _head(self, final: bool, out: list[str], news: _Pieces) -> bool:
        assert self._form.head is not None
        found = self._form.head.match(self._held)
        if found is None:
            if not final and len(self._held) <= _LONGEST_HEAD:
                return False
            out.append(self._text(self._opened))
            self._part = self._outside
            return True
        self._enter(news, found, found["name"], found.groupdict().get("id"))
        self._part = self._json if self._form.parameters is None else self._named
        if self._form.quote:
            self._part = self._braced
        return True

    def _enter(self, news: _Pieces, head: re.Match[str], name: str, written: str | None = None) -> None:
        self._begin(news, begun(name, ""), written)
        self._properties = self._tools.get(name, {})
        self._held = self._held[head.end() :]
        self._balance, self._empty, self._closer = Balance(), True, 0

    def _json(self, final: bool, out: list[str], news: _Pieces) -> bool:
        if self._empty:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            if not self._held.startswith("{"):
                self._argue(news, "{}")
                self._part = self._closers
                return True
        piece = self._balance.take(self._held)
        self._held = self._held[len(piece) :]
        self._argue(news, piece)
        if self._balance.closed:
            self._part = self._closers
        return self._balance.closed

    def _named(self, final: bool, out: list[str], news: _Pieces) -> bool:
        parameters = self._form.parameters
        assert parameters is not None
        assert parameters.pattern is not None
        held = self._held.lstrip()
        if found := parameters.pattern.match(held):
            key = found["key"].strip()
            schema = self._properties.get(key)
            value = _typed(found["value"], schema, found.groupdict().get("string"))
            self._argue(news, f"{'{' if self._empty else ', '}{json.dumps(key, ensure_ascii=False)}: {value}")
            self._held = held[found.end() :]
            return True
        begins = (parameters.end, parameters.opens)
        if held.startswith(parameters.end):
            self._held, self._part = held[len(parameters.end) :], self._closers
        elif any(each.startswith(held) for each in begins) or held.startswith(parameters.opens):
            if final:
                self._held = ""  # the call is cut
            return False
        else:
            self._part = self._outside  # its end is missing
        self._argue(news, "{}" if self._empty else "}")
        return True

    def _braced(self, final: bool, out: list[str], news: _Pieces) -> bool:
        end = _end_of_braces(self._held, self._form.quote)
        if not end:
            self._held = "" if final else self._held  # the call is cut
            return False
        self._argue(news, _json_of_braces(self._held[:end], self._form.quote))
        self._held, self._part = self._held[end:], self._closers
        return True

    def _closers(self, final: bool, out: list[str], news: _Pieces) -> bool:
        while self._closer < len(self._form.closers):
            held, closer = self._held.lstrip(), self._form.closers[self._closer]
            if held.startswith(closer):
                self._held = held[len(closer) :]
            elif closer.startswith(held):
                if final:
                    self._held = ""
                return False
            self._closer += 1
        self._part = self._outside
        return True

    def _argue(self, news: _Pieces, piece: str) -> None:
        self._empty = self._empty and not piece
        if piece:
            add_piece(news, {"index": self.num_calls - 1, "function": {"arguments": piece}})


class HermesReader(MarkedReader):
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and whole objects of another layout."""

    def _head(self, final: bool, out: list[str], news: _Pieces) -> bool:
        held = self._held
        if (head := _OBJECT.match(held)) is not None and (name := json_or_none(head[1])) is not None:
            self._enter(news, head, name)
            self._part = self._json
            return True
        inside, mark, rest = held.partition(CLOSE)
        if not mark and not final:
            return False
        call = whole_call(inside)
        if call is None:
            out.append(self._text(f"{OPEN}{inside}{mark}"))
        else:
            self._begin(news, call)
        self._held, self._part = rest, self._outside
        return True

    def _closers(self, final: bool, out: list[str], news: _Pieces) -> bool:
        """Remove the end of a call, unless other text is there."""
        tail = "".join(self._held.split())
        if any(each.startswith(tail) and len(tail) < len(each) for each in _ENDS):
            self._held = "" if final else self._held
            return False
        if tail.startswith(_ENDS):
            self._held = self._held.partition(CLOSE)[2]
        self._part = self._outside
        return True


class ObjectReader(_Outside):
    """Reads calls that are JSON objects, one after the other: after a mark, or where the text begins with one."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, only: bool = False) -> None:
        super().__init__(form, tools, only=only)
        self._first = "" in form.opens
        self._mark = form.opens[0]
        self._state = "before"
        self._balance = Balance()
        self._object = ""
        self._lead = ""  # spaces before the first object

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """See :meth:`MarkedReader.read`."""
        self._held += text
        out, news = "", _Pieces()
        if self._state == "before":
            out += self._before(final)
        while self._state == "objects" and (self._held or (final and self._object)):
            out += self._next(final, news)
        if self._state == "text":
            out += self._held
            self._held = ""
        return "" if self._only else self._text(out), [*news.values()]

    def _before(self, final: bool) -> str:
        held = self._held
        if self._first:
            begin = held.lstrip()
            if begin.startswith((self._mark, "{")):
                self._lead = held[: len(held) - len(begin)]
                self._state, self._held = "objects", begin.removeprefix(self._mark)
            elif final or not self._mark.startswith(begin):
                self._state = "text"
            return ""
        place = held.find(self._mark)
        keep = 0 if final else possible_begin(held, (self._mark,))
        end = place if place >= 0 else len(held) - keep
        self._held = held[end:]
        if place >= 0:
            self._state, self._held = "objects", held[place + len(self._mark) :]
        return held[:end]

    def _next(self, final: bool, news: _Pieces) -> str:
        """Read a part of an object, or what separates two of them."""
        if not self._object:
            self._held = self._held.lstrip(" \n\r\t,;[]")
            if self._held and not self._held.startswith("{"):
                self._state = "text"
            if not self._held.startswith("{"):
                return ""
        piece = self._balance.take(self._held)
        self._object, self._held = self._object + piece, self._held[len(piece) :]
        if not self._balance.closed and not final:
            return ""
        text, self._object, self._balance = self._object, "", Balance()
        call = whole_call(text)
        if call is None or (self._first and call["function"]["name"] not in self._tools):
            self._state = "text"
            return self._lead + text
        self._lead = ""
        found = json.loads(text)
        self._begin(news, call, found["id"] if isinstance(found.get("id"), str) else None)
        return ""


class PythonReader(_Outside):
    """Reads a list of calls in Python's syntax, with which a text begins; nothing is evaluated."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, only: bool = False) -> None:
        super().__init__(form, tools, only=only)
        self._done = False

    def read(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """See :meth:`MarkedReader.read`."""
        self._held += text
        news = _Pieces()
        if not self._done:
            mark = self._form.opens[0]
            begin = self._held.lstrip()
            whole = begin.removeprefix(mark).lstrip()
            balance = Balance("\"'", ("([{", ")]}"))
            found = balance.take(whole) if _LIST.match(whole) else ""
            if not final and not balance.closed and (mark.startswith(begin) or not whole or _LIST.fullmatch(whole)):
                return "", []
            self._done = True
            calls = _python_calls(found, self._tools) if balance.closed else []
            for call in calls:
                self._begin(news, call)
            if calls:
                self._held = whole[len(found) :].removeprefix("<|python_end|>")
        out, self._held = self._held, ""
        return "" if self._only else self._text(out), [*news.values()]


Reader = MarkedReader | ObjectReader | PythonReader | HarmonyReader


class _Constants(ast.NodeTransformer):
    """JSON's constants in Python's place."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _python_calls(text: str, tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a list; none, if it is anything else than a list of calls of these tools."""
    found = []
    try:
        body = ast.parse(text, mode="eval").body
        for each in body.elts if isinstance(body, ast.List) else ():
            if not isinstance(each, ast.Call) or each.args or not all(key.arg for key in each.keywords):
                return []
            if ast.unparse(each.func) not in tools:
                return []
            arguments = {str(key.arg): ast.literal_eval(_Constants().visit(key.value)) for key in each.keywords}
            found.append(begun(ast.unparse(each.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return found


def _end_of_braces(text: str, quote: str) -> int:
    """Return the end of arguments like ``{key:value}``, with marks around strings; 0: it is missing."""
    depth = place = 0
    for number, piece in enumerate(text.split(quote)):
        for offset, character in enumerate(piece) if number % 2 == 0 else ():
            depth += (character in "{[") - (character in "}]")
            if not depth:
                return place + offset + 1
        place += len(piece) + len(quote)
    return 0


def _json_of_braces(text: str, quote: str) -> str:
    """Return such arguments as JSON; unchanged, if they are not well formed."""
    pieces = text.split(quote)
    pieces[1::2] = [json.dumps(each, ensure_ascii=False) for each in pieces[1::2]]
    pieces[0::2] = [_WORD.sub(_quoted_word, each) for each in pieces[0::2]]
    try:
        return json.dumps(json.loads("".join(pieces), parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _quoted_word(found: re.Match[str]) -> str:
    """Quote a key, and a value that is no JSON."""
    string, word, colon = found.groups()
    return string or (json.dumps(word) + colon if colon else _typed(word, None, None))


def _typed(text: str, schema: Any, string: str | None) -> str:
    """Return a parameter's value as JSON: a string as it is, else JSON, and a string if it is none."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if string != "true" and not (string is None and kind == "string"):
        try:
            return json.dumps(json.loads(text, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(name)
