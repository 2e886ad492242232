"""``LLM``: exactness, isolation of requests, and no state left after any call."""

from __future__ import annotations

import copy
import random
from functools import cache
from time import perf_counter, sleep
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import AsyncLLM, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.models.language_model import Output
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from helpers.drafters import Crashing
from helpers.small_llms import (
    ALTERED,
    PROMPTS,
    altered,
    assert_idle,
    base,
    greedy,
    ids,
    prompt_ids,
    target,
    truth,
    with_config,
    with_drafter,
)

DRAFT = {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 4}
VOCAB = 8192


def plan(max_tokens: int = 20, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


class Wrapped:
    """The target, counted, and poisoned in one slot from a step on."""

    def __init__(self, llm: LLM, poison: int = -1, value: float = float("nan"), after: int = 0) -> None:
        self.inner = llm.engine.target
        self.rows: list[int] = []
        self.poison, self.value, self.after = poison, value, after
        llm.engine.target = self

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, batch, compute_plan, **options):
        output = self.inner.forward(batch, compute_plan, **options)
        self.rows.append(len(batch))
        logits = output.logits_MV.clone()
        if len(self.rows) > self.after:
            poisoned = {
                row
                for segment in batch.segments
                if segment.slot == self.poison
                for row in range(segment.start, segment.start + segment.num_rows)
            }
            for index, row in enumerate(batch.wanted):
                if row in poisoned:
                    logits[index, 17] = self.value
        return Output.of(logits, top=len(output.top_ids) // max(1, len(output.best)))


def text_of(tokens: list[int]) -> str:
    return base().tokenizer.decode(tokens, skip_special_tokens=True)


@cache
def library():
    return AutoModelForCausalLM.from_pretrained(zoo.path("draft"), dtype=torch.float32)


def library_logits(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return library()(torch.tensor([tokens])).logits[0]


# ---------------------------------------------------------------- prompts and calls


def test_a_prompt_may_come_in_every_form():
    text = PROMPTS[3]
    tokens = prompt_ids(text)
    forms = [text, {"prompt": text}, {"prompt_token_ids": tokens}, tokens]
    expected = greedy(text, 20)
    for form in forms:
        (output,) = base().generate(form, plan())
        assert (output.token_ids, output.prompt_token_ids) == (expected, tokens)
    assert ids(base().generate(forms, plan())) == [expected] * 4
    assert ids(base().generate(tuple(forms), plan())) == [expected] * 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 is empty"),
        ([], "there are no prompts"),
        ([[]], "prompt 0 is empty"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
        ({"text": "x"}, r"has keys \['text'\]"),
        (5, "must be a string"),
        (None, "must be a string"),
        ([None], "must be a string or a list of token ids"),
        ([1.5], "must be a string or a list of token ids"),
        ({"prompt": 5}, "must be a string or a list of token ids"),
        ([1, -1], "token id -1"),
        ([VOCAB], f"token id {VOCAB}: the vocabulary has {VOCAB} entries"),
        (["fine", [3, VOCAB + 7]], "prompt 1 has token id"),
        ([5] * 4096, "has 4096 tokens, and this model's maximum context length is 4096"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_before_anything_runs(prompt, message):
    with pytest.raises(InputError, match=message):
        base().generate(prompt, plan())
    with pytest.raises(InputError):
        next(iter(base().stream(prompt, plan())))
    assert_idle(base())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([plan(), plan()], "2 sampling params for 1 prompts"),
        ([5], "params must be SamplingParams, not int"),
        ({"max_tokens": 5}, "params must be SamplingParams or a list"),
        ("greedy", "params must be SamplingParams or a list"),
        (5, "params must be SamplingParams or a list"),
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids has 8192"),
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias has 8192"),
    ],
)
def test_params_that_do_not_fit_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        base().generate("x", params)
    assert_idle(base())


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 0}, {"max_rows_per_step": 0}, {"threads": 0}, {"max_num_seqs": 1.5}]
)
def test_limits_of_the_engine_are_positive_integers(options):
    with pytest.raises(ConfigError, match=r"must be an integer between 1 and \d+"):
        LLM("zoo:base", **options)


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_rows_per_step": True}])
def test_limits_over_a_loaded_target_are_positive_integers_too(options):
    with pytest.raises(ConfigError, match=r"must be an integer between 1 and \d+"):
        LLM.from_target(target(), **options)


@pytest.mark.parametrize("name", ["seed", "prefix_cache_bytes"])
def test_numbers_of_63_bits_are_the_largest(name):
    LLM.from_target(target(), **{name: 2**63 - 1})
    with pytest.raises(ConfigError, match=r"and 2\*\*63 - 1"):
        LLM.from_target(target(), **{name: 2**63})


def test_a_recipe_over_a_loaded_target_shares_its_weights_and_nothing_else():
    llm = LLM.from_target(target(), speculative_config={"method": "ngram"}, max_num_seqs=2, seed=0)
    assert llm.target is target()
    assert (llm.tokenizer, llm.get_tokenizer()) == (target().tokenizer, target().tokenizer)
    assert llm.engine.cache is not base().engine.cache
    assert ids(llm.generate(PROMPTS, plan(20))) == [greedy(prompt)[:20] for prompt in PROMPTS]
    sampled = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    seeded = [LLM.from_target(target(), seed=5).generate(PROMPTS[0], sampled) for _ in range(2)]
    assert ids(seeded[0]) == ids(seeded[1])  # the seed of the constructor is that of requests without one
    assert_idle(llm)


