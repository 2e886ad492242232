"""Text that is released while it grows adds up to the text of all tokens, and never shows a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.engine.text.detokenise import TextStream, text_of
from helpers.zoo_llms import base, prompt_ids

VOCAB = 8192
# short tokens are single bytes and punctuation: most of the trouble is there
tokens = st.lists(st.one_of(st.integers(0, 300), st.integers(0, VOCAB - 1)), max_size=60)


def decode(ids: list[int]) -> str:
    return base().tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(ids: list[int], stop: tuple[str, ...] = (), every: int = 1) -> tuple[str, str, bool]:
    """Released text, final text, whether it stopped."""
    text = TextStream(base().tokenizer, stop)
    released, stopped = "", False
    for index, token in enumerate(ids):
        stopped = text.push(token)
        if index % every == 0:
            released += text.release(final=False)
        if stopped:
            break
    text.close()
    return released + text.release(final=True), text.text, stopped


@settings(max_examples=300, deadline=None)
@given(tokens, st.integers(1, 5))
def test_releases_add_up_to_the_text_of_all_tokens(ids, every):
    released, text, _ = stream(ids, every=every)
    assert released == text == decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.integers(1, 5))
def test_any_unicode_text_survives(text, every):
    ids = prompt_ids(text) if text else []
    assert stream(ids, every=every)[0] == decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab c", min_size=1, max_size=60), st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_stop_strings_cut_at_the_earliest_end_and_never_leak(text, stops):
    ids = prompt_ids(text)
    whole = decode(ids)
    released, final, stopped = stream(ids, tuple(stops))
    assert released == final
    assert stopped is any(stop in whole for stop in stops)
    if not stopped:
        assert final == whole
        return
    assert all(stop not in final for stop in stops)
    assert whole.startswith(final)
    assert any(whole.startswith(stop, len(final)) for stop in stops)


@settings(max_examples=200, deadline=None)
@given(tokens, st.lists(st.sampled_from(["a", "é", "the", " ", "\n", "."]), min_size=1, max_size=2))
def test_random_tokens_with_stop_strings_never_leak(ids, stops):
    released, final, _ = stream(ids, tuple(stops))
    assert released == final
    assert all(stop not in final for stop in stops)


def test_a_character_of_several_tokens_waits_for_its_last_byte():
    ids = prompt_ids("東")
    assert len(ids) >= 2
    text = TextStream(base().tokenizer)
    seen = []
    for token in ids:
        text.push(token)
        seen.append(text.release())
    assert "".join(seen) == decode(ids)
    assert all("\ufffd" not in each for each in seen)


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    ids = prompt_ids("x東")[:-1]
    released, text, _ = stream(ids)
    assert released == text == decode(ids)
    assert text.endswith("\ufffd")


def test_the_beginning_of_a_stop_string_is_held_back_until_it_cannot_be_one():
    text = TextStream(base().tokenizer, ("END!",))
    shown = ""
    for token in prompt_ids("the EN"):
        text.push(token)
        shown += text.release()
    assert not shown.endswith("E")
    assert not shown.endswith("EN")
    for token in prompt_ids("Dless"):
        text.push(token)
        shown += text.release()
    text.close()
    shown += text.release(final=True)
    assert shown == text.text
    assert "ENDless" in shown.replace(" ", "")


def test_a_stop_string_in_front_of_an_unfinished_character_is_cut_at_the_end():
    ids = prompt_ids("go STOP")
    text = TextStream(base().tokenizer, ("STOP",))
    broken = prompt_ids("東")[:-1]
    window = [*ids[:-1]]
    for token in window:
        text.push(token)
    # the last piece and the broken bytes arrive as if they were one token
    text._ids.append(ids[-1])
    for token in broken:
        text.push(token)
    text.close()
    assert text.text == "go "


class Tidying:
    """A tokenizer like those of word pieces: by default it removes spaces in front of full stops."""

    words = ("no", " .", " more", " .")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        text = "".join(self.words[each] for each in ids)
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


def test_a_space_in_front_of_a_full_stop_stays():
    assert text_of(Tidying(), [0, 1, 2, 3]) == "no . more ."
    text = TextStream(Tidying())
    for token in range(4):
        text.push(token)
    assert text.text == "no . more ."


@pytest.mark.parametrize("every", [1, 3])
def test_special_tokens_are_not_text(every):
    ids = [2, *prompt_ids("hello")[1:], 2, 5, *prompt_ids(" world")[1:], 2]
    assert stream(ids, every=every)[0] == decode(ids)
