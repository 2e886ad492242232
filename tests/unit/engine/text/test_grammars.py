"""Structured output: texts that fit their grammar, and the distribution of plain decoding under the same
constraint.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from foretoken.core.errors import ConfigError, RequestError
from foretoken.engine.llm import LLM
from foretoken.engine.text.grammars import Grammar, Grammars
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs
from helpers.small_llms import ALTERED, PROMPTS, ids, target, with_config

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ("cat", "cats", "dog", "a dog")
WANTED: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": r"[A-F]{3}-[0-9]{2,4}(é|ü)?"},
    {"choice": CHOICES},
    {"grammar": 'start: "(" (start | /[0-9]+/) ")"'},
]
METHODS = [
    {"method": "none"},
    {"method": "suffix", "num_speculative_tokens": 6},
    {"method": "ngram"},
    {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 4},
    {"method": "draft_model", "model": ALTERED, "tree": "topk", "num_speculative_tokens": 8},
    {"method": "kangaroo", "adapter": "random:1", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 4, "executor": "pearl"},
]


def complete(text: str, wanted: dict[str, Any]) -> bool:
    ((kind, value),) = wanted.items()
    if kind == "json":
        found = json.loads(text)
        return set(found) == {"name", "age"} and 0 <= found["age"] <= 150 and len(found["name"]) <= 12
    if kind == "regex":
        return re.fullmatch(value, text) is not None
    if kind == "choice":
        return text in value
    return re.fullmatch(r"\(+[0-9]+\)+", text) is not None and text.count("(") == text.count(")")


@pytest.fixture(
    scope="module",
    params=METHODS,
    ids=lambda config: f"{config['method']}{config.get('tree', '')}{config.get('executor', '')}",
)
def llm(request: pytest.FixtureRequest) -> LLM:
    return with_config(request.param)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return with_config({"method": "none"})


@pytest.mark.covering(1)
@pytest.mark.parametrize("wanted", WANTED, ids=lambda each: next(iter(each)))
def test_constrained_texts_are_valid_and_equal_plain_decoding(llm: LLM, plain: LLM, wanted: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=60, structured_outputs=wanted)
    outputs = llm.generate(list(PROMPTS), params)
    assert ids(outputs) == ids(plain.generate(list(PROMPTS), params))
    for output in outputs:
        assert output.finish_reason == "length" or complete(output.text, wanted), output.text
    assert any(output.finish_reason == "stop" for output in outputs)


def test_seeded_streams_are_the_same_where_that_is_promised(plain: LLM) -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, structured_outputs=WANTED[seed % 3])
        for seed in range(9)
    ]
    prompts = [PROMPTS[seed % len(PROMPTS)] for seed in range(9)]
    wanted = ids(plain.generate(prompts, params))
    for config in METHODS[1:3]:
        assert ids(with_config(config).generate(prompts, params)) == wanted


def enumerated(llm: LLM, prompt: str) -> dict[str, float]:
    """The distribution of CHOICES under the constraint, token by token, from the model's own log-probabilities."""
    tokenizer, law = llm.tokenizer, Counter[str]()
    (request,) = llm.new_requests(prompt, SamplingParams(structured_outputs={"choice": CHOICES}))
    constraint = request.laws.constraint
    assert constraint is not None

    def walk(path: list[int], mass: float) -> None:
        mask = constraint.allowed(path)
        assert mask is not None
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=1000)
        (output,) = llm.generate([{"prompt_token_ids": [*request.tokens, *path]}], asked)
        assert output.logprobs is not None
        known = dict(output.logprobs[0].top)
        allowed = mask.nonzero()[:, 0].tolist()
        scores = {token: known.get(token, -math.inf) for token in allowed}
        if any(score == -math.inf for score in scores.values()):
            scores = {token: logprob_of(llm, [*request.tokens, *path], token) for token in allowed}
        total = torch.logsumexp(torch.tensor(list(scores.values())), 0).item()
        for token, score in scores.items():
            share = mass * math.exp(score - total)
            if token in request.stop_ids:
                law[tokenizer.decode(path)] += share
            else:
                walk([*path, token], share)

    walk([], 1.0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-4)
    return dict(law)


def logprob_of(llm: LLM, tokens: list[int], token: int) -> float:
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": [*tokens, token]}], asked)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs[-1].logprob


