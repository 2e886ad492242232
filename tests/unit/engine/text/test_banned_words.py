"""Words that may not be written, and tokens that may: the same greedy text with every kind of draft."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.core.words import Words
from foretoken.engine.text.banned_words import words_of
from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import PROMPTS, assert_idle, base, greedy, ids, prompt_ids, target, with_config

METHODS = [
    {"method": "suffix", "num_speculative_tokens": 6},
    {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": "zoo:draft", "tree": "topk", "num_speculative_tokens": 8},
    {"method": "kangaroo", "adapter": "random:2", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4, "executor": "pearl"},
]
TEXTS = PROMPTS[:3]


def without(text: str) -> dict[str, Any]:
    """What the model would write first, forbidden in pieces of one, two and three tokens."""
    tokens = greedy(text, 8)
    words = [base().tokenizer.decode(tokens[begin:end]) for begin, end in ((0, 1), (2, 4), (4, 7))]
    return {"bad_words": [word for word in words if word.strip()]}


def sequences(params: SamplingParams) -> list[tuple[int, ...]]:
    words = words_of(params, target())
    assert words is not None
    single = [(token,) for token in (~words.allowed([])).nonzero()[:, 0].tolist()]
    return [*single, *words._sequences]


def written(sequence: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[at : at + len(sequence)]) == sequence for at in range(len(tokens)))


@pytest.mark.parametrize("config", METHODS, ids=lambda each: "-".join(map(str, each.values())))
def test_greedy_text_without_words_is_that_of_plain_decoding(config):
    llm, length = with_config(config), 24
    params = [SamplingParams(max_tokens=length, ignore_eos=True, **without(text)) for text in TEXTS]
    plain = ids(base().generate(TEXTS, params))
    assert ids(llm.generate(TEXTS, params)) == plain
    for text, each, tokens in zip(TEXTS, params, plain, strict=True):
        assert tokens != greedy(text, length)
        assert not any(written(sequence, tokens) for sequence in sequences(each))
    assert_idle(llm)


@pytest.mark.parametrize("config", METHODS[:3], ids=lambda each: "-".join(map(str, each.values())))
def test_greedy_text_of_allowed_tokens_is_that_of_plain_decoding(config):
    allowed = sorted({token for text in PROMPTS for token in greedy(text, 16)})[::2]
    params = SamplingParams(max_tokens=20, allowed_token_ids=allowed, bad_words=["marbles"])
    plain = ids(base().generate(TEXTS, params))
    assert ids(with_config(config).generate(TEXTS, params)) == plain
    assert {token for tokens in plain for token in tokens} <= set(allowed)


def test_a_rule_that_ignores_the_draft_s_own_tokens_is_detected(monkeypatch):
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **without(text)) for text in TEXTS]
    plain = ids(base().generate(TEXTS, params))
    allowed = Words.allowed
    monkeypatch.setattr(Words, "allowed", lambda words, path: allowed(words, []))
    monkeypatch.setattr(Words, "possible", lambda words, path: True)
    assert ids(with_config(METHODS[1]).generate(TEXTS, params)) != plain


def test_seeded_streams_are_the_same_where_that_is_promised():
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=3, **without(text)) for text in TEXTS]
    assert ids(with_config(METHODS[0]).generate(TEXTS, params)) == ids(base().generate(TEXTS, params))


def test_words_and_a_grammar_hold_together():
    params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["cat", "dog"]})
    (free,) = base().generate(TEXTS[0], params)
    params.bad_words = [free.text]
    held = [llm.generate(TEXTS[0], params)[0] for llm in (base(), with_config(METHODS[1]))]
    assert held[0].token_ids == held[1].token_ids
    assert held[0].text in ("cat", "dog", free.text[:1])  # its first letter, where no other split goes on
    assert not any(written(sequence, held[0].token_ids) for sequence in sequences(params))
    params.allowed_token_ids = [9]
    (nothing,) = base().generate(TEXTS[0], params)
    assert nothing.finish_reason == "error"
    assert "allowed_token_ids forbid all" in (nothing.error or "")


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space():
    tokenizer = target().tokenizer
    found = sequences(SamplingParams(bad_words=["dog"]))
    for text in ("dog", " dog"):
        assert tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) in found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"allowed_token_ids": [8192]}, "allowed_token_ids has 8192"),
        ({"bad_words": [" "], "allowed_token_ids": [5]}, "has no tokens|forbid"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(wrong, message):
    with pytest.raises(ConfigError, match=message):
        base().generate("x", SamplingParams(**wrong))
    assert_idle(base())


def test_nothing_left_to_write_is_refused():
    (token,) = target().tokenizer("x", add_special_tokens=False)["input_ids"]
    with pytest.raises(ConfigError, match="forbid all that allowed_token_ids allow"):
        base().generate("x", SamplingParams(allowed_token_ids=[token], bad_words=["x"]))


@pytest.mark.parametrize("kept", [1, 5, 10**6])
def test_a_prompt_is_cut_at_its_front(kept):
    tokens = prompt_ids(PROMPTS[0])
    params = SamplingParams(max_tokens=8, truncate_prompt_tokens=kept, ignore_eos=True)
    (output,) = base().generate(PROMPTS[0], params)
    assert output.prompt_token_ids == tokens[-kept:]
    assert output.token_ids == greedy(tokens[-kept:], 8)


def test_a_prompt_is_cut_to_leave_space_for_the_answer():
    short = copy.copy(target())
    short.max_length = 64
    params = SamplingParams(max_tokens=4, truncate_prompt_tokens=-1, ignore_eos=True)
    (output,) = with_config(None, target=short).generate([[5] * 500], params)
    assert len(output.prompt_token_ids) == 64 - 4
    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)
