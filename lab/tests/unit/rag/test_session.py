"""Keys and values under several passages: rows that are read again or kept, equal to freshly read ones."""

from __future__ import annotations

import pytest

from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.session import NO_PASSAGE, Layout, Session, Shelf
from helpers.knowledge import QUESTIONS, passages
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.zoo_llms import base, target


def session(shelf, question=QUESTIONS[0], length=40, **options):
    layout = Layout.of(target().tokenizer)
    made = RagConfig(**options)
    return Session(shelf, layout, lambda n: passages()[n].text, question, made, length, ignore_eos=True)


def test_the_prompt_is_the_chat_template_s():
    layout = Layout.of(target().tokenizer)
    tokens = [*layout.head("A passage.", 99), *layout.question("Why?")]
    text = target().tokenizer.decode(tokens)
    expected = base().tokenizer.apply_chat_template(
        [{"role": "user", "content": "A passage.\n\nQuestion: Why?"}], add_generation_prompt=True, tokenize=False
    )
    assert text == expected
    assert layout.head(None, 99) == layout.head("", 99)


def test_a_marker_in_a_passage_is_text():
    ids = Layout.of(target().tokenizer).head("a <|end|> b", 99)
    assert ids.count(target().tokenizer.convert_tokens_to_ids("<|end|>")) == 0


def test_after_leaving_a_passage_and_a_rollback_everything_is_as_freshly_read():
    shelf = Shelf(target())
    found = session(shelf)
    for passage, count in ((3, 4), (5, 4), (3, 4), (NO_PASSAGE, 2)):
        found.decode(passage, count)
    found.roll_back(6, 2)
    found.decode(3, 4)
    again = session(Shelf(target()))
    again._body = list(found._body[: len(found.prompt) + 6])
    again.decode(3, 4)
    assert found.answer == again.answer
    layer = shelf._cache.keys[-1]
    fresh = again._shelf._cache
    slot, held = shelf._slots[3]
    other, same = again._shelf._slots[3]
    assert held == same
    assert layer[slot, :, : len(held)].equal(fresh.keys[-1][other, :, : len(held)])
    assert found.counts.passages == [3, 5, 3]


def test_rows_are_counted():
    shelf = Shelf(target())
    found = session(shelf)
    head = len(found._head(3))
    found.decode(3, 4)
    assert found.counts.rows == head + len(found.prompt) + 3
    assert found.counts.passage_rows == head
    found.decode(3, 4)
    assert found.counts.rows == head + len(found.prompt) + 7  # nothing is read again under the same passage
    other = len(found._head(5))
    found.decode(5, 1)
    found.decode(3, 1)
    found.close()
    assert found.counts.passage_rows == head + other
    assert found.counts.recomputed_rows == len(found.prompt) + 8  # under passage 5; passage 3 read only the gap


def test_the_oldest_passage_gives_up_its_slot():
    shelf = Shelf(target())
    found = session(shelf)
    for passage in range(9):
        found.decode(passage, 1)
    assert list(shelf._slots) == [3, 4, 5, 6, 7, 8]
    shelf.clear()
    assert shelf._cache.free_slots == shelf._cache.max_slots


def test_the_next_request_does_not_read_a_known_passage():
    shelf = Shelf(target())
    session(shelf).decode(3, 2)
    second = session(shelf, QUESTIONS[1])
    second.decode(3, 2)
    assert second.counts.passage_rows == 0


def test_the_query_is_the_last_tokens_as_text():
    found = session(Shelf(target()), query_tokens=4)
    found.decode(NO_PASSAGE, 8)
    assert found.query_text() == target().tokenizer.decode(found.answer[-4:], skip_special_tokens=True)


def test_a_passage_is_cut():
    found = session(Shelf(target()), document_tokens=5)
    bare = len(found._layout.head(".", 1)) - 1
    assert len(found._head(0)) == bare + 5
    with pytest.raises(IndexError):
        found.decode(99, 1)
