"""Calls in what a model writes, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken.serve.tool_formats import HERMES
from foretoken.serve.tool_reader import reader_of
from foretoken.serve.tools import joined

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls."""
    rest, pieces = reader_of(HERMES, {}, only=False).read(text, final=True)
    return (rest.strip() if pieces else rest), joined(pieces)


def function(call: dict[str, Any]) -> tuple[str, Any]:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_text_and_calls() -> None:
    text, calls = calls_in(f"Let me see. {CALL} {CALL}")
    assert text == "Let me see."
    assert [function(each) for each in calls] == [("add", {"a": 1, "b": "é"})] * 2
    assert "index" not in calls[0]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "a < b <tool",
        "<tool_call>not json</tool_call> x",
        '<tool_call>{"nahme": 1}</tool_call>',
        "<tool_call>[",
    ],
)
def test_text_without_a_call_stays_text(text: str) -> None:
    assert calls_in(text) == (text, [])


def test_a_call_that_the_limit_has_cut_is_read_if_it_is_whole() -> None:
    assert function(calls_in('<tool_call>{"name": "f", "arguments": {}}')[1][0]) == ("f", {})


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pieces_are_the_same_as_the_whole(size: int) -> None:
    whole = f"One {CALL}two <tool{CALL}<tool_call>oops</tool_call>end<tool_"
    reader, text, calls = reader_of(HERMES, {}, only=False), "", []
    for begin in range(0, len(whole), size):
        piece, found = reader.read(whole[begin : begin + size], final=False)
        assert "<tool_call>\n" not in piece
        text, calls = text + piece, calls + found
    piece, found = reader.read("", final=True)
    text, calls = text + piece, calls + found
    assert text == "One two <tool<tool_call>oops</tool_call>end<tool_"
    assert {each["index"] for each in calls} == {0, 1}
    assert reader.num_calls == 2
    assert [function(each) for each in joined(calls)] == [("add", {"a": 1, "b": "é"})] * 2


def test_arguments_come_as_they_are_written() -> None:
    reader = reader_of(HERMES, {}, only=False)
    heads = reader.read('<tool_call>{"name": "f", "arguments": {"a', final=False)[1]
    assert [(each["index"], each["function"]) for each in heads] == [(0, {"name": "f", "arguments": '{"a'})]
    assert reader.read('": "}]{\\"', final=False) == ("", [{"index": 0, "function": {"arguments": '": "}]{\\"'}}])
    assert reader.read('"}}\n', final=False)[1] == [{"index": 0, "function": {"arguments": '"}'}}]
    assert reader.read("</tool_", final=False) == reader.read("call> ", final=False) == ("", [])
    assert reader.read("end", final=True) == (" end", [])


def test_arguments_that_the_limit_has_cut_are_a_call() -> None:
    text, (call,) = calls_in('<tool_call>{"name": "f", "arguments": {"a": [1, 2')
    assert (text, call["function"]) == ("", {"name": "f", "arguments": '{"a": [1, 2'})


@pytest.mark.parametrize("between", ["\n", " ", "\n\n"])
def test_spaces_between_calls_are_no_text(between: str) -> None:
    reader = reader_of(HERMES, {}, only=False)
    pieces = [reader.read(each, final=False)[0] for each in (CALL, between, CALL)]
    assert [*pieces, reader.read(between, final=True)[0]] == [""] * 4


def test_text_after_the_arguments_of_an_unclosed_call_stays_text() -> None:
    text, (call,) = calls_in('<tool_call>{"name": "f", "arguments": {}} and so on')
    assert (text, call["function"]["arguments"]) == ("} and so on", "{}")
