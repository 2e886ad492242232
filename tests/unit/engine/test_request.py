"""How a request ends inside an accepted block: max_tokens exact, stop tokens, stop strings, min_tokens, ignore_eos."""

from __future__ import annotations

import pytest

from helpers.requests import make_request
from helpers.zoo_llms import base, prompt_ids


@pytest.mark.parametrize("blocks", [[[1, 2, 3, 4, 5, 6]], [[1], [2], [3], [4], [5]], [[1, 2], [3, 4], [5, 6]]])
def test_max_tokens_is_exact_however_the_blocks_fall(blocks):
    request = make_request([9, 9], max_tokens=5)
    for block in blocks:
        assert not request.finished
        assert request.accept(block) >= 1
    assert request.output_ids == [1, 2, 3, 4, 5]
    assert request.finish_reason == "length"
    assert request.tokens_left == 0


def test_the_context_limit_is_a_length_limit():
    request = make_request([9, 9, 9], max_tokens=50, context=5)
    assert request.accept([1, 2, 3, 4]) == 2
    assert request.finish_reason == "length"


def test_a_stop_token_inside_a_block_ends_it_and_is_kept():
    request = make_request([9], stop_token_ids=[7], max_tokens=10)
    assert request.accept([1, 7, 2, 7]) == 2
    assert request.output_ids == [1, 7]
    assert request.finish_reason == "stop"


def test_a_stop_token_that_is_also_the_last_allowed_token_is_a_stop():
    request = make_request([9], stop_token_ids=[7], max_tokens=2)
    request.accept([1, 7, 2])
    assert request.finish_reason == "stop"


def test_a_stop_token_after_the_limit_is_ignored():
    request = make_request([9], stop_token_ids=[7], max_tokens=2)
    assert request.accept([1, 2, 7]) == 2
    assert request.finish_reason == "length"


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, [1, 5]), (True, [1, 5, 2])])
def test_end_tokens_end_unless_ignored(ignore_eos, expected):
    request = make_request([9], end_ids=[5], ignore_eos=ignore_eos, max_tokens=10)
    request.accept([1, 5, 2])
    assert request.output_ids == expected
    assert request.finished is not ignore_eos


def test_stop_token_ids_hold_even_if_end_tokens_are_ignored():
    request = make_request([9], end_ids=[5], ignore_eos=True, stop_token_ids=[6], max_tokens=10)
    request.accept([5, 6, 1])
    assert request.output_ids == [5, 6]


def feed(text: str, blocks: int, **params):
    """Push a text's tokens, ``blocks`` at a time, until the request ends."""
    request = make_request([9], tokenizer=base().tokenizer, vocab_size=8192, max_tokens=500, **params)
    tokens = prompt_ids(text)
    for start in range(0, len(tokens), blocks):
        if not request.finished:
            request.accept(tokens[start : start + blocks])
    assert request.text is not None
    if request.finished:
        request.text.close()
    return request


@pytest.mark.parametrize("blocks", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ["mat", "cat sat", " on the m", "t on", "."])
def test_a_stop_string_ends_at_its_first_appearance_across_and_inside_tokens(stop, blocks):
    text = "The cat sat on the mat. The dog sat on the mat."
    request = feed(text, blocks, stop=stop)
    assert request.finish_reason == "stop"
    assert request.text.text == text[: text.index(stop)]
    # the tokens end with the one that completes the stop string, whatever the blocks
    assert request.output_ids == feed(text, 1, stop=stop).output_ids
    assert stop in base().tokenizer.decode(request.output_ids)
    assert stop not in base().tokenizer.decode(request.output_ids[:-1])


def test_the_earliest_of_several_stop_strings_counts():
    assert feed("one two three four", 3, stop=["three", "two t"]).text.text == "one "


def test_a_stop_string_is_no_stop_before_min_tokens():
    text = "a b a b a b a b a b a b"
    request = feed(text, 4, stop="b", min_tokens=7)
    assert request.finish_reason == "stop"
    assert request.num_output >= 7
    assert request.text.text.count("b") >= 1
    assert request.output_ids == feed(text, 1, stop="b", min_tokens=7).output_ids


def test_the_stop_token_is_not_text():
    tokenizer = base().tokenizer
    (end,) = prompt_ids(".")[-1:]
    request = make_request([9], tokenizer=tokenizer, vocab_size=8192, stop_token_ids=[end], max_tokens=50)
    request.accept(prompt_ids("A cat."))
    request.text.close()
    assert "." not in request.text.text
    assert request.output_ids[-1] == end


def test_two_requests_with_equal_contents_are_different():
    one, two = make_request([1], max_tokens=3), make_request([1], max_tokens=3)
    two.request_id = one.request_id
    assert one != two
    assert len({one, two}) == 2


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(map(chr, ids))


def read(text: str, **params) -> tuple[str, str | None, int]:
    """Text, finish reason and tokens of a request that is given one character at a time."""
    request = make_request([9], tokenizer=Letters(), vocab_size=200, max_tokens=50, **params)
    for letter in text:
        if not request.finished:
            request.accept([ord(letter)])
    return request.text.text, request.finish_reason, request.num_output


def test_a_stop_string_that_is_complete_at_exactly_min_tokens_stops():
    assert read("abcd", stop="c", min_tokens=3) == ("ab", "stop", 3)
    assert read("abcd", stop="bc", min_tokens=3) == ("a", "stop", 3)
    assert read("abcd", stop="c", min_tokens=4) == ("abcd", None, 4)


def test_a_stop_string_from_before_min_tokens_is_text_for_good():
    """Text that was searched once is not searched again, not even its last character."""
    assert read("abcde", stop="b", min_tokens=3) == ("abcde", None, 5)
    assert read("abcde", stop="ab", min_tokens=3) == ("abcde", None, 5)
    assert read("abcab", stop="ab", min_tokens=3) == ("abc", "stop", 5)


def test_a_stop_string_is_found_wherever_it_straddles_tokens():
    assert read("xab", stop="ab") == ("x", "stop", 3)
    assert read("xabc", stop="abc") == ("x", "stop", 4)
    assert read("aab", stop="ab") == ("a", "stop", 3)
