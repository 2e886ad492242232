"""Kangaroo: its text does not depend on the adapter, no layer runs twice, and its caches stay exact."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from foretoken.engine.llm import LLM
from foretoken.methods.kangaroo.network import Adapter
from foretoken.models.load import load
from foretoken.native import decoder
from foretoken.options.sampling import SamplingParams
from helpers.adapters import teach
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.untrained import untrained
from helpers.watching import Watch
from helpers.zoo_llms import PROMPTS, assert_idle, base, greedy, ids, prompt_ids, target, with_config

DEPTH = 2
LENGTH = 32
# a number of tokens: else steps go without drafts where these do not pay, and nothing here does
KANGAROO = {"method": "kangaroo", "adapter": f"random:{DEPTH}", "num_speculative_tokens": 60}
EXACT = target().native_decoder is not None  # else the library's products round by their number of rows


@cache
def llm_of(tree: bool = False, threshold: float | None = None, **options: Any) -> LLM:
    config = {**KANGAROO, "tree": tree, "threshold": threshold, **options}
    return with_config(config, max_num_seqs=4)


def fresh(tree: bool = False, **options: Any) -> LLM:
    """An engine of its own, with a replaceable adapter."""
    config = {**KANGAROO, "tree": tree, **options}
    return with_config(config, max_num_seqs=4)


def sometimes(position: int) -> bool:
    return position * 2654435761 % 7 < 2


@pytest.fixture
def watch() -> Any:
    watching: list[Watch] = []

    def start(llm: LLM, **options: Any) -> Watch:
        watching.append(Watch(llm, exact=EXACT, **options))
        return watching[-1]

    yield start
    for each in watching:
        each.leave()


Start = Callable[..., Watch]


@pytest.mark.covering(1)
@pytest.mark.parametrize("spoil", [None, sometimes, lambda position: True], ids=["right", "sometimes", "wrong"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_every_cache_is_that_of_a_fresh_forward_after_every_step(tree: bool, spoil: Any, watch: Start) -> None:
    """Target and adapter, with drafts that stand, stand in part, and fall; requests of ragged lengths come and go."""
    llm = fresh(tree, threshold=0.0 if not tree else 0.05, width=3, max_depth=4)
    teach(llm, spoil)
    lengths = (LENGTH, 7, 19, 1, 25)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    expected = [greedy(prompt, LENGTH)[:length] for prompt, length in zip(PROMPTS, lengths, strict=True)]
    seen = watch(llm)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == expected
    assert set(seen.depths) == {DEPTH}
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    if not tree:  # a tree that is wrong about the best token may hold the right one all the same
        assert (accepted > 0) == (spoil is None or spoil is sometimes)
    assert seen.layer_rows == seen.rows * target().num_layers
    assert_idle(llm)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_caches_with_a_random_adapter(tree: bool, watch: Start) -> None:
    llm = llm_of(tree, 0.05)
    watch(llm)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert ids(llm.generate(PROMPTS, params)) == [greedy(prompt)[:16] for prompt in PROMPTS]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_layer_runs_twice_over_a_row(batch: int, tree: bool, watch: Start) -> None:
    llm = llm_of(tree, 0.0 if not tree else 0.05)
    seen = watch(llm, caches=False)
    llm.generate(PROMPTS[:batch], SamplingParams(max_tokens=16, ignore_eos=True))
    prompts = sum(len(prompt_ids(prompt)) for prompt in PROMPTS[:batch])
    assert len(seen.sizes) > 0
    assert seen.rows > prompts + sum(seen.sizes)
    assert seen.layer_rows == seen.rows * target().num_layers


def test_an_adapter_that_knows_everything_is_always_right(watch: Start) -> None:
    """All accepted: the next feed has two rows, and every position is the right one."""
    llm = fresh(threshold=0.0, max_depth=4)
    drafter: Any = teach(llm)
    seen = watch(llm, caches=False)
    feeds: list[int] = []
    forward = drafter._head.forward

    def noted(batch: Any, *args: Any, **options: Any) -> Any:
        feeds.append(len(batch))
        return forward(batch, *args, **options)

    drafter._head.forward = noted
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=41, ignore_eos=True))
    assert output.token_ids == greedy(PROMPTS[0], 41)
    assert output.metrics.num_steps == 1 + 40 // 5
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens == 32
    assert seen.sizes == [4] * 8
    # the prompt and the first root, then three single rows a step; later the last draft's row comes with the root
    assert feeds == [len(prompt_ids(PROMPTS[0])) + 1, 1, 1, 1, *([2, 1, 1, 1] * 7)]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_two_calls_for_one_root_propose_the_same(tree: bool, watch: Start) -> None:
    """As after a fault: the second call drops the first one's draft, and the root's row of the adapter with it."""
    llm = fresh(tree, threshold=0.0, width=2, max_depth=3)
    drafter: Any = teach(llm)
    propose = drafter.propose

    def twice(contexts: Any, budgets: Any) -> Any:
        first, second = propose(contexts, budgets), propose(contexts, budgets)
        assert [each.tree for each in first] == [each.tree for each in second]
        return second

    drafter.propose = twice
    watch(llm)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
    assert output.token_ids == greedy(PROMPTS[0])[:9]
    assert output.metrics.num_accepted_tokens == 6


def test_long_prompts_are_read_by_the_adapter_in_pieces(watch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks by the target, next to requests that draft; the adapter's share waits, but never for long."""
    from foretoken.methods.kangaroo import drafter as kangaroo

    monkeypatch.setattr(kangaroo, "_CHUNK_ROWS", 40)
    llm = with_config({**KANGAROO, "threshold": 0.0}, max_num_seqs=2, max_rows_per_step=24)
    drafter: Any = teach(llm)
    watch(llm)
    long = tokens_of(3, 150, 8192)
    outputs = llm.generate([PROMPTS[0], {"prompt_token_ids": long}], SamplingParams(max_tokens=20, ignore_eos=True))
    assert ids(outputs) == [greedy(PROMPTS[0])[:20], greedy(long, 20)]
    assert outputs[1].metrics.num_accepted_tokens == outputs[1].metrics.num_draft_tokens > 0
    assert not drafter._states


