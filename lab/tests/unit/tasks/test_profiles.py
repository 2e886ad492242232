"""Made-up passages, read back with the sentence forms: one thing has one value, and the answer is the right one."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from foretoken_lab.tasks import profiles
from foretoken_lab.tasks.example import split_of
from foretoken_lab.tasks.profiles import KINDS

NAME = r"(?:[Tt]he )?[A-Z]\w+(?: (?:of |and )?[A-Z]\w+)*(?:'s)?|its?|his|her?|she"
PRONOUNS = {"the", "it", "its", "he", "his", "she", "her"}


def pattern(form):
    """A sentence form or question as a regular expression with the groups ``thing`` and ``value``."""
    parts = re.split(r"(\{\w+\})", form)
    text, named = "", False
    for part in parts:
        if part == "{v}":
            text += "(?P<value>.+?)"
        elif part.startswith("{"):
            text += f"(?:{NAME})" if named else f"(?P<thing>{NAME})"
            named = True
        else:
            text += re.escape(part)
    return re.compile(text)


FORMS = [(fact, [pattern(form) for form in fact.sentences]) for kind in KINDS for fact in kind.facts]
QUESTIONS = [(fact, [pattern(form) for form in fact.questions]) for kind in KINDS for fact in kind.facts]


def read(passage):
    """(thing, fact, value) of every sentence, under every form that it fits."""
    found, current = [], None
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", passage):
        matches = [(fact, m) for fact, forms in FORMS for form in forms if (m := form.fullmatch(sentence))]
        assert matches, sentence
        things = {m["thing"].removesuffix("'s") for _, m in matches if "thing" in m.groupdict()}
        named = {thing for thing in things if thing.lower() not in PRONOUNS}
        assert len(named) <= 1, named
        current = next(iter(named), current)
        found += [(current[0].lower() + current[1:], fact, m["value"]) for fact, m in matches]
    return found


def answers(example):
    """Every value that a reader of the passage may give."""
    passage, question = example.prompt.split("\n\nQuestion: ")
    facts = read(passage)
    asked = [(fact, m["thing"]) for fact, forms in QUESTIONS for form in forms if (m := form.fullmatch(question))]
    assert asked, question
    return {
        value
        for wanted, thing in asked
        for subject, fact, value in facts
        if fact is wanted and subject == thing[0].lower() + thing[1:]
    }


@pytest.fixture(scope="module")
def examples():
    return list(islice(profiles.examples("train", 11), 600))


def test_the_passage_gives_one_value_and_it_is_the_answer(examples):
    for each in examples:
        # two facts of a ship share the words "was launched in", with a place or a year
        fitting = {value for value in answers(each) if value[0].isdigit() == each.answer[0].isdigit()}
        assert fitting == {each.answer}, each


def test_the_answer_occurs_once_and_its_depth_is_where(examples):
    for each in examples:
        passage = each.prompt.split("\n\nQuestion: ")[0]
        assert passage[round(each.depth * len(passage)) :].startswith(each.answer)
        assert len(re.findall(rf"(?<![\w,]){re.escape(each.answer)}(?!\w|,\d)", passage)) == 1


def test_passages_have_three_to_seven_sentences(examples):
    counts = {len(re.split(r"(?<=\.) (?=[A-Z])", each.prompt.split("\n\n")[0])) for each in examples}
    assert counts == {3, 4, 5, 6, 7}


def test_two_things_compete_for_the_answer(examples):
    pairs = [each for each in examples if each.category == "two_things"]
    assert len(pairs) > 200
    rivals = 0
    for each in pairs:
        facts = read(each.prompt.split("\n\n")[0])
        kinds = [fact for _, fact, value in facts if value == each.answer]
        rivals += any(fact in kinds and value != each.answer for _, fact, value in facts)
    assert rivals / len(pairs) > 0.6


def test_several_questions_about_one_passage_have_one_answer_each_and_are_of_the_half():
    passages = list(islice(profiles.readings("train", 5), 150))
    for asked in passages:
        assert 1 <= len(asked) <= 5
        assert len({example.prompt.split("\n\nQuestion: ")[0] for example in asked}) == 1
        assert len({example.prompt for example in asked}) == len(asked)
        for example in asked:
            fitting = {value for value in answers(example) if value[0].isdigit() == example.answer[0].isdigit()}
            assert fitting == {example.answer}, example
            assert split_of(example.prompt) == "train"
    assert max(map(len, passages)) == 5
    categories = {example.category for asked in passages for example in asked}
    assert categories == set(profiles.CATEGORIES)


def test_a_retelling_holds_all_of_one_subject_and_nothing_of_the_others():
    counts = set()
    for (prompt, again), *others in islice(profiles.retellings(5), 200):
        passage, asked = prompt.split("\n\nQuestion: ")
        told = {(thing.lower(), value) for thing, _, value in read(passage)}
        things = {thing for thing, _ in told}
        [name] = {thing for thing in things if re.search(rf"\b{thing}\b", asked.lower())}
        again = {(thing.lower(), value) for thing, _, value in read(again)}
        assert {thing for thing, _ in again} == {name}
        ours = {value for thing, value in told if thing == name}
        # a value may be read with words before it, where another fact's form fits as well
        assert all(any(mine.endswith(value) or value.endswith(mine) for _, value in again) for mine in ours)
        assert all(any(mine.endswith(value) or value.endswith(mine) for mine in ours) for _, value in again)
        counts.add(len(things))
        for question, answer in others:
            assert answer in {value for _, value in told}
            assert split_of(f"{passage}\n\n{question}") == "train"
    assert counts == {2, 3}
