"""Items of a response and their events, whatever the pieces of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.engine.updates import Update
from foretoken.serve.conversation import AnswerReader
from foretoken.serve.responses import _Output
from foretoken.serve.tool_formats import HERMES
from foretoken.serve.tool_reader import reader_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def told(text: str, size: int) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """The items and events of an answer that comes in pieces of so many characters."""
    reader, output, events = AnswerReader(None, reader_of(HERMES, {}, only=False)), _Output(), []
    for begin in range(0, len(text), size):
        reason = "stop" if begin + size >= len(text) else None
        for piece in reader.pieces(Update(0, text[begin : begin + size], [], [], [], reason)):
            events += output.add(piece)
    return output.items, [*events, *output.close("completed")]


@pytest.mark.parametrize("size", [1, 7, 13, 41, 60, 1000])
@pytest.mark.parametrize("text", [f"  One {CALL} two {CALL}\n{CALL} three", f"\n{CALL}", " \n", " One"])
def test_text_next_to_calls_is_kept(text: str, size: int) -> None:
    """A piece may hold the end of a call, text after it, and the next call."""
    items, events = told(text, size)
    expected = text.replace(CALL, "")
    messages = [item for item in items if item["type"] == "message"]
    calls = [item for item in items if item["type"] == "function_call"]
    beside = not expected.strip() and bool(calls)  # spaces next to calls are no message
    assert "".join(item["content"][0]["text"] for item in messages) == ("" if beside else expected)
    assert [(item["name"], item["arguments"]) for item in calls] == [("add", '{"a": 1}')] * text.count(CALL)
    kinds = [item["type"] for item in items]
    assert kinds == [item["type"] for item in told(text, 1)[0]]  # also that text is where it was written
    is_open: dict[str, Any] = {}
    for kind, fields in events:
        if kind == "response.output_item.added":
            is_open = fields["item"]
        elif kind == "response.output_item.done":
            assert fields["item"]["id"] == is_open["id"]
        else:
            assert fields["item_id"] == is_open["id"]
            assert ("arguments" in kind) == (is_open["type"] == "function_call")
    assert [fields["item"] for kind, fields in events if kind == "response.output_item.done"] == items
