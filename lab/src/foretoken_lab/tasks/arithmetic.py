"""Worded arithmetic with worked steps: one, two or three steps, whole numbers from 2 to 999.

A problem is written once, as text with places for words and numbers (``arithmetic.json``). The equations in its
solution are at the same time the computation: ``{a} + {b} = {x}`` says that x is the sum of a and b. So no solution
can disagree with its answer. Numbers are drawn until every equation holds in whole numbers.

Notation: ``{a}`` to ``{d}`` are drawn numbers, ``{w}`` to ``{z}`` results, ``[one|two]`` a choice of wording, the other
names are words, each the same at every place: ``{Name}``, ``{Other}``, ``{Third}`` (people), ``{he}`` (of Name),
``{things}``, ``{others}``, ``{box}`` ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks.example import Example, Split, only, prompt_hash

_TEXTS = json.loads(Path(__file__).with_name("arithmetic.json").read_text(encoding="utf-8"))
HE, SHE, MEN, WOMEN = (_TEXTS[name] for name in ("he", "she", "men", "women"))
THINGS, BOXES, VEHICLES = (_TEXTS[name] for name in ("things", "boxes", "vehicles"))
COLOURS, DAYS = (_TEXTS[name] for name in ("colours", "days"))
# (the problem, then its steps in order; the answer is the result of the last)
ONE_STEP, TWO_STEPS, THREE_STEPS = (_TEXTS[name] for name in ("one_step", "two_steps", "three_steps"))
CATEGORIES = {"one_step": ONE_STEP, "two_steps": TWO_STEPS, "three_steps": THREE_STEPS}
SMALLEST, LARGEST = 2, 999  # no 0 and 1: "1 marbles"
_PEOPLE = [(name, HE) for name in MEN] + [(name, SHE) for name in WOMEN]
_EQUATION = re.compile(r"(\{\w\}|\d+) ([-+*/]) (\{\w\}|\d+) = \{(\w)\}")
_CHOICE = re.compile(r"\[([^]]*)\]")
_LARGE_SHARE = 0.1  # so many of the plain numbers go beyond 100


def examples(
    split: Split, seed: int, categories: Sequence[str] = ("one_step", "two_steps", "three_steps")
) -> Iterator[Example]:
    """Word problems without end, as many of each category.

    Args:
        split: the half to draw from.
        seed: equal seeds give equal problems.
        categories: of "one_step", "two_steps", "three_steps".
    Raises:
        ConfigError: unknown split or category.
    """
    for category in categories:
        if category not in CATEGORIES:
            raise ConfigError(f"categories has {category!r}: known: {', '.join(CATEGORIES)}.")
    return only(split, _draw(Random(f"arithmetic {seed}"), tuple(categories)))


def sums(seed: int, most: int = 8) -> Iterator[tuple[str, str]]:
    """Rows of bare sums and their equations, without end: the arithmetic of the problems, without their words.

    Args:
        seed: equal seeds give equal rows.
        most: sums of one row.
    """
    rng = Random(f"sums {seed}")
    while True:
        row = [_draw_sum(rng) for _ in range(rng.randint(2, most))]
        yield ", ".join(asked for asked, _ in row), "\n".join(f"{asked} = {result}." for asked, result in row)


def _draw_sum(rng: Random) -> tuple[str, int]:
    operator = rng.choice("++--**/")  # a division is a product read backwards
    while True:
        a, b = _draw_number(rng, False), _draw_number(rng, operator in "*/")
        if operator == "/":
            a *= b
        numbers: dict[str, int] = {}
        if a <= LARGEST and _compute(numbers, str(a), operator, str(b), "x"):
            return f"{a} {operator} {b}", numbers["x"]


def _draw(rng: Random, categories: Sequence[str]) -> Iterator[Example]:
    while True:
        category = rng.choice(categories)
        problem, *steps = rng.choice(CATEGORIES[category])
        numbers, asked = _draw_numbers(rng, problem, steps)
        places = {**_draw_words(rng), **numbers}
        prompt = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), problem).format_map(places)
        solution = " ".join(steps).format_map(places)
        answer = str(numbers[asked])
        yield Example(
            id=f"arithmetic/{prompt_hash(prompt)}",
            prompt=prompt,
            answer=answer,
            response=f"{solution}\n#### {answer}",
            category=category,
        )


def _draw_words(rng: Random) -> dict[str, str]:
    (name, (he, his, him)), (other, _), (third, _) = rng.sample(_PEOPLE, 3)
    (thing, things), (other_thing, others) = rng.sample(THINGS, 2)
    box, boxes = rng.choice(BOXES)
    colour, tint = rng.sample(COLOURS, 2)
    first_day, second_day = sorted(rng.sample(range(len(DAYS)), 2))
    return {
        "Name": name, "he": he, "He": he.capitalize(), "his": his, "him": him, "Other": other, "Third": third,
        "thing": thing, "things": things, "other": other_thing, "others": others, "box": box, "boxes": boxes,
        "colour": colour, "tint": tint, "Day": DAYS[first_day], "Another": DAYS[second_day],
        "vehicle": rng.choice(VEHICLES),
    }  # fmt: skip


def _draw_numbers(rng: Random, problem: str, steps: Sequence[str]) -> tuple[dict[str, int], str]:
    """Numbers under which every equation of a solution holds, and the name of the last result."""
    equations = [match.groups() for step in steps for match in _EQUATION.finditer(step)]
    # products and quotients that a person would do in the head: a factor or a divisor stays small
    small = {right.strip("{}") for _, operator, right, _ in equations if operator in "*/"}
    while True:
        numbers = {name: _draw_number(rng, name in small) for name in "abcd" if f"{{{name}}}" in problem}
        if all(_compute(numbers, *equation) for equation in equations):
            return numbers, equations[-1][3]


def _draw_number(rng: Random, small: bool) -> int:
    if small:
        return rng.randint(SMALLEST, 10)
    return rng.randint(101, 500) if rng.random() < _LARGE_SHARE else rng.randint(SMALLEST, 99)


def _compute(numbers: dict[str, int], left: str, operator: str, right: str, result: str) -> bool:
    """Add the result of one equation to the numbers; False if it is not a whole number within the limits."""
    a, b = (int(side) if side.isdigit() else numbers[side.strip("{}")] for side in (left, right))
    if operator == "/":
        value, rest = divmod(a, b)
    else:
        value, rest = {"+": a + b, "-": a - b, "*": a * b}[operator], 0
    numbers[result] = value
    return rest == 0 and SMALLEST <= value <= LARGEST
