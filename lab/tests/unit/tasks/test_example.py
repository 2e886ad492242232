"""What all generated tasks share: they repeat themselves exactly for a seed, and their halves never meet."""

from __future__ import annotations

from itertools import islice

import pytest

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks import arithmetic, forms, keys, profiles
from foretoken_lab.tasks.example import split_of

GENERATORS = {
    "arithmetic": arithmetic.examples,
    "profiles": profiles.examples,
    "keys": keys.examples,
    "json": forms.json_examples,
    "code": forms.code_examples,
}


@pytest.fixture(params=GENERATORS, ids=list(GENERATORS))
def generator(request):
    return GENERATORS[request.param]


def take(generator, split, seed, count):
    return list(islice(generator(split, seed), count))


def test_a_seed_gives_the_same_examples_and_another_seed_others(generator):
    assert take(generator, "train", 3, 50) == take(generator, "train", 3, 50)
    assert take(generator, "train", 3, 50) != take(generator, "train", 4, 50)


def test_no_prompt_is_in_both_halves(generator):
    train = {example.prompt for seed in (1, 2) for example in take(generator, "train", seed, 1500)}
    heldout = {example.prompt for seed in (1, 2, 20) for example in take(generator, "heldout", seed, 150)}
    assert len(heldout) >= 100  # enough different ones to evaluate with
    assert not train & heldout


def test_equal_ids_mean_equal_prompts(generator):
    examples = take(generator, "train", 5, 1000)
    prompt_of = {example.id: example.prompt for example in examples}
    assert all(prompt_of[example.id] == example.prompt for example in examples)


def test_a_response_ends_with_its_answer(generator):
    assert all(example.response.rstrip(".").endswith(example.answer) for example in take(generator, "train", 6, 300))


def test_about_one_prompt_in_ten_is_held_out():
    held_out = sum(split_of(f"prompt {number}") == "heldout" for number in range(5000))
    assert 0.08 < held_out / 5000 < 0.12


def test_an_unknown_split_is_refused(generator):
    with pytest.raises(ConfigError, match="split='test'"):
        generator("test", 1)
