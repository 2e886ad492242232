"""Whether a function that a model wrote does what the expected one does: both are called, and the outcomes compared.

    text ── its first code block ── only what a small function needs? ── a process of its own, with limits ── outcomes

Evaluations do without (scoring.py compares syntax trees). It is for where other code may be as good: labels for a
judge. The code is checked before it runs: one function or more, no import, no decorator, no name that begins with an
underscore, and of attributes only harmless methods of Python's own types, so that it can reach nothing but its
arguments and a handful of builtins (calls.py). The process has little memory, a second of processor time, no files and
no environment, and ends with the calls of one function.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.scoring import parse_code

_CALLS = Path(__file__).with_name("calls.py")
_PATIENCE = 30.0  # seconds by the clock for a second of processor time: the machine may be busy
_MOST_CHARACTERS = 5000  # of a function
# of str, list, dict and set; not ``format``, which looks up attributes that a text names
_METHODS = frozenset(
    "add append capitalize casefold center clear copy count discard endswith extend find get index insert isalnum "  # noqa: SIM905
    "intersection isalpha isdecimal isdigit islower isnumeric isspace istitle isupper items join keys ljust lower "
    "lstrip pop popitem remove removeprefix removesuffix replace reverse rfind rindex rjust rsplit rstrip setdefault "
    "sort split splitlines startswith strip swapcase title union update upper values zfill".split()
)
_STATEMENTS = (
    *(ast.Return, ast.If, ast.For, ast.While, ast.Assign, ast.AugAssign, ast.Expr, ast.Pass, ast.Break),
    *(ast.Continue, ast.FunctionDef, ast.arguments, ast.arg, ast.keyword),
)
_EXPRESSIONS = (
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.IfExp, ast.Subscript, ast.Slice, ast.Name),
    *(ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.Lambda),
    *(ast.GeneratorExp, ast.comprehension, ast.JoinedStr, ast.FormattedValue, ast.Starred, ast.Attribute),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)


def behaves(text: str, example: Example) -> bool:
    """Whether a text's function gives what the expected one gives, for every call of ``example.calls``.

    Values and their types are compared. A call at which the expected function raises does not count. The question
    fixes the function's name and the names of its parameters, and nothing else.

    Args:
        text: a text with a code block, as a model gives it.
        example: with ``calls``.
    Raises:
        ForetokenError: the expected function itself cannot be run: this system starts no such process.
    """
    found, expected = parse_code(text), parse_code(example.answer)
    assert expected is not None, example.id
    function = expected.body[-1]
    assert isinstance(function, ast.FunctionDef), example.id
    name, parameters = function.name, [each.arg for each in function.args.args]
    if found is None or not _harmless(found) or name not in {getattr(each, "name", "") for each in found.body}:
        return False
    calls = json.dumps([dict(zip(parameters, call, strict=True)) for call in example.calls])
    wanted = _outcomes(ast.unparse(expected), name, calls)
    if wanted is None or not any(wanted):
        raise ForetokenError(f"the function of '{example.id}' could not be run in a process of its own")
    try:
        source = ast.unparse(found)
    except RecursionError:
        return False
    got = _outcomes(source, name, calls)
    return got is not None and all(want in (None, each) for want, each in zip(wanted, got, strict=True))


def _harmless(tree: ast.Module) -> bool:
    """Whether there is nothing in it that could reach beyond its arguments."""
    if not all(isinstance(each, ast.FunctionDef) for each in tree.body):
        return False
    for node in ast.walk(tree):
        names = {getattr(node, field, None) or "" for field in ("id", "name", "arg", "attr")}
        if any(name.startswith("_") for name in names):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            return False
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return False
        if not isinstance(node, (ast.Module, *_STATEMENTS, *_EXPRESSIONS)):
            return False
    return True


@lru_cache(maxsize=4096)
def _outcomes(source: str, name: str, calls: str) -> Sequence[Any] | None:
    """What a function gives, call by call; None where it raises, and for all if it does not come to an end."""
    if len(source) > _MOST_CHARACTERS:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(_CALLS)],
            input=json.dumps({"source": source, "name": name, "calls": calls}),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            env={},
            cwd=_CALLS.parent,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    outcomes: list[Any] = json.loads(done.stdout)
    return outcomes
