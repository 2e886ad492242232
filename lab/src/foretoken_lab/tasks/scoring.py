"""How an output is compared with the answer. Every scorer takes an output and its example and gives shares.

The keys are the measures that a task reports: ``correct`` (1 or 0; its mean is the accuracy), and others where they
make sense (``f1``, ``parses``). Nothing here runs what a model wrote: code is parsed, never executed (labels for a
judge are another matter: behaviour.py).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter

from foretoken_lab.tasks.answers import final_number, normalise
from foretoken_lab.tasks.example import Example

_CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def score_number(output: str, example: Example) -> dict[str, float]:
    """Right if the output's final number equals the answer's, however it is written (7, 7.0, $7)."""
    return {"correct": float(final_number(output) == final_number(example.answer) is not None)}


def score_span(output: str, example: Example) -> dict[str, float]:
    """SQuAD's exact match and token F1, the best over all accepted answers."""
    answers = (example.answer, *example.alternatives)
    return {
        "correct": float(any(normalise(output) == normalise(answer) for answer in answers)),
        "f1": max(token_f1(output, answer) for answer in answers),
    }


def score_key(output: str, example: Example) -> dict[str, float]:
    """Right if the output names the right number and no other: listing every key of the text does not count."""
    return {"correct": float(set(re.findall(r"\d+", output)) == {example.answer})}


def score_json(output: str, example: Example) -> dict[str, float]:
    """Right if the whole output is JSON for the expected value; ``parses``: if it is JSON at all."""
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        return {"correct": 0.0, "parses": 0.0}
    # written out again, since Python holds 1 == True == 1.0, and order does not matter in an object
    same = json.dumps(found, sort_keys=True) == json.dumps(json.loads(example.answer), sort_keys=True)
    return {"correct": float(same), "parses": 1.0}


def score_code(output: str, example: Example) -> dict[str, float]:
    """Right if the first code block has the expected syntax tree: the same names, parameters and statements.

    Also ``parses`` (the block is Python) and ``defines`` (it defines a function of this name and these parameters).
    """
    found = parse_code(output)
    expected = parse_code(example.answer)
    assert expected is not None, example.id
    return {
        "correct": float(found is not None and ast.dump(found) == ast.dump(expected)),
        "parses": float(found is not None),
        "defines": float(found is not None and _signatures(expected) <= _signatures(found)),
    }


def token_f1(output: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of the normal forms; two empty texts agree."""
    found, expected = normalise(output).split(), normalise(answer).split()
    if not found or not expected:
        return float(found == expected)
    shared = sum((Counter(found) & Counter(expected)).values())
    return 2.0 * shared / (len(found) + len(expected))


def parse_code(text: str) -> ast.Module | None:
    """The syntax tree of the first code block; None if there is none, it is empty, or no Python."""
    block = _CODE.search(text)
    if block is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about valid code with warnings, such as an unknown escape
            tree = ast.parse(block[1])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if tree.body else None  # an empty block is valid Python, but no answer


def _signatures(tree: ast.Module) -> set[tuple[str, str]]:
    return {(node.name, ast.dump(node.args)) for node in tree.body if isinstance(node, ast.FunctionDef)}
