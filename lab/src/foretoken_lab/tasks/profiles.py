"""Reading: a short passage about made-up persons, towns, ships ..., and a question that a span of it answers.

All names are put together from syllables, so that nothing can be remembered: the answer has to be found. A passage has
three to seven sentences about one thing, or about two of the same kind, where the other one is there to be confused
with. Every value occurs once in a passage, so that a question has one answer and the answer one place.

Notation of ``profiles.json``: ``{It}``, ``{it}``, ``{Its}``, ``{its}`` are the thing's name or
pronoun, ``{name}`` its name, ``{v}`` the value of the fact.
"""

# ruff: noqa: SIM905 - lists of words are read as words, not as two hundred pairs of quotes

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from foretoken_lab.tasks.example import Example, Split, only, prompt_hash


class Fact(NamedTuple):
    """One property: what kind of value it has, how a passage may state it, and the questions about it."""

    value: str
    sentences: Sequence[str]
    questions: Sequence[str]


class Kind(NamedTuple):
    """A kind of thing: how it is named, and its properties. The first property opens a passage."""

    name: str
    facts: Sequence[Fact]


_TEXTS = json.loads(Path(__file__).with_name("profiles.json").read_text(encoding="utf-8"))
WORDS = _TEXTS["words"]  # values that are drawn from a list; the other kinds of values are made up below
KINDS = [Kind(each["name"], [Fact(**fact) for fact in each["facts"]]) for each in _TEXTS["kinds"]]
CATEGORIES = ("one_thing", "two_things")