def test_another_recipe_over_the_same_target_changes_nothing_else():
    options = {"max_num_seqs": 3, "max_rows_per_step": 40, "seed": 5}
    llm = LLM.from_target(target(), default_params=plan(6, temperature=1.0), **options)
    other = llm.with_method({"method": "ngram"})
    assert other.recipe.method == "ngram"
    assert (other.target, other.default_params) == (llm.target, llm.default_params)
    assert (other.max_num_seqs, other.max_rows_per_step, other.engine.prefixes) == (3, 40, None)
    assert ids(other.generate(PROMPTS[3])) == ids(llm.generate(PROMPTS[3]))  # the same seed, and the rule is `match`
    few = LLM.from_target(target(), enable_prefix_caching=True, prefix_cache_bytes=1)
    for found in (few, few.with_method(None)):
        assert found.engine.prefixes is not None
        assert found.engine.cache.max_slots == found.max_num_seqs  # so few bytes are no further slots
    many = LLM.from_target(target(), enable_prefix_caching=True)
    assert many.with_method(None).engine.cache.max_slots == many.engine.cache.max_slots


@pytest.mark.parametrize("name", ["enable_prefix_caching", "trust_remote_code"])
def test_a_switch_is_on_or_off(name):
    with pytest.raises(ConfigError, match=f"{name}='yes' must be true or false"):
        LLM("zoo:base", speculative_config=None, **{name: "yes"})


def test_closing_cancels_running_and_waiting_requests_and_ends_workers():
    class Closing(stubs.Stub):
        closed = 0

        def close(self):
            self.closed += 1

    with with_drafter(Closing(), max_num_seqs=1) as llm:
        streams = [llm.stream(prompt, plan(40)) for prompt in PROMPTS[:2]]
        next(streams[0])
        llm.engine.executor = executor = Closing()  # type: ignore[assignment]
    assert_idle(llm)
    assert (llm.recipe.drafter.closed, executor.closed) == (1, 1)
    assert [chunk.output.finish_reason for chunk in streams[0]] == ["cancelled"]


def test_two_names_of_the_params_are_one_too_many():
    assert ids(base().generate("Once", sampling_params=plan(3))) == [greedy("Once", 3)]
    with pytest.raises(ConfigError, match="both params and sampling_params"):
        base().generate("Once", plan(3), sampling_params=plan(3))


def test_a_chat_reports_its_progress():
    told = []
    outputs = base().chat([{"role": "user", "content": "x"}], plan(2), progress=told.append)
    assert told == outputs


def test_a_requested_length_is_drafted_at_any_cost():
    """Without a choice nothing is measured, and every request shows the drafter the target's states."""
    llm = with_config({"method": "kangaroo", "adapter": "random:1", "num_speculative_tokens": 3})
    controller = llm.engine.controller
    controller.measure = lambda **times: pytest.fail("measured")
    controller.hopeless = lambda request, running: pytest.fail("weighed")
    assert ids(llm.generate(PROMPTS[0], plan(8))) == [greedy(PROMPTS[0], 8)]


def test_requests_that_are_driven_by_hand_are_those_of_generate():
    llm = LLM.from_target(target(), seed=0)
    first, second = llm.new_requests(PROMPTS[0], SamplingParams(n=2, max_tokens=4, temperature=1.0, seed=3))
    for request in (first, second):
        llm.engine.add(request)
    while not (first.finished and second.finished):
        llm.engine.step()
    (output,) = base().generate(PROMPTS[0], SamplingParams(n=2, max_tokens=4, temperature=1.0, seed=3))
    assert [first.output_ids, second.output_ids] == [each.token_ids for each in output.outputs]
    found, named = llm.output_of([first, second]), llm.output_of([first, second], "as it was asked")
    assert (found.prompt, named.prompt) == (output.prompt, "as it was asked")
    assert [each.text for each in named.outputs] == [each.text for each in output.outputs]
    with pytest.raises(InputError, match="prompt 0 is empty"):
        llm.new_requests("")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        llm.new_requests("x", SamplingParams(stop_token_ids=[VOCAB]))
    assert_idle(llm)


def test_outputs_come_in_order_with_params_of_their_own():
    lengths = [5, 1, 12, 3, 7]
    finished = []
    outputs = base().generate(PROMPTS, [plan(length) for length in lengths], progress=finished.append)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.finish_reason for output in outputs] == ["length"] * 5
    assert [output.text for output in outputs] == [text_of(output.token_ids) for output in outputs]
    assert sorted(len(output.token_ids) for output in finished) == sorted(lengths)
    assert [len(output.token_ids) for output in finished] == sorted(lengths)


def test_without_params_the_defaults_hold():
    (output,) = base().generate(PROMPTS[0])
    assert output.token_ids == greedy(PROMPTS[0], 128, ignore_eos=False)
    assert output.promise == "same text"


def test_natural_ends_stop():
    (output,) = base().chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(max_tokens=400))
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in target().end_ids
    assert output.text == text_of(output.token_ids[:-1])


# ---------------------------------------------------------------- chat and streams


