"""Mined questions in a file, one a line: a run that is stopped goes on from there, and labels can be fitted to again.

    {"target": …, "draft": …, "rules": 2, "choices": 4}        whose they are
    {"task": "code", "prompt": [5, …], "right": true, "tokens": [7, …], "parents": [-1, …], "labels": […]}

A question that the target answers wrongly has no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.core.tree import TokenTree
from foretoken.methods.judge.labels import Marked
from foretoken.train.run_folder import disk_trouble

RULES = 2  # of what is fine (mining.py): labels made by others do not mix with today's


@dataclass(frozen=True)
class Found:
    """One question that was asked.

    Attributes:
        task: its name.
        prompt: the tokens that the target reads first.
        right: whether the target answers it rightly.
        marked: tokens and labels, if there are any.
    """

    task: str
    prompt: Sequence[int]
    right: bool
    marked: Marked | None


class Store:
    """A file of questions.

    Args:
        path: made if it is not there. What a stop left of its last line is cut off.
        target, draft: fingerprints.
        choices: as in ``Mining``.
    Raises:
        InputError: the file holds something else, or another pair's labels, or such of other rules.
        ForetokenError: it cannot be read or written; likewise of :meth:`add`.

    Attributes:
        found: what it held.
    """

    def __init__(self, path: Path, target: str, draft: str, choices: int) -> None:
        self._path = path
        self.found: list[Found] = []
        with disk_trouble(path):
            self._open(path, {"target": target, "draft": draft, "rules": RULES, "choices": choices})

    def add(self, every: Sequence[Found]) -> None:
        """Write questions after the others."""
        with disk_trouble(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_written(each)) + "\n" for each in every)

    def _open(self, path: Path, whose: dict[str, Any]) -> None:
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(whose) + "\n", encoding="utf-8")
            return
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        try:
            first, *lines = (json.loads(line) for line in whole.split(b"\n"))
            held = {name: first[name] for name in whose}
            self.found = [_read(line) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"--labels {path}: this is no file of mined labels ({error!r:.80})") from error
        for name, value in whose.items():
            if held[name] != value:
                raise InputError(f"--labels {path}: these labels were mined with other {name}; name another file")
        with path.open("r+b") as file:
            file.truncate(len(whole) + len(newline))


def _written(each: Found) -> dict[str, Any]:
    fields: dict[str, Any] = {"task": each.task, "prompt": list(each.prompt), "right": each.right}
    if each.marked is not None:
        tree = each.marked.tree
        fields |= {"tokens": list(tree.tokens), "parents": list(tree.parents), "labels": list(each.marked.labels)}
    return fields


def _read(line: dict[str, Any]) -> Found:
    marked = None
    if "tokens" in line:
        labels = [None if label is None else (str(label[0]), bool(label[1])) for label in line["labels"]]
        marked = Marked(line["prompt"], TokenTree(line["tokens"], line["parents"]), labels)
    return Found(line["task"], line["prompt"], line["right"], marked)