# chosen so that no common rude word can be put together
_ONSETS = "b br d dr f fl g gr h j k kr l m n p pr r s sk st t th tr v w z".split()
_VOWELS = "a e i o u a e o ai ea".split()
_CODAS = "l m n r s t ng ll".split()
_NAME_ENDINGS = "a o i e en ar us or in ek ov an el".split()
_PLACE_ENDINGS = "ford holm burg by mouth stad wick ton dale haven field mere bach nik".split()
_COMPANY_ENDINGS = ("Works", "Mills", "Trading", "and Sons", "Brothers", "Stores", "Supplies")
_SHIP_BEGINNINGS = ("Queen", "Star of", "Lady", "Spirit of", "Princess", "Pride of")
_SEAS = ("north of", "south of", "east of", "west of", "off the coast of")
_RETELL = (
    "What is told of {name}?",
    "What does the text say about {name}?",
    "Tell me all about {name}.",
    "What is known of {name}?",
)
_NAMES_THING = re.compile(r"\{its?\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Thing:
    """What a passage is about, by name and by pronoun."""

    name: str
    pronoun: str
    possessive: str

    def words(self, named: bool) -> dict[str, str]:
        it, its = (self.name, f"{self.name}'s") if named else (self.pronoun, self.possessive)
        return {"it": it, "its": its, "It": it[0].upper() + it[1:], "Its": its[0].upper() + its[1:]}


_Part = tuple[_Thing, Fact]
_Told = tuple[_Thing, Fact, str]


def examples(split: Split, seed: int) -> Iterator[Example]:
    """Passages with a question, without end.

    Args:
        split: the half to draw from.
        seed: equal seeds give equal passages.
    Raises:
        ConfigError: unknown split.
    """
    return only(split, _draw(Random(f"profiles {seed}")))


def passage_prompt(passage: str, question: str) -> str:
    """The layout of every prompt that asks about a text."""
    return f"{passage}\n\nQuestion: {question}"


def readings(split: Split, seed: int, most: int = 5) -> Iterator[list[Example]]:
    """Passages with up to ``most`` questions each, every one of the half: more to learn from a page that is read once.

    Args:
        split: the half to draw from.
        seed: equal seeds give equal passages.
        most: questions about one passage.
    Raises:
        ConfigError: unknown split.
    """
    rng = Random(f"profiles together {seed}")
    while True:
        about, _ = _draw_about(rng)
        passage, told = _write(rng, about)
        if len({thing.name for thing, _ in about}) < len(about):
            continue
        asked = [_ask(rng, passage, told, each) for each in rng.sample(told, len(told))]
        if kept := list(only(split, filter(None, asked)))[:most]:
            yield kept


def retellings(seed: int, most: int = 2) -> Iterator[list[tuple[str, str]]]:
    """Passages about two or three things of a kind, one of which is repeated, without end.

    The repetition needs the thing of every sentence, a question only that of one sentence: so this unlearns the
    confusion of things.

    Args:
        seed: equal seeds give equal passages.
        most: questions about values that follow, of any of the things.
    Yields:
        exchanges about one passage, which stands in the first prompt.
    """
    rng = Random(f"profiles told again {seed}")
    while True:
        kind = rng.choice(KINDS)
        about = [
            (_draw_thing(rng, kind), _draw_facts(rng, kind, rng.choice(kind.facts), rng.randint(2, 4)))
            for _ in range(rng.choice((2, 2, 3)))
        ]
        things = [thing for thing, _ in about]
        if len({thing.name for thing in things}) < len(things):
            continue
        passage, told = _write(rng, about)
        of = rng.choice(things)
        again = " ".join(_forms(fact, named=True)[0].format(v=v, **of.words(True)) for it, fact, v in told if it is of)
        asked = [_ask(rng, passage, told, each) for each in rng.sample(told, most)]
        yield [
            (passage_prompt(passage, rng.choice(_RETELL).format(name=of.name)), again),
            *((each.prompt.removeprefix(f"{passage}\n\n"), each.answer) for each in only("train", filter(None, asked))),
        ]


def _draw(rng: Random) -> Iterator[Example]:
    while True:
        about, asked = _draw_about(rng)
        passage, told = _write(rng, about)
        question = next(each for each in told if each[0] is about[0][0] and each[1] is asked)
        if len({thing.name for thing, _ in about}) == len(about) and (example := _ask(rng, passage, told, question)):
            yield example


def _draw_about(rng: Random) -> tuple[list[tuple[_Thing, list[Fact]]], Fact]:
    """One or two things with their facts, and the fact of the first one that the question is about."""
    kind = rng.choice(KINDS)
    asked = rng.choice(kind.facts)
    if rng.choice(CATEGORIES) == "one_thing":
        return [(_draw_thing(rng, kind), _draw_facts(rng, kind, asked, rng.randint(3, 7)))], asked
    # mostly the other thing has the same property: its value is the wrong answer to be confused with
    other_asked = asked if rng.random() < 0.8 else rng.choice(kind.facts)
    size, other_size = rng.choice(((2, 2), (3, 2), (3, 3), (4, 3), (2, 4)))
    return [
        (_draw_thing(rng, kind), _draw_facts(rng, kind, asked, size)),
        (_draw_thing(rng, kind), _draw_facts(rng, kind, other_asked, other_size)),
    ], asked


def _ask(rng: Random, passage: str, told: list[_Told], asked: _Told) -> Example | None:
    """A question for one of the values; None where it stands at more than one place.

    Two things of one colour, a year within a date: such a passage has more than one answer.
    """
    thing, fact, answer = asked
    places = [match.start() for match in re.finditer(rf"(?<![\w,]){re.escape(answer)}(?!\w|,\d)", passage)]
    if len(places) != 1:
        return None
    prompt = passage_prompt(passage, rng.choice(fact.questions).format(name=thing.name))
    return Example(
        id=f"profiles/{prompt_hash(prompt)}",
        prompt=prompt,
        answer=answer,
        response=answer,
        category=CATEGORIES[len({id(each) for each, _, _ in told}) > 1],
        depth=places[0] / len(passage),
    )


def _draw_facts(rng: Random, kind: Kind, asked: Fact, count: int) -> list[Fact]:
    """The opening fact, the one that the question is about, and others, in their order in the text."""
    opening = kind.facts[0]
    needed = [] if asked is opening else [asked]
    rest = [fact for fact in kind.facts[1:] if fact is not asked]
    chosen = needed + rng.sample(rest, min(len(rest), count - 1 - len(needed)))
    rng.shuffle(chosen)
    return [opening, *chosen]


def _write(rng: Random, about: list[tuple[_Thing, list[Fact]]]) -> tuple[str, list[_Told]]:
    """The passage, and its facts in their order."""
    blocks = [[(thing, fact) for fact in facts] for thing, facts in about]
    rng.shuffle(blocks)
    mixed = len(blocks) > 1 and rng.random() < 0.5
    sentences: list[str] = []
    told: list[_Told] = []
    last: _Thing | None = None
    for thing, fact in _interleave(rng, *blocks) if mixed else [pair for block in blocks for pair in block]:
        value = _draw_value(rng, fact.value)
        # if the sentences alternate, a pronoun could mean either of the two: then every sentence names its thing
        named = mixed or thing is not last or rng.random() < 0.25
        sentences.append(rng.choice(_forms(fact, named)).format(v=value, **thing.words(named)))
        told.append((thing, fact, value))
        last = thing
    return " ".join(sentences), told


def _forms(fact: Fact, named: bool) -> list[str]:
    return [form for form in fact.sentences if not named or _NAMES_THING.search(form)]


def _interleave(rng: Random, *blocks: Sequence[_Part]) -> list[_Part]:
    """All lists in one, each in its own order."""
    turns = [turn for turn, block in enumerate(blocks) for _ in block]
    rng.shuffle(turns)
    sources = [iter(block) for block in blocks]
    return [next(sources[turn]) for turn in turns]


def _draw_thing(rng: Random, kind: Kind) -> _Thing:
    if kind.name == "person":
        pronoun, possessive = rng.choice((("he", "his"), ("she", "her")))
        return _Thing(_draw_person(rng), pronoun, possessive)
    name = {
        "town": lambda: _draw_place(rng),
        "company": lambda: f"{_draw_name(rng)} {rng.choice(_COMPANY_ENDINGS)}",
        "river": lambda: f"the {_draw_name(rng)}",
        "ship": lambda: f"the {rng.choice(_SHIP_BEGINNINGS)} {_draw_name(rng)}",
        "bridge": lambda: f"the {_draw_name(rng)} Bridge",
        "school": lambda: f"{_draw_name(rng)} School",
        "island": lambda: _draw_name(rng),
    }[kind.name]()
    return _Thing(name, "it", "its")


def _draw_value(rng: Random, kind: str) -> str:
    if kind in WORDS:
        return rng.choice(WORDS[kind])
    return {
        "person": lambda: _draw_person(rng),
        "place": lambda: _draw_place(rng),
        "year": lambda: str(rng.randint(1640, 1995)),
        "date": lambda: f"{rng.randint(1, 28)} {rng.choice(WORDS['month'])} {rng.randint(1640, 1995)}",
        "count": lambda: f"{rng.choice((rng.randint(12, 999), rng.randint(1, 400) * 100)):,}",
        "length": lambda: f"{rng.randint(12, 980)} {rng.choice(('kilometres', 'miles'))}",
        "span": lambda: f"{rng.randint(20, 900)} {rng.choice(('metres', 'feet'))}",
        "height": lambda: f"{rng.randint(90, 3900):,} {rng.choice(('metres', 'feet'))}",
        "direction": lambda: f"{rng.choice(_SEAS)} {_draw_place(rng)}",
    }[kind]()


def _draw_person(rng: Random) -> str:
    return f"{_draw_name(rng)} {_draw_name(rng)}"


def _draw_place(rng: Random) -> str:
    return _draw_syllables(rng).capitalize() + rng.choice(_PLACE_ENDINGS)


def _draw_name(rng: Random) -> str:
    return _draw_syllables(rng).capitalize() + rng.choice(_NAME_ENDINGS)


def _draw_syllables(rng: Random) -> str:
    count = rng.choice((1, 1, 2))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))