def test_caches_grow_while_drafts_are_under_way(watch: Start) -> None:
    llm = fresh(True, threshold=0.0, max_depth=3, width=5)
    drafter: Any = teach(llm, sometimes)
    for each in (llm.engine.cache, drafter._cache):
        each.capacity = 8
    watch(llm)
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))) == [
        greedy(prompt)[:12] for prompt in PROMPTS
    ]


# ------------------------------------------------------------------ when drafting stops


def test_threshold_0_never_stops(watch: Start) -> None:
    llm = llm_of(False, 0.0, max_depth=4)
    seen = watch(llm, caches=False)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
    assert set(seen.sizes[:-4]) == {4}  # the last ones are bounded by the rest of the text
    assert output.metrics.num_draft_tokens == sum(seen.sizes)


def test_threshold_1_drafts_one_token_a_step(watch: Start) -> None:
    llm = fresh(threshold=1.0)
    teach(llm)
    seen = watch(llm, caches=False)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
    assert set(seen.sizes) == {1}


def test_the_unsure_token_is_kept_and_verified(watch: Start) -> None:
    """Drafts end with the first token of an unsure distribution, and hold it."""
    llm = fresh(threshold=0.5, max_depth=6)
    teach(llm)
    seen = watch(llm, caches=False)
    (output,) = llm.generate(PROMPTS[3], SamplingParams(max_tokens=32, ignore_eos=True, logprobs=1))
    assert output.logprobs is not None
    sure = [2.718281828**each.logprob > 0.5 for each in output.logprobs]
    done, expected = 1, []
    while done < 31:
        most = min(6, 31 - done)
        size = next((i + 1 for i in range(most) if not sure[done + i]), most)
        expected.append(size)
        done += size + 1
    assert len(set(expected)) > 2
    assert seen.sizes == expected


def test_a_tree_extends_where_it_is_sure(watch: Start) -> None:
    bushy, bare = (fresh(True, threshold=threshold, width=3, max_depth=3) for threshold in (0.0, 1.0))
    sizes = []
    for llm in (bushy, bare):
        teach(llm)
        seen = watch(llm, caches=False)
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=6, ignore_eos=True))
        sizes.append(seen.sizes[0])
    assert sizes == [9, 3]


# ------------------------------------------------------------------ requests with wishes of their own


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_stop_token_inside_a_draft_ends_the_text_there(tree: bool) -> None:
    llm = fresh(tree, threshold=0.0)
    teach(llm)
    plain = greedy(PROMPTS[1], 24)
    stop = plain[9]
    (output,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=24, stop_token_ids=[stop], ignore_eos=True))
    assert output.token_ids == plain[: plain.index(stop) + 1]
    assert output.finish_reason == "stop"
    assert_idle(llm)


WISHES = {
    "bias": {"logit_bias": {40: 4.0, 41: -100.0, 300: 3.0}, "ignore_eos": True},
    "penalties": {"ignore_eos": True, "presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 20},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_wishes_change_the_text_as_in_plain_decoding(tree: bool, wish: str, watch: Start) -> None:
    llm = fresh(tree, threshold=0.0, max_depth=4, width=3)
    teach(llm)
    watch(llm, caches=False)
    params = SamplingParams(max_tokens=20, **WISHES[wish])
    expected = base().generate(PROMPTS[:3], params)
    outputs = llm.generate(PROMPTS[:3], params)
    assert ids(outputs) == ids(expected)
    if not tree:  # drafts are drawn under the same wishes: the oracle stays right to the end
        assert all(each.metrics.num_accepted_tokens == each.metrics.num_draft_tokens > 0 for each in outputs)


# ------------------------------------------------------------------ other targets


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_any_stack_of_layers_can_draft(name: str, tree: bool, tmp_path: Any) -> None:
    """Windows, soft caps, no rotary positions, latent attention, experts: fused or not, with or without the oracle."""
    model = load(save_model(name, tmp_path), device="cpu")
    untrained(Adapter, model, tmp_path / "kangaroo", exit_layer=1)
    prompts = [{"prompt_token_ids": tokens_of(seed, 5 + 3 * seed, VOCAB_SIZE)} for seed in range(4)]
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    options = {"target": model, "max_num_seqs": 3}
    expected = ids(with_config(None, **options).generate(prompts, params))
    config = {**KANGAROO, "adapter": None, "tree": tree, "threshold": 0.05, "width": 3, "max_depth": 4}
    llm = with_config(config, **options)
    assert ids(llm.generate(prompts, params)) == expected
    drafter: Any = teach(llm, sometimes)
    assert drafter.exit_layer == 1
    looked = Watch(llm, exact=False)
    outputs = llm.generate(prompts, params)
    assert ids(outputs) == expected
    assert any(output.metrics.num_accepted_tokens for output in outputs)
    looked.leave()


def test_the_interpreter_ends_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules may be gone before the last adapter is."""
    llm = fresh()
    drafter: Any = llm.recipe.drafter
    if drafter._head._native is None:
        pytest.skip("no native decoder here")
    gone = weakref.ref(drafter._head._native)
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(decoder, "ctypes", None)
    drafter._head = None
    gc.collect()
    assert gone() is None
    assert not said