def test_chat_is_generate_after_the_template():
    messages = [{"role": "user", "content": "How many days are in a week?"}]
    prompt = base().chat_prompt(messages)
    assert base().chat(messages, plan())[0].token_ids == greedy(prompt["prompt_token_ids"], 20)
    assert ids(base().chat([messages, messages], plan())) == [greedy(prompt["prompt_token_ids"], 20)] * 2
    streamed = [token for chunk in base().stream_chat(messages, plan()) for token in chunk.token_ids]
    assert streamed == greedy(prompt["prompt_token_ids"], 20)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no prompts"),
        ([[]], "the conversation is empty"),
        ([{"role": "user"}], "message 0 needs a string 'content'"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], "message 1 needs a string 'role'"),
        ([{"role": "user", "content": []}], "message 0 needs a string 'content', or a list"),
        ([{"role": "usr", "content": "x"}], "message 0 has the role 'usr': did you mean 'user'"),
        (
            [{"role": "user", "content": "x", "names": "Ann"}],
            "message 0 has the key 'names', which .* not read: did you mean 'name'",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "knows no tools: write them as text"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_refused(messages, message):
    with pytest.raises(InputError, match=message):
        base().chat(messages)


def test_roles_and_keys_are_those_of_openai_and_of_the_template():
    said = {"role": "user", "content": "Hi"}
    wanted = base().chat_prompt([{"role": "system", "content": "Be brief."}, said])
    assert base().chat_prompt([{"role": "developer", "content": "Be brief."}, said]) == wanted
    assert base().chat_prompt([{**said, "name": "Ann", "cache_control": {}, "nothing": None}]) == base().chat_prompt(
        [said]
    )
    template = "{% for m in messages %}{{ m.role }}{% if m.role == 'ipython' %}{{ m.weight }}{% endif %},{% endfor %}"
    roles = ["developer", "user", "assistant", "tool", "ipython"]
    odd = [{"role": role, "content": "", **({"weight": 7} if role == "ipython" else {})} for role in roles]
    ids = base().chat_prompt(odd, chat_template=template)["prompt_token_ids"]
    assert base().get_tokenizer().decode(ids) == "system,user,assistant,tool,ipython7,"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LLM(), r"^LLM: missing a required argument: 'model'; write LLM\(model, NAME=VALUE, …\)"),
        (lambda: LLM("zoo:base", "float32"), r"^LLM: too many positional arguments; write LLM\(model, NAME=VALUE, …\)"),
        (lambda: AsyncLLM(), r"^AsyncLLM: missing .*'model'"),
        (
            lambda: base().generate(),
            r"^LLM.generate: missing .*'prompts'; write LLM.generate\(prompts, NAME=VALUE, …\)",
        ),
        (lambda: LLM.from_target(), r"^LLM.from_target: missing .*'target'"),
        (lambda: SamplingParams(0.7), r"^SamplingParams: too many .*; write SamplingParams\(NAME=VALUE, …\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", [None, {"method": "suffix"}, DRAFT], ids=["none", "suffix", "draft"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_a_stream_adds_up_to_the_output(config, prompt):
    llm = with_config(config)
    chunks = list(llm.stream(prompt, plan(30)))
    last = chunks[-1]
    assert last.finished
    assert not any(chunk.finished for chunk in chunks[:-1])
    assert [token for chunk in chunks for token in chunk.token_ids] == last.output.token_ids == greedy(prompt, 30)
    assert "".join(chunk.text for chunk in chunks) == last.output.text
    assert last.output.text == llm.generate(prompt, plan(30))[0].text
    assert all(chunk.token_ids for chunk in chunks)
    assert_idle(llm)


@pytest.mark.parametrize("stop", ["marbles", " he", "12"])
def test_a_stream_with_a_stop_string_never_shows_it(stop):
    llm = with_drafter(stubs.Oracle(truth()), num_nodes=7)
    chunks = list(llm.stream(PROMPTS[0], plan(48, stop=stop)))
    (whole,) = base().generate(PROMPTS[0], plan(48, stop=stop))
    text = "".join(chunk.text for chunk in chunks)
    assert stop not in text
    assert (text, chunks[-1].output.token_ids) == (whole.text, whole.token_ids)
    assert chunks[-1].output.finish_reason == whole.finish_reason
    if whole.finish_reason == "stop":
        assert greedy(PROMPTS[0], 48)[: len(whole.token_ids)] == whole.token_ids


def test_a_stream_reports_the_progress_of_its_prompt():
    llm, told = with_config(None, max_num_seqs=1, max_rows_per_step=16), []
    chunks = [*llm.stream([5] * 40, plan(3), on_prefill=lambda *rows: told.append(rows))]
    assert told == [(16, 40), (32, 40)]  # the third step gives the first token
    assert [token for chunk in chunks for token in chunk.token_ids] == greedy([5] * 40, 3)


def test_a_prompt_s_text_shows_its_special_tokens():
    tokens = [*base().tokenizer.all_special_ids[:1], *prompt_ids("Once")]
    (output,) = base().generate([tokens], plan(1))
    assert output.prompt == base().tokenizer.decode(tokens)
    assert output.prompt.startswith(base().tokenizer.all_special_tokens[0])


def test_streaming_several_completions_is_refused():
    with pytest.raises(ConfigError, match="n=2"):
        base().stream("x", SamplingParams(n=2))


def test_two_streams_and_a_generate_share_the_engine():
    llm = with_config({"method": "ngram"})
    short, long = llm.stream(PROMPTS[0], plan(6)), llm.stream(PROMPTS[1], plan(30))
    got_short, got_long = list(next(short).token_ids), list(next(long).token_ids)
    finished = []
    (between,) = llm.generate(PROMPTS[2], plan(10), progress=finished.append)
    assert finished == [between]
    got_long += [token for chunk in long for token in chunk.token_ids]
    rest = list(short)  # ended long ago, by the steps of the others; nothing may be lost
    got_short += [token for chunk in rest for token in chunk.token_ids]
    assert rest[-1].finished
    assert (got_short, got_long) == (greedy(PROMPTS[0], 6), greedy(PROMPTS[1], 30))
    assert between.token_ids == greedy(PROMPTS[2], 10)
    assert_idle(llm)


def test_generate_waits_for_its_own_requests_only():
    llm = with_config(None)
    stream = llm.stream(PROMPTS[0], plan(200))
    next(stream)
    llm.generate(PROMPTS[1], plan(3))
    assert llm.engine.busy
    stream.close()
    assert_idle(llm)


# ---------------------------------------------------------------- ends in the middle


@pytest.mark.parametrize("config", [None, DRAFT, {"method": "suffix"}], ids=["none", "draft", "suffix"])
def test_closing_a_stream_cancels_its_request(config):
    llm = with_config(config)
    stream = llm.stream(PROMPTS[0], plan(100))
    next(stream)
    next(stream)
    stream.close()
    assert_idle(llm)
    assert ids(llm.generate(PROMPTS[0], plan())) == [greedy(PROMPTS[0], 20)]


def test_a_stream_that_was_never_read_leaves_nothing():
    llm = with_config(None)
    llm.stream(PROMPTS[0], plan(100)).close()
    assert_idle(llm)


def test_cancelling_from_outside_keeps_generated_tokens():
    llm = with_config(DRAFT)
    stream = llm.stream(PROMPTS[0], plan(100))
    got = list(next(stream).token_ids)
    (request,) = llm.engine.scheduler.running
    llm.engine.cancel(request)
    llm.engine.cancel(request)
    chunks = list(stream)
    assert [chunk.output.finish_reason for chunk in chunks] == ["cancelled"]
    assert chunks[0].output.token_ids == got == greedy(PROMPTS[0], 100)[: len(got)]
    assert_idle(llm)


def test_requests_cancelled_while_others_run_and_wait():
    llm = with_config(None, max_num_seqs=2)

    def cancel_all_others(output):
        llm.close()

    outputs = llm.generate(PROMPTS, [plan(4), *[plan(30)] * 4], progress=cancel_all_others)
    assert [output.finish_reason for output in outputs] == ["length", *["cancelled"] * 4]
    assert outputs[1].token_ids == greedy(PROMPTS[1], 30)[: len(outputs[1].token_ids)]
    assert [output.token_ids for output in outputs[2:]] == [[], [], []]
    assert_idle(llm)


@pytest.mark.parametrize("config", [None, DRAFT, {"method": "ngram"}], ids=["none", "draft", "ngram"])
def test_an_interrupt_in_a_progress_callback_leaves_the_engine_clean(config):
    llm = with_config(config, max_num_seqs=3)

    def interrupt(output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [plan(3), *[plan(30)] * 4], progress=interrupt)
    assert_idle(llm)
    assert ids(llm.generate(PROMPTS, plan())) == [greedy(prompt, 20) for prompt in PROMPTS]


def test_an_interrupt_returns_generated_tokens():
    llm = with_config(None, max_num_seqs=3)
    seen = []

    def interrupt_once(output):
        seen.append(output)
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [plan(3), *[plan(30)] * 4], progress=interrupt_once)
    assert [output.finish_reason for output in seen] == ["length", "cancelled", "cancelled"]
    for output, prompt in zip(seen, PROMPTS, strict=False):
        assert output.token_ids == greedy(prompt, 30)[: len(output.token_ids)]
        assert output.token_ids


@pytest.mark.parametrize("when", ["forward", "observe"])
def test_an_interrupt_inside_a_step_leaves_the_engine_clean(when):
    """In `observe`, requests have already ended but not yet left: the narrowest place."""
    drafter = stubs.Recorder(stubs.Oracle(truth()))
    llm = with_drafter(drafter)
    calls = 0

    def interrupt(*args, **options):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    if when == "forward":
        original, llm.engine.target = llm.engine.target.forward, SimpleNamespace(forward=interrupt, vocab_size=VOCAB)
    else:
        original, drafter.observe = drafter.observe, interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [plan(12)] * 5)
    assert_idle(llm)
    assert set(drafter.released.values()) == {1}
    if when == "forward":
        llm.engine.target = target()
    assert ids(llm.generate(PROMPTS, plan())) == [greedy(prompt, 20) for prompt in PROMPTS]


