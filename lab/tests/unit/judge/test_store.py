"""Mined questions in a file: written lines are read, a stop costs the line it cut, others' files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.errors import InputError
from foretoken.core.tree import TokenTree
from foretoken_lab.judge.labels import Marked
from foretoken_lab.judge.store import Found, Store

TREE = TokenTree([7, 8, 9], [-1, 0, 0])
FOUND = [
    Found("code", [5, 6], True, Marked([5, 6], TREE, [("code", True), None, ("random tokens", False)])),
    Found("json", [4], False, None),
]


def test_written_lines_are_read_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    Store(path, "t", "d", 4).add(FOUND[:1])
    with path.open("a") as file:
        file.write('{"task": "json", "pro')
    store = Store(path, "t", "d", 4)
    assert told(store) == told_of(FOUND[:1])
    store.add(FOUND[1:])
    assert told(Store(path, "t", "d", 4)) == told_of(FOUND)


def told(store: Store) -> list[object]:
    return told_of(store.found)


def told_of(every: list[Found]) -> list[object]:
    found: list[object] = []
    for each in every:
        marked = each.marked
        tree = None if marked is None else (marked.tree.tokens, marked.tree.parents, marked.prompt, marked.labels)
        found.append((each.task, each.prompt, each.right, tree and tuple(map(list, tree))))
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"target": "t", "draft": "x", "rules": 2, "choices": 4}\n', "were mined with other draft"),
        ('{"target": "t", "draft": "d", "rules": 1, "choices": 4}\n', "were mined with other rules"),
        ('{"target": "t", "draft": "d", "rules": 2, "choices": 1}\n', "were mined with other choices"),
        ('{"target": "t", "draft": "d", "rules": 2, "choices": 4}\n{"task": 3}\n', "no file of mined labels"),
        ("my notes\n", "no file of mined labels"),
        ("[]", "no file of mined labels"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=f"--labels .*labels.jsonl: .*{message}"):
        Store(path, "t", "d", 4)
    assert path.read_text() == text