@pytest.mark.parametrize(
    "config",
    [METHODS[3], *(pytest.param(each, marks=pytest.mark.full_product) for each in (METHODS[2], METHODS[4]))],
    ids=lambda config: f"{config['method']}{config.get('tree', '')}",
)
def test_the_distribution_is_the_target_s_under_the_constraint(plain: LLM, config: dict[str, Any]) -> None:
    prompt, count = "My pet is a ", 600  # its distribution is far from even
    law = enumerated(plain, prompt)
    llm = with_config(config, max_num_seqs=60)
    params = SamplingParams(temperature=1.0, structured_outputs={"choice": CHOICES}, n=count)
    found = Counter(each.text for each in llm.generate([prompt], params)[0].outputs)
    likely = [text for text in law if law[text] * count > 5]
    assert len(likely) >= 2
    rest = max(0.0, 1 - sum(law[text] for text in likely))
    observed = [found[text] for text in likely] + [sum(found.values()) - sum(found[text] for text in likely)]
    expected = [law[text] * count for text in likely] + [rest * count]
    if expected[-1] < 1:
        observed, expected = observed[:-1], [each * sum(observed[:-1]) / sum(expected[:-1]) for each in expected[:-1]]
    assert chisquare(observed, [each * sum(observed) / sum(expected) for each in expected]).pvalue > 1e-4
    tilted = [each**0.65 for each in expected]  # a slightly flatter distribution is detected
    assert chisquare(observed, [each * sum(observed) / sum(tilted) for each in tilted]).pvalue < 1e-4


