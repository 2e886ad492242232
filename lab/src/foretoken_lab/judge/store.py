"""Mined questions in a file, one per line: a stopped run resumes from it, and a new fit reuses its labels.

    {"target": …, "draft": …, "rules": 2, "choices": 4}        the pair and the rules of the labels
    {"task": "code", "prompt": [5, …], "right": true, "tokens": [7, …], "parents": [-1, …], "labels": […]}

A question with a wrong answer of the target has no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.core.tree import TokenTree
from foretoken.train.run_folder import disk_trouble
from foretoken_lab.judge.labels import Marked

RULES = 2  # version of the rules of mining.py; labels of another version are refused


@dataclass(frozen=True)
class Found:
    """One finished question.

    Attributes:
        task: its name.
        prompt: the tokens before the answer.
        right: whether the target's answer is right.
        marked: tokens and labels, if any.
    """

    task: str
    prompt: Sequence[int]
    right: bool
    marked: Marked | None


class Store:
    """A file of questions.

    Args:
        path: created if missing. An incomplete last line of a stopped run is cut off.
        target, draft: fingerprints.
        choices: as in ``Mining``.
    Raises:
        InputError: the file is no such file, or has labels of another pair or of other rules.
        ForetokenError: the file cannot be read or written; also raised by :meth:`add`.

    Attributes:
        found: the questions that the file had when it was opened.
    """

    def __init__(self, path: Path, target: str, draft: str, choices: int) -> None:
        self._path = path
        self.found: list[Found] = []
        with disk_trouble(path):
            self._open(path, {"target": target, "draft": draft, "rules": RULES, "choices": choices})

    def add(self, every: Sequence[Found]) -> None:
        """Append questions."""
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
