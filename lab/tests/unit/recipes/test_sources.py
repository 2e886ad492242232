"""Sources of documents: a user's files, generated tasks, and tasks made from passages."""

from __future__ import annotations

import itertools
import json
import lzma
import re

import pytest

from foretoken.data.documents import parts
from foretoken.train.sources import parse_all
from foretoken_lab.recipes import sources
from foretoken_lab.tasks.example import split_of
from foretoken_lab.tasks.training import TASKS

PARAGRAPH = (
    "In the year 1807 the painter Anna Holm moved to Riga with two of her brothers and opened a school there. "
    "It stood next to the old harbour of the town for more than 40 years and was visited by many travellers. "
    "The last of its pupils was Peter Lund, who painted the bridge over the river Daugava in 1849 or so."
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "x"}\n')
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text('{"text": "y"}\n')
    return tmp_path


def test_generated_tasks_need_no_file_and_are_the_training_halves(folder):
    [tasks, _] = parse_all(["generated=0.5", "a.jsonl"])
    assert (tasks.name, tasks.share, tasks.files) == ("generated", 0.5, ())
    read = list(itertools.islice(tasks.documents(), 300))
    assert read == list(itertools.islice(tasks.documents(), 300))
    prompts = [parts(document)[0][1] for document in read]
    assert {split_of(prompt) for prompt in prompts} == {"train"}
    kinds = [("secret number", "keys"), ("JSON", "json"), ("Python function", "code"), ("\n\nQuestion: ", "profiles")]
    assert {name for prompt in prompts for words, name in kinds if words in prompt} == {name for _, name in kinds}


@pytest.mark.parametrize("name", TASKS)
def test_generated_tasks_are_of_the_training_half_and_repeat_themselves(name):
    source = sources.task(name, 0.5)
    first, again = (list(itertools.islice(source.documents(), 20)) for _ in range(2))
    assert first == again
    for document in first:
        [(_, prompt), (_, response)] = parts(document)
        assert split_of(prompt) == "train"
        assert response


def write(path, texts):
    path.parent.mkdir(parents=True)
    path.write_bytes(lzma.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))


def test_a_gap_is_filled_from_the_passage(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt.xz").write_bytes(lzma.compress(f" = Title = \n{PARAGRAPH}\n".encode() * 30))
    made = list(sources.cloze("wikitext2", 1.0, tmp_path).documents())
    assert len(made) == 30
    for document in made:
        [(_, prompt), (_, answer)] = parts(document)
        passage, question = prompt.split("\n\nQuestion: Fill in the gap: ")
        assert passage == PARAGRAPH
        assert question.count("____") == 1
        assert question.replace("____", answer) in passage
    assert len({parts(document)[1][1] for document in made}) > 3


def test_hidden_keys_and_sentences_are_in_the_pages(tmp_path):
    pages = [" ".join(f"Page {n} has the sentence number {s} about things of many kinds." for s in range(8))
             for n in range(400)]  # fmt: skip
    write(tmp_path / "books" / "part0.jsonl.xz", ["\n".join(pages[:200]), "\n".join(pages[200:])])
    for document in itertools.islice(sources.hidden_keys(1.0, tmp_path).documents(), 6):
        turns = [content for _, content in parts(document)]
        assert len(turns) == 2 * turns[0].count("The secret number of") in (4, 8, 16, 24, 48, 80)
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            owner = re.findall(r"What is the secret number of (\w+)\?", question)[-1]
            number = re.findall(r"\d+", answer)[-1]
            assert f"The secret number of {owner} is {number}." in turns[0]
    for document in itertools.islice(sources.recall(1.0, tmp_path).documents(), 4):
        turns = [content for _, content in parts(document)]
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            assert turns[0].count(answer) == 1
            assert answer.startswith(re.findall(r'begins with "(.*)"\?', question)[-1])


@pytest.mark.parametrize("at", [0, 700, 2900])
def test_the_piece_around_an_answer_has_it(at):
    words = "word " * 600
    passage = f"{words[:at]}the answer{words[at:]}"
    piece = sources.around(passage, "the answer")
    assert "the answer" in piece
    assert piece in passage
    assert len(piece) <= sources.PASSAGE_CHARACTERS + 20
    assert sources.around("the answer", "the answer") == "the answer"


@pytest.mark.parametrize("source", [sources.readings(0.1), sources.retellings(0.1)], ids=lambda source: source.name)
def test_a_passage_stands_once_before_its_questions(source):
    for document in itertools.islice(source.documents(), 40):
        (role, opening), *others = parts(document)
        passage = opening.split("\n\nQuestion: ")[0]
        assert role == "user"
        assert document.count(passage) == 1
        asked = [content for role, content in others if role == "user"]
        assert all(content.startswith("Question: ") for content in asked)
        assert all(split_of(f"{passage}\n\n{content}") == "train" for content in asked)


def test_problems_are_of_the_categories_alone():
    assert all(
        parts(document)[1][1].count(" = ") >= 3
        for document in itertools.islice(sources.problems(0.1, "three_steps").documents(), 40)
    )


def test_sums_are_written_with_their_answers():
    (_, asked), (_, worked) = parts(next(sources.sums(0.1).documents()))
    assert worked.replace("\n", "").count("=") == len(asked.split(", "))
