"""Reading tasks: the bundled samples, the records of a data folder, and the window around an answer."""

from __future__ import annotations

import gzip
import json
import lzma

import pytest

from foretoken.core.errors import InputError
from foretoken_lab.tasks import passages
from foretoken_lab.tasks.example import prompt_hash
from foretoken_lab.tasks.passages import window_around
from foretoken_lab.tasks.scoring import score_span


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    opener = gzip if path.suffix == ".gz" else lzma
    path.write_bytes(opener.compress(text.encode()))


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path / "rag_wiki" / "squad_passages.jsonl.gz", [{"id": "p1", "title": "T", "text": "Paris is in France."}]
    )
    question = {"turns": ["Where is Paris?"], "passage_id": "p1"}
    write(
        tmp_path / "eval" / "squad_dev.jsonl.gz",
        [
            {"id": "q1", **question, "answers": ["France", "France", "in France"], "is_impossible": False},
            {"id": "q2", **question, "answers": [], "is_impossible": True},
        ],
    )
    write(
        tmp_path / "factbook" / "passages.jsonl.xz",
        [{"id": "f1", "text": "x " * 400 + "Capital: Riga " + "y " * 400}, {"id": "f2", "text": "nothing"}],
    )
    asked = {"turns": ["What is the capital?"], "field": "Government / Capital / name"}
    write(
        tmp_path / "eval" / "factbook_qa.jsonl.gz",
        [
            {"id": "g1", **asked, "answers": ["Riga"], "passage_ids": ["f2", "f1"]},
            {"id": "g2", **asked, "answers": ["Oslo"], "passage_ids": ["f1"]},  # in none of its passages
            {"id": "g3", **asked, "answers": [("x " * 300).strip()], "passage_ids": ["f1"]},  # longer than a piece
        ],
    )
    problem = {"turns": ["How many?"], "answer": "145.0", "category": "Addition"}
    write(tmp_path / "eval" / "svamp.jsonl.gz", [{"id": "s1", **problem}])
    write(tmp_path / "eval" / "gsm8k_test.jsonl.gz", [{"id": "m1", **problem, "answer": "3"}])
    return tmp_path


@pytest.mark.parametrize("read", [passages.squad, passages.factbook])
def test_samples_are_complete_and_their_answers_are_in_their_passages(read):
    examples = read(None)
    assert len(examples) == len({each.id for each in examples}) == passages.SAMPLE_SIZE
    for each in examples:
        passage, _, question = each.prompt.rpartition("\n\nQuestion: ")
        assert question.strip()
        assert any(answer in passage for answer in (each.answer, *each.alternatives))
        assert score_span(each.response, each)["correct"]
    assert [each.id for each in examples] == sorted((each.id for each in examples), key=prompt_hash)


def test_samples_name_their_licences():
    text = (passages.SAMPLES / "README.md").read_text()
    assert "CC BY-SA 4.0" in text
    assert "CC0" in text


def test_squad_keeps_answerable_questions(folder):
    (example,) = passages.squad(folder)
    assert example.prompt == "Paris is in France.\n\nQuestion: Where is Paris?"
    assert (example.answer, example.alternatives) == ("France", ("in France",))


def test_factbook_shows_the_piece_with_the_answer_and_leaves_out_the_rest(folder):
    (example,) = passages.factbook(folder)
    assert example.id == "g1"
    assert example.category == "Government"
    passage = example.prompt.partition("\n\n")[0]
    assert "Capital: Riga" in passage
    assert len(passage) <= passages.FACTBOOK_WINDOW


def test_word_problems(folder):
    (svamp,), (gsm8k,) = passages.svamp(folder), passages.gsm8k(folder)
    assert (svamp.prompt, svamp.answer, svamp.category) == ("How many?", "145.0", "Addition")
    assert gsm8k.answer == "3"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"svamp\.jsonl\.gz: no such file"):
        passages.svamp(tmp_path)


@pytest.mark.parametrize("answer", ["w0", "w7 w8", "w250", "w499"])
def test_a_window_has_whole_words_and_the_answer(answer):
    text = " ".join(f"w{number}" for number in range(500))
    window = window_around(text, answer, 200)
    assert len(window) <= 200
    assert f" {answer} " in f" {window} "
    assert f" {window} " in f" {text} "  # no word is cut
    assert window_around("short text", "short", 200) == "short text"


def test_a_window_of_one_long_word_keeps_the_answer():
    text = "x" * 500 + "answer" + "y" * 500
    assert "answer" in window_around(text, "answer", 100)