def short_target(limit: int):
    """The same target serving shorter sequences."""
    twin = copy.copy(target())
    twin.max_length = limit
    return twin


def test_the_context_limit_ends_with_length():
    for config in (None, {**DRAFT, "tree": "topk", "num_speculative_tokens": 12}, {"method": "suffix"}):
        llm = with_config(config, target=short_target(80))
        tokens = (prompt_ids(PROMPTS[2]) * 9)[: 80 - 6]
        outputs = llm.generate([tokens, PROMPTS[0]], plan(40))
        assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(6, "length"), (40, "length")]
        assert outputs[0].token_ids == greedy(tokens, 6)
        assert outputs[1].token_ids == greedy(PROMPTS[0], 40)
        assert_idle(llm)


def test_a_wide_tree_fits_at_the_context_limit():
    """The rows of a tree are more than its depth: the cache, not the depth, is the limit."""
    drafter = stubs.Recorder(stubs.Random(VOCAB, tree=True, full=True))
    llm = with_drafter(drafter, num_nodes=32, target=short_target(80))
    tokens = (prompt_ids(PROMPTS[1]) * 9)[: 80 - 9]
    assert ids(llm.generate([tokens], plan(40))) == [greedy(tokens, 9)]
    for _, committed, budget, draft in drafter.proposed:
        assert len(committed) + len(draft) <= 80
        assert len(draft) == budget.max_nodes <= 32


