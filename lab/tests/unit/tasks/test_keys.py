"""Hidden keys: of the requested length, at every depth, and with one answer."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from foretoken import zoo
from foretoken.core.errors import ConfigError
from foretoken_lab.tasks import keys


def take(number, **options):
    return list(islice(keys.examples("train", 2, **options), number))


@pytest.mark.parametrize("length", [600, 3000])
def test_prompts_have_the_requested_length_and_are_never_longer(length):
    lengths = [len(each.prompt) for each in take(50, length=length)]
    assert max(lengths) <= length
    assert min(lengths) > length - 150  # a sentence at most is missing


def test_length_can_be_counted_in_tokens():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(zoo.path("zoo:draft") / "tokenizer.json"))
    count = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    lengths = [count(each.prompt) for each in take(20, length=300, count=count)]
    assert max(lengths) <= 300
    assert min(lengths) > 250


def test_the_question_has_one_answer_among_several_keys():
    for each in take(100, num_keys=5):
        owner = re.search(r"Question: What is the secret number of (\w+)\?$", each.prompt)[1]
        found = re.findall(r"The secret number of (\w+) is (\d{5})\.", each.prompt)
        assert len(found) == len(dict(found)) == len({number for _, number in found}) == 5
        assert dict(found)[owner] == each.answer


def test_depths_are_where_the_key_stands_and_spread_evenly():
    examples = take(400)
    for each in examples:
        document = each.prompt.partition("\n\n")[0]
        line = document.index(re.search(rf"The secret number of \w+ is {each.answer}", document)[0])
        assert abs(line / len(document) - each.depth) < 0.05
    for category in keys.CATEGORIES:
        assert 70 < sum(each.category == category for each in examples) < 130
    assert all(each.depth < 0.25 for each in examples if each.category == "depth_0-25")


def test_filler_of_our_own_is_split_so_that_keys_can_stand_in_it():
    paragraph = "One sentence here. Another one there! A third? " * 5
    for each in take(20, filler=lambda rng: paragraph):
        assert (
            "Another one there! The secret" in each.prompt
            or "here. The secret" in each.prompt
            or ("third? The secret" in each.prompt or each.prompt.startswith("The secret"))
        )
    assert max(each.depth for each in take(200, filler=lambda rng: paragraph)) > 0.9


def test_a_context_too_short_is_refused():
    with pytest.raises(ConfigError, match="length=100 tokens are too short for 4 keys"):
        keys.examples("train", 1, length=100)
    with pytest.raises(ConfigError, match="num_keys=0"):
        keys.examples("train", 1, num_keys=0)