def test_forced_tokens_are_drafted_and_stand(plain: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a_rather_long_name": {"type": "boolean"}, "another_long_name": {"type": "boolean"}},
        "required": ["a_rather_long_name", "another_long_name"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, structured_outputs={"json": schema})
    slow = with_config({"method": "suffix", "num_speculative_tokens": 1}).generate([PROMPTS[0]], params)[0]
    (request,) = plain.new_requests(PROMPTS[0], params)
    plain.engine.add(request)
    while not request.finished:
        plain.engine.step()
    metrics = request.metrics
    assert request.output_ids == slow.token_ids
    assert metrics.num_steps < 0.7 * request.num_output
    assert metrics.accepted_by_source.keys() == {"grammar"}
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens  # forced tokens are accepted
    (off,) = plain.new_requests(PROMPTS[0], params, max_draft=0)
    plain.engine.add(off)
    while not off.finished:
        plain.engine.step()
    assert off.metrics.num_steps == off.num_output


def test_a_constraint_at_a_place(plain: LLM) -> None:
    tokenizer = plain.tokenizer
    stop = frozenset(target().end_ids)
    constraint = Grammars(target()).constraint(StructuredOutputs(choice=["ab", "abc"]), stop)
    a, b, c = (tokenizer.encode(each, add_special_tokens=False)[0] for each in "abc")
    end = min(stop)
    start = constraint.allowed([])
    assert start is not None
    assert start[a]
    assert not start[b]
    assert not start[end]
    whole = constraint.allowed([a, b])
    assert whole is not None
    assert whole[c]
    assert whole[end]
    assert whole.sum() == 1 + len(stop)
    assert constraint.allowed([b]) is None
    assert constraint.allowed([a, end]) is None
    assert constraint.possible([a, b, end])
    assert not constraint.possible([a, end])
    assert not constraint.possible([a, b, end, a])
    twin = constraint.copy()
    constraint.append([a, b, c])
    final = constraint.allowed([])
    assert final is not None
    assert set(final.nonzero()[:, 0].tolist()) == stop
    assert constraint.forced(5) == []
    again = twin.allowed([])
    assert again is not None
    assert torch.equal(again, start)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json: .*uniqueItems"),
        ({"json": "{not json"}, "structured_outputs.json"),
        ({"regex": "a("}, "structured_outputs.regex"),
        ({"grammar": "nothing here"}, "structured_outputs.grammar"),
        ({"grammar": 'root ::= "a" | "b"'}, "structured_outputs.grammar: rules are written in Lark's form here"),
    ],
)
def test_unsupported_grammars_are_refused_before_anything_runs(plain: LLM, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plain.generate([PROMPTS[0]], SamplingParams(structured_outputs=wanted))
    assert not plain.engine.busy


@pytest.mark.covering(1)
@pytest.mark.parametrize("ending", ["<[5]>", "<|end|>", "<[5]>?", "<[2-5]>", '"!" <[2,5]>'])
def test_a_grammar_may_end_in_the_models_own_end(llm: LLM, plain: LLM, ending: str) -> None:
    assert 5 in target().end_ids
    params = SamplingParams(max_tokens=8, structured_outputs={"grammar": f'start: "Yes" {ending}'})
    outputs = llm.generate(list(PROMPTS[:2]), params)
    for output in outputs:
        assert (output.finish_reason, output.error) == ("stop", None)
        assert output.text in ("Yes", "Yes!")
    assert ids(outputs) == ids(plain.generate(list(PROMPTS[:2]), params))


def test_an_end_within_a_grammar_does_not_end_half_a_text(plain: LLM) -> None:
    """Where an end is permitted and the text is not whole after it, other tokens are chosen."""
    constraint = Grammars(target()).constraint(
        StructuredOutputs(grammar='start: "Yes" ("!" | <[5]> "No" | <[2]>)'), frozenset(target().end_ids)
    )
    yes, mark = (plain.tokenizer.encode(each, add_special_tokens=False) for each in ("Yes", "!"))
    behind = constraint.allowed(yes)
    assert behind is not None
    assert behind.nonzero()[:, 0].tolist() == sorted([*mark, 2])
    assert constraint.possible([*yes, 2])
    assert not constraint.possible([*yes, 5])


A, B = {"a": {"type": "integer"}}, {"b": {"type": "string"}}


@pytest.mark.parametrize(
    "more",
    [
        {"properties": A, "patternProperties": {"^a": {"type": "string"}}},
        {"properties": A | B, "patternProperties": {"^a$": {"type": "string"}}, "required": ["b"]},
        {"properties": A, "patternProperties": {"": {"maximum": 3}, "^a$": False}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "patternProperties": {"a": {"enum": ["b"]}}},
        {"properties": {"a": {"type": "object", "properties": B, "patternProperties": {"b": {"type": "null"}}}}},
    ],
    ids=["optional", "beside-another", "forbidden", "reference", "nested"],
)
def test_a_pattern_that_contradicts_a_property_is_refused_before_an_answer_begins(
    plain: LLM, more: dict[str, Any]
) -> None:
    schema = {"type": "object", "$defs": {"x": {"type": "integer"}}, "additionalProperties": False, **more}
    with pytest.raises(ConfigError, match="contradicts patternProperties"):
        plain.new_requests(PROMPTS[0], SamplingParams(structured_outputs={"json": schema}))


YES = {"type": "boolean"}
FEW_KEYS: list[dict[str, Any]] = [
    {"properties": {"a": YES}, "patternProperties": {"^a$": {}}, "required": ["a"]},
    {"patternProperties": {"^(a|bc|bd)$": YES}},
    {"properties": {"b": YES}, "patternProperties": {"^a?$": YES}, "required": ["b"]},
    {"properties": {"x": {"type": "object", "patternProperties": {"^(é|ü)$": YES}, "additionalProperties": False}}},
]


@pytest.mark.parametrize("more", FEW_KEYS, ids=range(len(FEW_KEYS)))
def test_where_no_key_is_left_an_object_ends(plain: LLM, more: dict[str, Any]) -> None:
    """A writer that goes on wherever it may: no object closes while a comma or a key is possible."""
    schema = {"type": "object", "additionalProperties": False, **more}
    constraint = Grammars(target()).constraint(StructuredOutputs(json=schema), frozenset(target().end_ids))
    closing = torch.tensor(["}" in plain.tokenizer.decode([each]) for each in range(target().vocab_size)])
    for seed in range(5):
        own, text, chance = constraint.copy(), list[int](), torch.Generator().manual_seed(seed)
        while not bool((mask := allowed(own))[min(target().end_ids)]):
            among = mask & ~closing if bool((mask & ~closing).any()) else mask
            choices = among.nonzero()[:, 0]
            assert len(choices), plain.tokenizer.decode(text)
            text.append(int(choices[torch.randint(len(choices), (1,), generator=chance)]))
            assert own.possible(text[-1:])
            own.append(text[-1:])
        json.loads(plain.tokenizer.decode(text), object_pairs_hook=once)


def allowed(constraint: Grammar) -> torch.Tensor:
    mask = constraint.allowed([])
    assert mask is not None
    return mask


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize("reasoning", [None, "optional", "open"])
def test_no_key_is_given_twice(plain: LLM, reasoning: str | None) -> None:
    wanted = StructuredOutputs(json={"type": "object", "additionalProperties": {}}, reasoning=reasoning)
    constraint = Grammars(target()).constraint(wanted, frozenset(target().end_ids))

    def tokens(text: str) -> list[int]:
        return plain.tokenizer.encode(text, add_special_tokens=False)

    def goes(text: str) -> bool:
        """Whether a text may be written, token by token, as by drafts that are looked beyond."""
        path = tokens(text)
        masks = [constraint.allowed(path[:place]) for place in range(len(path))]
        one_by_one = all(mask is not None and bool(mask[token]) for mask, token in zip(masks, path, strict=True))
        assert one_by_one == constraint.possible(path)
        return one_by_one

    begun = {None: "", "optional": '<think>{"a": 1, "a": 2}</think>', "open": '"a" {</think>'}[reasoning]
    assert goes(begun + '{"a": 1, "b": {"a": [{"a": 2}, {"a": "\\"a\\": 1, \\"a\\": 2"}]}, "ab": 3}')
    assert not goes(begun + '{"a": 1, "a": 2}')
    assert not goes(begun + '{"b": 1, "a": [{"c": {}, "c": 1')
    assert not goes(begun + '{"a": 1, "\\u0061": 2}')
    if reasoning == "optional":
        assert goes('{"a": 1, "b": 2}')
        assert not goes('{"a": 1, "a": 2}')
    constraint.append(tokens(begun + '{"a": 1, '))
    assert goes('"b": 2}')
    assert not constraint.copy().possible(tokens('"a": 2}'))


def test_space_before_an_answer_that_may_be_reasoned_is_bounded(plain: LLM) -> None:
    wanted = StructuredOutputs(json_object=True, reasoning="optional")
    constraint = Grammars(target()).constraint(wanted, frozenset(target().end_ids))
    space = plain.tokenizer.encode("\n", add_special_tokens=False)
    assert constraint.possible(space * 2)
    assert not constraint.possible(space * 5)


def given_up() -> str:
    """A grammar that compiles, with a parser of more items than llguidance follows after "(b"."""
    many = range(2100)
    ways = "\n".join(f'w{place}: "c" /[0-9]+/' for place in many)
    return 'start: "a" "(" "b" wide\nwide: ' + " | ".join(f"w{place}" for place in many) + "\n" + ways


def test_a_grammar_that_is_given_up_on_the_way_ends_the_request(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=8, structured_outputs={"grammar": given_up()})
    sampled, free = replace(greedy, temperature=1.0, seed=3), SamplingParams(max_tokens=8)
    *failed, fine = llm.generate(list(PROMPTS[:3]), [greedy, sampled, free])
    for output in failed:
        assert output.finish_reason == "error"
        assert "structured_outputs: llguidance gave up" in str(output.error)
        assert "a(b".startswith(output.text)
    assert fine.finish_reason in ("length", "stop")


def test_giving_up_within_a_draft_allows_no_free_text_after_it(plain: LLM) -> None:
    constraint = Grammars(target()).constraint(StructuredOutputs(grammar=given_up()), frozenset(target().end_ids))
    a, bracket, b = (plain.tokenizer.encode(each, add_special_tokens=False)[0] for each in "a(b")
    constraint.append([a])
    with pytest.raises(RequestError, match="gave up"):
        constraint.allowed([bracket, b])
    constraint.append([bracket, b])
    with pytest.raises(RequestError, match="gave up"):
        constraint.allowed([])
    assert not constraint.possible([a])
    assert constraint.forced(3) == []


def test_nothing_is_allowed_after_impossible_tokens() -> None:
    """Of a draft that is looked beyond: a copy that has read it permits nothing, the text goes on."""
    own = Grammars(target()).constraint(StructuredOutputs(choice=("cats", "dogs")), frozenset({2}))
    beyond = own.copy()
    beyond.append(target().tokenizer("zebra")["input_ids"])
    for lost in (beyond, beyond.copy()):
        assert (lost.allowed([]), lost.possible([]), lost.forced(9)) == (None, False, [])
    assert own.allowed([]) is not None
    assert own.possible([])