# ---------------------------------------------------------------- sampling parameters


def test_completions_of_one_prompt_differ_and_are_reproducible():
    params = plan(16, temperature=1.0, n=4, seed=5)
    one, two = base().generate([PROMPTS[3]], params)[0], base().generate([PROMPTS[3]], params)[0]
    texts = [tuple(each.token_ids) for each in one.outputs]
    assert len(set(texts)) == 4
    assert [tuple(each.token_ids) for each in two.outputs] == texts
    (alone,) = base().generate([PROMPTS[3]], plan(16, temperature=1.0, seed=5))
    assert tuple(alone.token_ids) == texts[0]


def test_progress_comes_once_per_prompt_even_if_completions_end_together():
    finished = []
    base().generate(PROMPTS[:2], plan(4, n=3), progress=finished.append)
    assert len(finished) == 2
    assert all(len(output.outputs) == 3 for output in finished)


def test_requests_without_a_seed_get_different_ones_and_the_engine_s_seed_fixes_them():
    def run(seed):
        llm = with_config(None, seed=seed)
        return ids(llm.generate([PROMPTS[3]] * 3, plan(12, temperature=1.0)))

    assert run(1) == run(1) != run(2)
    assert len({tuple(tokens) for tokens in run(1)}) == 3
    assert run(None) != run(None)


def test_logprobs_are_the_library_s():
    (output,) = base().generate(
        PROMPTS[0], plan(12, logprobs=5, temperature=0.9, seed=3, top_p=0.7, logit_bias={9: 3.0})
    )
    tokens = prompt_ids(PROMPTS[0])
    logp = torch.log_softmax(library_logits(tokens + output.token_ids)[len(tokens) - 1 : -1], dim=-1)
    assert output.logprobs is not None
    assert len(output.logprobs) == 12
    for row, (token, given) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert given.token_id == token
        assert given.logprob == pytest.approx(float(logp[row, token]), abs=1e-4)
        values, indices = logp[row].topk(5)
        assert [i for i, _ in given.top] == indices.tolist()
        assert [v for _, v in given.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("asked", "width"), [(None, None), (0, 0), (3, 3)])
def test_logprobs_have_one_entry_per_token(asked, width):
    llm = with_drafter(stubs.Oracle(truth()))
    (output,) = llm.generate(PROMPTS[0], plan(11, logprobs=asked))
    if asked is None:
        assert output.logprobs is None
    else:
        assert output.logprobs is not None
        assert [len(each.top) for each in output.logprobs] == [width] * 11
        assert [each.token_id for each in output.logprobs] == output.token_ids


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config", [None, {"method": "ngram", "num_speculative_tokens": 5}, DRAFT], ids=["none", "ngram", "draft"]
)
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_penalties_are_those_of_a_plain_loop_over_the_library(config, params):
    expected = penalised(PROMPTS[2], tuple(params.items()))
    assert ids(with_config(config).generate(PROMPTS[2], plan(16, **params))) == [list(expected)]


@cache
def penalised(prompt, items):
    params = dict(items)
    tokens = prompt_ids(prompt)
    output: list[int] = []
    for _ in range(16):
        x = library_logits(tokens + output)[-1].clone()
        rate = params.get("repetition_penalty", 1.0)
        for token in set(tokens + output):
            x[token] = x[token] / rate if x[token] > 0 else x[token] * rate
        for token in set(output):
            x[token] -= params.get("presence_penalty", 0.0) + params.get("frequency_penalty", 0.0) * output.count(token)
        output.append(int(x.argmax()))
    return tuple(output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature):
    forced = plan(5, logit_bias={1234: 1000.0}, temperature=temperature)
    assert ids(base().generate("x", forced)) == [[1234] * 5]
    first = greedy(PROMPTS[0], 1)[0]
    (output,) = base().generate(
        PROMPTS[0], plan(20, logit_bias={first: -float("inf")}, temperature=temperature, seed=1)
    )
    assert first not in output.token_ids


