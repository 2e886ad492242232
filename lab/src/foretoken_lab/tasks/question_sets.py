"""Questions with checkable answers; ``foretoken train judge`` mines labels from them.

A user's file has one per line; other sets are entry points of the group ``foretoken.questions``::

    {"question": "What is 12 + 30?", "answer": "42"}                      a number: the final one of the text counts
    {"question": "Who wrote it?", "answer": ["Ada Lovelace", "Ada"]}      words: several answers may be right
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foretoken.core import extensions
from foretoken.core.errors import ConfigError, InputError, nearest
from foretoken_lab.records import placed_records
from foretoken_lab.tasks.answers import final_number, holds, normalise

ANSWER_TOKENS = 256  # maximum tokens of an answer to a question of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        prompt: the user's message.
        right: returns whether a text answers it.
        still_right: returns whether a variant of a right text is equally good; accepts at least what ``right`` does.
    """

    prompt: str
    right: Callable[[str], bool]
    still_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions of one kind.

    Attributes:
        name: name of their labels.
        max_tokens: maximum tokens of an answer.
        training: yields questions outside of all evaluations for a seed; possibly endless.
        held_out: returns a number of questions outside of all training data, always the same ones.
    """

    name: str
    max_tokens: int
    training: Callable[[int], Iterable[Question]]
    held_out: Callable[[int], Iterable[Question]]


def find_questions(name: str) -> QuestionSet:
    """Return a set of questions by the name of its entry point, else by the path of a file.

    Raises:
        ConfigError: there is no such set; the message has the nearest name, or the source of named sets.
        InputError: the file has no questions, or an invalid one.
    """
    found = extensions.loaded(extensions.QUESTIONS, name)
    if found is None and (set(name) & set("./\\~") or Path(name).exists()):
        return read_questions(Path(name))
    if found is None:
        known = extensions.declared(extensions.QUESTIONS)
        own = "or use a file of questions with answers (FILE.jsonl)"
        if not known:
            raise ConfigError(f"--task {name}: named tasks are part of foretoken-lab; {extensions.GET_LAB}; {own}")
        raise ConfigError(f"--task {name}: {nearest(name, known).rstrip('.')}, {own}")
    questions: QuestionSet = found
    return questions


def read_questions(path: Path) -> QuestionSet:
    """The questions of a JSON Lines file, in its order for every seed.

    Raises:
        InputError: there are none, or one is invalid; the message names its line.
    """
    found = [_question(place, record) for place, record in placed_records(path, ("question", "answer"))]
    if not found:
        raise InputError(f"{path}: holds no questions")

    def training(seed: int) -> Iterator[Question]:
        return iter(found)

    return QuestionSet(
        name=path.name.split(".")[0], max_tokens=ANSWER_TOKENS, training=training, held_out=lambda count: found[:count]
    )


def checked(prompt: str, *answers: str) -> Question:
    """Return a question with numbers or words as answers: any of them is right."""
    return Question(prompt=prompt, right=partial(_right, answers), still_right=partial(_still_right, answers))


def _question(place: str, record: dict[str, object]) -> Question:
    prompt, answer = record["question"], record["answer"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"{place}: 'question' must be a text")
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(_usable(each) for each in answers):
        raise InputError(f"{place}: 'answer' must be a number, a text, or a list of them, not {str(answer)[:60]!r}")
    return checked(prompt, *map(str, answers))


def _usable(answer: object) -> bool:
    if isinstance(answer, str):
        return bool(normalise(answer))
    return isinstance(answer, (int, float)) and not isinstance(answer, bool) and answer - answer == 0


def _is_number(answer: str) -> bool:
    return final_number(answer) is not None and not any(letter.isalpha() for letter in answer)


def _right(answers: tuple[str, ...], said: str) -> bool:
    return any(
        final_number(said) == final_number(each) if _is_number(each) else normalise(said) == normalise(each)
        for each in answers
    )


def _still_right(answers: tuple[str, ...], said: str) -> bool:
    return _right(answers, said) or any(holds(said, each) for each in answers if not _is_number(each))
