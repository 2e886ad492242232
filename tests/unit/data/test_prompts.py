"""Prompt files: their fields, and the refusal of a bad file with the number of its line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter

import pytest

from foretoken.bench.harness import Plan
from foretoken.core.errors import InputError
from foretoken.data.prompts import BUNDLED_SUITE, NO_CATEGORY, Prompt, filled_up, limit_per_category, read_prompts
from foretoken.options.sampling import SamplingParams


def write(tmp_path, *lines, name="p.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_both_formats_blank_lines_and_a_byte_order_mark(tmp_path):
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"prompt": "one"}',
        "",
        '{"question_id": 81, "category": "qa", "turns": ["zw\u00f6lf", "later"]}',
        '{"prompt": "three", "category": null}\r',
    )
    first, second, third = read_prompts(path)
    assert (first.id, first.text, first.category) == ("0", "one", NO_CATEGORY)
    assert (second.id, second.text, second.category) == ("81", "zwölf", "qa")
    assert second.place.startswith(f"{path}:3")
    assert (third.id, third.category) == ("2", NO_CATEGORY)


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files(tmp_path, suffix, opener):
    path = tmp_path / f"p.jsonl{suffix}"
    with opener(path, "wt") as file:
        file.write('{"prompt": "packed"}\n')
    assert read_prompts(path)[0].text == "packed"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(InputError, match="damaged"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not valid JSON"),
        ('{"prompt": "x"', ":2: not valid JSON"),
        ("[" * 100_000, ":2: not valid JSON"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", ":2: not valid JSON"),
        ("[1]", ":2: expected a JSON object, found a list"),
        ("{}", ":2: needs 'prompt' or 'turns'"),
        ('{"text": "x"}', "found 'text'"),
        ('{"prompt": ""}', ":2: field 'prompt' is empty"),
        ('{"prompt": " \\n"}', "field 'prompt' is empty"),
        ('{"prompt": "x", "prompt": "y"}', ":2: has 'prompt' twice: keep one"),
        ('{"prompt": 3}', "field 'prompt' must be a string, not a number"),
        ('{"prompt": null}', "not null"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"turns": []}', "field 'turns' must be a non-empty list"),
        ('{"turns": "x"}', "field 'turns'"),
        ('{"turns": ["x", 1]}', r"field 'turns\[1\]' must be a string"),
        ('{"prompt": "x", "turns": ["x"]}', "both 'prompt' and 'turns'"),
        ('{"prompt": "x", "category": 1}', "field 'category'"),
        (b'{"prompt": "\xff"}', ":2: not UTF-8"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "good"}', line, '{"prompt": "good"}')
    with pytest.raises(InputError, match=message):
        read_prompts(path)


def test_missing_empty_and_malformed_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="folder"):
        read_prompts(tmp_path)
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(write(tmp_path, "", ""))


def test_limit_keeps_the_first_of_every_category(tmp_path):
    lines = [json.dumps({"prompt": str(i), "category": "ab"[i % 2]}) for i in range(6)]
    prompts = read_prompts(write(tmp_path, *lines))
    assert [prompt.text for prompt in limit_per_category(prompts, 2)] == ["0", "1", "2", "3"]
    assert limit_per_category(prompts, None) == prompts


def test_groups_are_filled_up_with_copies_of_their_own_category():
    prompts = [Prompt(str(i), str(i), "abb"[i % 3]) for i in range(9)]  # 3 of a, 6 of b
    assert filled_up(prompts, 1) == filled_up(prompts, 3) == prompts
    filled = filled_up(prompts, 4)
    assert filled[:9] == prompts
    assert [each.id for each in filled[9:]] == ["0", "1", "2"]
    assert len({id(each) for each in filled}) == 12  # a copy is measured as a prompt of its own
    groups = Plan(filled, SamplingParams(), batch_size=4).groups()
    assert [len(group) for group in groups] == [4, 4, 4]
    assert [each.id for each in filled_up(prompts[:1], 3)] == ["0", "0", "0"]


def test_the_bundled_suite():
    prompts = read_prompts(BUNDLED_SUITE)
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("arithmetic", "dialogue", "code", "passage", "chat"), 6
    )
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)


def test_a_request_has_a_conversation_and_params_of_its_own(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines = [
        {"messages": talk, "max_tokens": 3, "logit_bias": {"5": 1.5}},
        {"prompt": "d", "reference": "what it should say"},
    ]
    path = write(tmp_path, *map(json.dumps, lines))
    first, second = read_prompts(path, requests=True)
    assert (first.text, list(first.messages), first.params) == ("c", talk, {"max_tokens": 3, "logit_bias": {5: 1.5}})
    assert (second.text, second.messages, second.params) == ("d", (), {})
    with pytest.raises(InputError, match="'messages' works only in 'foretoken generate --prompts'"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "x"}, "needs 'prompt', 'messages' or 'turns'"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias has the key 'a'"),
        ({"prompt": "x", "max_tokns": 3}, "unknown field 'max_tokns': did you mean 'max_tokens'"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0 must be an integer"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "has both 'prompt' and 'messages'"),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": ["hello"]}, r"'messages\[0\]' must be an object"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\]': 'content' must be a string"),
    ],
)
def test_what_a_request_may_not_say(tmp_path, record, message):
    with pytest.raises(InputError, match=message):
        read_prompts(write(tmp_path, json.dumps(record)), requests=True)


def test_a_measurement_runs_all_prompts_alike(tmp_path):
    path = write(tmp_path, '{"prompt": "x", "max_tokens": 3}')
    with pytest.raises(InputError, match="here prompts share parameters"):
        read_prompts(path)


def test_a_suite_may_say_more_of_its_records(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path, json.dumps({"set": "spec_bench", "subcategory": "qa", "turns": ["a"], "messages": talk}))
    (prompt,) = read_prompts(path)
    assert (prompt.text, prompt.messages, prompt.params) == ("a", (), {})
    with pytest.raises(InputError, match=r"unknown field 'set': .*'metadata'"):
        read_prompts(write(tmp_path, '{"prompt": "x", "set": "a"}'), requests=True)