@pytest.mark.parametrize(
    "config", [None, {"method": "ngram"}, DRAFT, {**DRAFT, "tree": "topk"}], ids=["none", "ngram", "chain", "topk"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_is_an_error_of_that_request_alone(config, temperature):
    llm = with_config(config)
    nothing = plan(5, logit_bias=dict.fromkeys(range(VOCAB), -float("inf")), temperature=temperature)
    bad, good, single = llm.generate([PROMPTS[0], PROMPTS[1], [77]], [nothing, plan(), nothing])
    assert bad.finish_reason == single.finish_reason == "error"
    assert "logit_bias" in bad.error
    assert "logit_bias" in single.error
    assert bad.token_ids == []
    assert good.token_ids == greedy(PROMPTS[1], 20)
    assert_idle(llm)


def test_stop_token_ids_and_min_tokens():
    tokens = greedy(PROMPTS[0], 20)
    stop = tokens[5]
    at = tokens.index(stop)
    for config in (None, DRAFT, {"method": "ngram"}):
        (output,) = with_config(config).generate(PROMPTS[0], plan(20, stop_token_ids=[stop]))
        assert (output.token_ids, output.finish_reason) == (tokens[: at + 1], "stop")
        assert output.text == text_of(tokens[:at])
        (later,) = with_config(config).generate(PROMPTS[0], plan(20, stop_token_ids=[stop], min_tokens=9))
        assert stop not in later.token_ids[:9]
        assert len(later.token_ids) >= 9


# ---------------------------------------------------------------- one failing request does not disturb others


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_end_one_request_only(value, after, temperature):
    params = [plan(20, temperature=temperature, seed=index) for index in range(5)]
    for config in (None, {**DRAFT, "verifier": "match"}):
        expected = ids(with_config(None).generate(PROMPTS, params))
        llm = with_config(config)
        Wrapped(llm, poison=1, value=value, after=after)
        outputs = llm.generate(PROMPTS, params)
        assert outputs[1].finish_reason == "error"
        assert "logits are NaN or infinite" in outputs[1].error
        assert outputs[1].token_ids == expected[1][: len(outputs[1].token_ids)]
        assert bool(outputs[1].token_ids) is bool(after)
        for index in (0, 2, 3, 4):
            assert outputs[index].token_ids == expected[index]
        assert_idle(llm)


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["propose", "observe"])
@pytest.mark.parametrize("inner", ["oracle", "draft_model"])
def test_a_crashing_drafter_ends_one_request_only(when, inner, caplog):
    def culprit(context):
        return tuple(context.tokens[: context.num_prompt]) == tuple(prompt_ids(PROMPTS[2])) and len(context.tokens) > 30

    drafter = stubs.Oracle(truth()) if inner == "oracle" else with_config(DRAFT).recipe.drafter
    record = stubs.Recorder(Crashing(drafter, culprit, when=when))
    llm = with_drafter(record, num_nodes=4)
    outputs = llm.generate(PROMPTS, plan(40))
    assert outputs[2].finish_reason == "error"
    assert outputs[2].error == "the drafter crashed"
    assert outputs[2].token_ids == greedy(PROMPTS[2], 40)[: len(outputs[2].token_ids)]
    assert "the drafter crashed" in caplog.text
    calm = with_drafter(stubs.Oracle(truth()) if inner == "oracle" else with_config(DRAFT).recipe.drafter, num_nodes=4)
    undisturbed = calm.generate(PROMPTS, plan(40))
    for index in (0, 1, 3, 4):
        assert outputs[index].token_ids == greedy(PROMPTS[index], 40)
        assert outputs[index].error is None
        # the drafts of the others were as good as ever, too
        assert outputs[index].metrics.accepted_at == undisturbed[index].metrics.accepted_at
    assert sorted(record.released.values()) == [1] * 5
    assert_idle(llm)
    if inner == "draft_model":
        assert drafter.cache.free_slots == drafter.cache.max_slots


@pytest.mark.parametrize("tree", ["chain", "topk", "sampled"])
def test_a_draft_model_of_nans_ends_one_request_only(tree):
    params = [plan(20, temperature=0.8, seed=index) for index in range(5)]
    llm = with_config({**DRAFT, "tree": tree, "verifier": "match"})
    drafter = llm.recipe.drafter
    engine = SimpleNamespace(engine=SimpleNamespace(target=drafter.model))
    drafter.model = Wrapped(engine, poison=1, after=6)
    outputs = llm.generate(PROMPTS, params)
    assert outputs[1].finish_reason == "error"
    assert f"draft model '{altered()}'" in outputs[1].error
    expected = ids(with_config(None).generate(PROMPTS, params))
    for index in (0, 2, 3, 4):
        assert outputs[index].token_ids == expected[index]
    assert_idle(llm)


@pytest.mark.parametrize("fault", ["too many", "negative", "beyond the vocabulary", "missing"])
def test_a_drafter_that_breaks_its_budget_is_caught(fault):
    class Broken(stubs.Random):
        def propose(self, contexts, budgets):
            drafts = super().propose(contexts, budgets)
            wrong = {
                "too many": lambda: Draft(TokenTree([5] * 4000)),
                "negative": lambda: Draft(TokenTree([-1])),
                "beyond the vocabulary": lambda: Draft(TokenTree([VOCAB])),
            }
            for index, context in enumerate(contexts):
                if context.request_id == 1:
                    if fault == "missing":
                        return drafts[:-1]
                    drafts[index] = wrong[fault]()
            return drafts

    llm = with_drafter(Broken(VOCAB, tree=False))
    outputs = llm.generate(PROMPTS, plan())
    assert [output.finish_reason for output in outputs] == ["length", "error", *["length"] * 3]
    assert [o.token_ids for o in outputs if not o.error] == [greedy(p, 20) for p in PROMPTS if p != PROMPTS[1]]
    assert_idle(llm)


# ---------------------------------------------------------------- continuous batching


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", [None, DRAFT, {"method": "suffix"}], ids=["none", "draft", "suffix"])
@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (2, 3), (3, 2), (4, 7), (8, 512)])
def test_any_number_of_slots_and_rows_gives_the_same_tokens(config, slots, rows):
    llm = with_config(config, max_num_seqs=slots, max_rows_per_step=rows)
    counted = Wrapped(llm)
    many = [PROMPTS[i % 5] for i in range(9)]
    lengths = [3 + 2 * i for i in range(9)]
    outputs = llm.generate(many, [plan(length) for length in lengths])
    assert ids(outputs) == [greedy(prompt, 20)[:length] for prompt, length in zip(many, lengths, strict=True)]
    assert max(counted.rows) <= rows
    assert_idle(llm)


