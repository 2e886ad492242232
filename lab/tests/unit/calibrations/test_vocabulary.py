"""Which tokens are kept, and how much of other text they cover."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken.core.errors import ConfigError, InputError
from foretoken.data.documents import chat, text
from foretoken_lab.calibrations.vocabulary import Chosen, Written, choose, forced, generated, in_turn, raw
from helpers.zoo_llms import base, target


def wrote(*tokens: int) -> Written:
    return Written(tokens, [True] * len(tokens))


def chosen(texts: Sequence[Written], size: int, **changes: object) -> Chosen:
    return choose(texts, size, 10, changes.pop("forced", set()), **{"tokens": 1000, "context_rows": 4, **changes})  # type: ignore[arg-type]


def test_the_most_frequent_tokens_are_kept_with_ties_to_the_smaller_and_forced_ones() -> None:
    texts = [wrote(7, 7, 7, 3, 3), wrote(5, 5, 1)]
    assert chosen(texts, 2).ids == [3, 7]
    assert chosen(texts, 3, forced={9, 7}).ids == [3, 5, 7, 9]
    assert chosen(texts, 10).ids == list(range(10))


def test_coverage_is_that_of_every_fifth_text_which_is_not_counted() -> None:
    texts = [wrote(1), wrote(1), wrote(1), wrote(2), wrote(2, 2, 2, 8, 8, 8, 1, 1)]
    found = chosen(texts, 1)
    assert found.ids == [1]
    assert (found.num_tokens, found.num_held_out) == (4, 8)
    assert found.coverage == 2 / 8
    assert found.with_context == (2 + 2 + 2) / 8  # each but the first 2 and the first 8
    assert chosen(texts, 1, context_rows=1).with_context == (2 + 2) / 8
    assert chosen(texts[:4], 1).coverage is None


def test_prompts_are_context_and_not_counted() -> None:
    asked = Written([4, 4, 4, 6], [False, False, False, True])
    found = chosen([asked] * 4 + [Written([9, 9, 6, 9], [False, True, True, True])], 1)
    assert found.ids == [6]
    assert (found.num_tokens, found.num_held_out) == (4, 3)
    assert (found.coverage, found.with_context) == (1 / 3, 1.0)


def test_reading_stops_at_the_requested_size() -> None:
    endless = (wrote(1, 2, 3) for _ in iter(int, 1))
    assert chosen(endless, 2, tokens=30).num_tokens == 30  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 11])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"--size {size}"):
        chosen([wrote(1)], size)


@pytest.mark.parametrize("texts", [[], [Written([1, 2], [False, False])]], ids=["none", "prompts only"])
def test_an_empty_corpus_is_refused(texts: list[Written]) -> None:
    with pytest.raises(InputError, match="--corpus: there is no reply"):
        chosen(texts, 3)


def test_of_a_chat_the_replies_are_counted_and_of_a_text_all_of_it() -> None:
    tokenizer = target().tokenizer
    documents = [chat([("user", "How are you?"), ("assistant", "Fine.")]), text("Once upon a time")]
    found = list(raw(documents, tokenizer))
    replies = [
        tokenizer.decode([token for token, counts in zip(each.tokens, each.counts, strict=True) if counts])
        for each in found
    ]
    assert replies == ["Fine.<|end|>", "Once upon a time<|eos|>"]


def test_what_the_model_writes_is_counted() -> None:
    document = chat([("user", "What is 2 + 3?"), ("assistant", "42")])
    (found,) = generated([document], base(), length=4, temperature=0.0, seed=0)
    count = sum(found.counts)
    assert 1 <= count <= 4
    assert found.counts[-count:] == [True] * count
    assert "What is 2 + 3?" in target().tokenizer.decode(found.tokens[:-count])


def test_every_sampled_text_has_noise_of_its_own() -> None:
    """Equal openings, a high temperature: under one seed all texts were the same, and coverage looked high."""
    documents = [text("Once upon a time there was a little girl that lived in a big house.")] * 40
    found = list(generated(documents, base(), length=12, temperature=1.5, seed=0))
    assert len({tuple(each.tokens[-12:]) for each in found}) > 35
    again = list(generated(documents, base(), length=12, temperature=1.5, seed=0))
    assert [each.tokens for each in again] == [each.tokens for each in found]
    firsts = {each.tokens[each.counts.index(True)] for each in found}
    assert len(firsts) > 3


def test_forced_are_the_ends_markers_digits_and_the_line_break() -> None:
    found = forced(target())
    vocabulary = target().tokenizer.get_vocab()
    assert target().end_ids <= found
    assert {
        vocabulary["<|user|>"],
        vocabulary["7"],
        *target().tokenizer("\n", add_special_tokens=False)["input_ids"],
    } <= found
    assert len(found) < 40


def test_few_tokens_are_of_all_files() -> None:
    assert list(in_turn([["a", "b", "c"], [], ["d", "e"]])) == ["a", "d", "b", "e", "c"]