def test_on_a_cpu_no_prompt_is_begun_in_a_step_that_reads_enough_rows():
    llm = with_config(None)
    for _ in range(3):
        for request in llm.new_requests({"prompt_token_ids": [5] * 100}, plan(1)):
            llm.engine.add(request)
    read = []
    while llm.engine.busy:
        ended = llm.engine.step()
        read.append(len(ended))
    assert read == [2, 1]


def test_a_long_prompt_is_read_in_chunks_next_to_short_ones():
    long = (prompt_ids(PROMPTS[1]) * 20)[:150]
    for rows in (4, 64):
        llm = with_config({"method": "ngram"}, max_rows_per_step=rows)
        assert ids(llm.generate([PROMPTS[0], long, PROMPTS[3]], plan())) == [
            greedy(PROMPTS[0], 20),
            greedy(long, 20),
            greedy(PROMPTS[3], 20),
        ]


@pytest.mark.parametrize(
    "config", [None, DRAFT, {"method": "ngram"}, {"method": "suffix"}], ids=["none", "draft", "ngram", "suffix"]
)
def test_a_prompt_of_one_token(config):
    assert ids(with_config(config).generate([[77], [1], [77]], plan())) == [
        greedy([77], 20),
        greedy([1], 20),
        greedy([77], 20),
    ]


def test_plain_decoding_and_the_empty_draft_cost_the_same():
    runs = []
    for llm in (
        with_config(None),
        with_config({"method": "ngram", "num_speculative_tokens": 0}),
        with_drafter(stubs.Stub()),
        with_drafter(stubs.Empty()),
    ):
        counted = Wrapped(llm)
        outputs = llm.generate(PROMPTS, plan())
        assert all(output.metrics.tokens_per_step == 1.0 for output in outputs)
        assert all(output.metrics.num_steps == 20 for output in outputs)
        runs.append(counted.rows)
    assert runs == [runs[0]] * 4
    prompt_rows = sum(len(prompt_ids(prompt)) for prompt in PROMPTS)
    assert sum(runs[0]) == prompt_rows + 5 * 19  # every token but the last of each request is read once


def test_a_drafter_sees_what_the_protocol_says():
    record = stubs.Recorder(stubs.Random(VOCAB, tree=True, seed=3))
    llm = with_drafter(record, num_nodes=5, max_num_seqs=3, max_rows_per_step=11)
    lengths = [1, 2, 9, 20, 14]
    outputs = llm.generate(PROMPTS, [plan(length) for length in lengths])
    assert ids(outputs) == [greedy(prompt, 20)[:length] for prompt, length in zip(PROMPTS, lengths, strict=True)]
    assert sorted(record.released) == list(range(5))
    assert set(record.released.values()) == {1}  # exactly once, also the one that never proposed
    assert record.after_release == []
    assert 0 not in {request_id for request_id, *_ in record.proposed}  # one token, from the prompt's own step
    limits = [len(prompt_ids(prompt)) + length for prompt, length in zip(PROMPTS, lengths, strict=True)]
    for request_id, committed, budget, draft in record.proposed:
        assert budget.max_depth <= limits[request_id] - len(committed) - 1
        assert 0 <= budget.max_depth <= budget.max_nodes or budget.max_nodes == 0
        if not budget.max_depth:
            assert budget.max_nodes == 0
        assert len(draft) <= budget.max_nodes
    drafted = [(request_id, draft) for request_id, _, _, draft in record.proposed if len(draft)]
    assert [(outcome.request_id, outcome.draft) for outcome in record.observed] == drafted
    for outcome in record.observed:
        path = [outcome.draft.tree.tokens[node] for node in outcome.verdict.path]
        assert outcome.tokens == (*path, outcome.verdict.extra)


def test_a_draft_model_with_a_shorter_context_stops_drafting_and_the_text_goes_on():
    llm = with_config(DRAFT)
    drafter = llm.recipe.drafter
    inner = drafter.model
    limit = len(prompt_ids(PROMPTS[0])) + 12
    drafter.model = SimpleNamespace(forward=inner.forward, max_length=limit, vocab_size=inner.vocab_size)
    drafter.cache.max_length = drafter.cache.capacity = limit
    (output,) = llm.generate(PROMPTS[0], plan(40))
    assert output.token_ids == greedy(PROMPTS[0], 40)
    assert 0 < output.metrics.num_draft_tokens < 40


def test_a_draft_model_without_a_free_slot_lets_the_request_go_on():
    llm = with_config(DRAFT)
    cache_of_draft = llm.recipe.drafter.cache
    taken = [cache_of_draft.acquire() for _ in range(cache_of_draft.max_slots - 2)]
    assert ids(llm.generate(PROMPTS, plan())) == [greedy(prompt, 20) for prompt in PROMPTS]
    for slot in taken:
        cache_of_draft.release(slot)
    assert_idle(llm)


def test_metrics_add_up():
    llm = with_drafter(stubs.Scripted(truth(), 0.7), num_nodes=5)
    began = perf_counter()
    outputs = llm.generate(PROMPTS, plan(40))
    for output in outputs:
        metrics = output.metrics
        assert metrics.seconds < perf_counter() - began
        assert metrics.num_tokens == len(output.token_ids) == 40
        assert metrics.num_tokens <= metrics.num_steps + metrics.num_accepted_tokens
        assert metrics.num_accepted_tokens <= metrics.num_draft_tokens == sum(metrics.drafted_at)
        assert metrics.tokens_per_step == 40 / metrics.num_steps > 1.0
        assert all(0.0 <= share <= 1.0 for share in metrics.acceptance_by_position)
        spent = metrics.draft_seconds + metrics.verify_seconds + metrics.other_seconds
        assert 0.0 < spent <= metrics.seconds
        assert metrics.distortion == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_requests_under_any_limits_equals_each_of_them_alone(seed):
    """Random prompts, parameters, slots, rows and drafts; the `match` rule promises the same stream for all of it."""
    rng = random.Random(seed)
    count = 10
    prompts = [[rng.randrange(300, VOCAB) for _ in range(rng.choice((1, 2, 9, 40)))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice((0.0, 0.7, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 40)),
            min_p=rng.choice((0.0, 0.02)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            stop=rng.choice((None, "e", ["the", "\n"])),
            min_tokens=rng.choice((0, 1)),
            logprobs=rng.choice((None, 2)),
            ignore_eos=rng.random() < 0.5,
            seed=rng.randrange(1000),
        )
        for _ in range(count)
    ]
    expected = [base().generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    llm = with_drafter(
        stubs.Recorder(stubs.Random(VOCAB, tree=bool(seed % 2), seed=seed)),
        num_nodes=rng.randint(1, 9),
        adaptive=seed > 3,
        max_num_seqs=rng.randint(1, 6),
        max_rows_per_step=rng.randint(1, 30),
    )
    for mine, alone in zip(llm.generate(prompts, params), expected, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
        assert (mine.logprobs is None) == (alone.logprobs is None)
    assert llm.recipe.drafter.released == dict.fromkeys(range(count), 1)
    assert_idle(llm)


def test_completions_share_no_seed_with_a_neighbour():
    """The second completion of one seed is not the first of the next one."""
    groups = [base().new_requests("Once", plan(4, n=4, temperature=1.0, seed=seed)) for seed in range(5, 9)]
    seeds = [[request.streams.seed for request in group] for group in groups]
    assert [group[0] for group in seeds] == [5, 6, 7, 8]
    assert len({seed for group in seeds for seed in group}) == 16


def test_tokens_accepted_beyond_the_end_are_not_counted():
    """The oracle's whole draft stands, but a stop token lies in the middle of it."""
    text = greedy(PROMPTS[0])
    end = next(place for place in range(2, 6) if text[place] not in text[:place])
    llm = with_drafter(stubs.Oracle(truth(PROMPTS[:1])), num_nodes=6)
    account, told = llm.engine.account, []
    llm.engine.account = lambda current, **times: (
        told.append((current.num_nodes, current.num_accepted)) or account(current, **times)
    )
    (output,) = llm.generate(PROMPTS[0], plan(40, stop_token_ids=[text[end]]))
    assert output.token_ids == text[: end + 1]
    assert told == [(0, 0), (6, end - 1)]  # a step's tokens, but for the one that it would have had anyway
    metrics = output.metrics
    assert (metrics.num_tokens, metrics.num_steps, metrics.num_draft_tokens) == (end + 1, 2, 6)
    assert metrics.num_accepted_tokens == end  # the first token is the prompt's
    assert metrics.acceptance_by_position == [1.0] * end + [0.0] * (6 - end)


def test_time_that_other_processes_took_does_not_count_against_drafts(monkeypatch):
    """A draft that waits for its core is not a slow one."""
    drafter = stubs.Oracle(truth(PROMPTS[:1]))
    propose, steps = drafter.propose, []
    drafter.propose = lambda *given: sleep(0.05) or propose(*given)
    llm = with_drafter(drafter, adaptive=True)
    measure = llm.engine.controller.measure
    llm.engine.controller.measure = lambda **step: steps.append(step) or measure(**step)
    llm.generate(PROMPTS[0], plan(24))
    assert any(step["nodes"] for step in steps)
    assert all(step["draft"] < step["total"] < 0.05 for step in steps)


def test_a_drafter_is_believed_to_read_many_tokens_at_once():
    """If each took a token's time in decoding, a long prompt would not be read for a short answer."""
    with LLM("zoo:base", speculative_config={"method": "draft_model", "model": "zoo:draft"}) as llm:
        controller, target = llm.engine.controller, llm.target
        one_by_one = llm.recipe.drafter.reading_flops(1) / target.reading_flops(1)
        assert controller._reading.token(1.0) < one_by_one / 4.0
