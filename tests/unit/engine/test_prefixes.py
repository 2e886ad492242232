"""Prefix reuse: the same text, less read."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.engine.llm import LLM
from foretoken.engine.prefixes import common_prefix
from foretoken.engine.request import Request
from foretoken.forward.ssm.state import HybridCache
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.small_llms import ALTERED, target, with_config
from helpers.tiny_models import save_model
from helpers.variants import Case, cases

SYSTEM = list(range(100, 140))
LONG = SamplingParams(max_tokens=8, ignore_eos=True)


def reusing(method: str = "suffix", **options: object) -> LLM:
    config = {"method": method, "model": ALTERED} if method == "draft_model" else {"method": method}
    return with_config(config, enable_prefix_caching=True, **{"max_num_seqs": 3, **options})


@cache
def with_states(name: str) -> LanguageModel:
    """A target with state-space layers: of the zoo."""
    return load(f"zoo:{name}", dtype="float32", device="cpu")


def run(llm: LLM, prompt: list[int], params: SamplingParams = LONG, salt: str | None = None) -> Request:
    (request,) = llm.new_requests(prompt, params, cache_salt=salt)
    llm.engine.add(request)
    while not request.finished:
        llm.engine.step()
    return request


def test_the_next_turn_of_a_conversation_reads_its_own_words_only() -> None:
    llm, plain = reusing(), with_config({"method": "none"})
    first = run(llm, [*SYSTEM, 7, 8])
    second = run(llm, [*first.tokens, 9, 10, 11])
    assert first.num_cached == 0
    assert second.num_cached == len(first.tokens) - 1  # the last token was never read
    assert second.output_ids == run(plain, [*first.tokens, 9, 10, 11]).output_ids
    assert llm.engine.cache.num_slots == 1  # the slot was taken over


def test_another_question_under_the_same_system_prompt_copies_it() -> None:
    llm, plain = reusing(), with_config({"method": "none"})
    run(llm, [*SYSTEM, *range(200, 280)])
    other = run(llm, [*SYSTEM, 7, 8])
    assert other.num_cached == len(SYSTEM)
    again = run(llm, [*SYSTEM, *range(200, 280), 3])
    assert again.num_cached == len(SYSTEM) + 80  # the long one is still there
    for request in (other, again):
        assert request.output_ids == run(plain, request.tokens[: request.num_prompt]).output_ids


def test_a_running_request_shares_its_prefix() -> None:
    llm, plain = reusing(), with_config({"method": "none"})
    (busy,) = llm.new_requests([*SYSTEM, 5], SamplingParams(max_tokens=60, ignore_eos=True))
    llm.engine.add(busy)
    for _ in range(3):
        llm.engine.step()
    other = run(llm, [*SYSTEM, 6])
    assert other.num_cached == len(SYSTEM)
    while not busy.finished:
        llm.engine.step()
    assert other.output_ids == run(plain, [*SYSTEM, 6]).output_ids
    assert busy.output_ids == run(plain, [*SYSTEM, 5], SamplingParams(max_tokens=60, ignore_eos=True)).output_ids


@pytest.mark.parametrize("method", ["draft_model", "suffix", "none"])
def test_a_seed_gives_the_same_tokens_whatever_was_reused(method: str) -> None:
    llm = reusing(method)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=4)
    found = [run(llm, prompt, params) for prompt in ([*SYSTEM, 7], [*SYSTEM, 7], [*SYSTEM, 7, 8], [*SYSTEM, 7])]
    assert [each.num_cached for each in found] == [0, len(SYSTEM), len(SYSTEM) + 1, len(SYSTEM)]
    assert found[0].output_ids == found[1].output_ids == found[3].output_ids


def test_what_a_cancelled_request_has_read_is_kept() -> None:
    llm = reusing()
    (request,) = llm.new_requests([*SYSTEM, 7, 8], LONG)
    llm.engine.add(request)
    llm.engine.step()
    llm.engine.cancel(request)
    assert run(llm, [*SYSTEM, 9]).num_cached == len(SYSTEM)


def test_another_salt_shares_nothing() -> None:
    llm = reusing()
    run(llm, [*SYSTEM, 7], salt="a")
    assert run(llm, [*SYSTEM, 7], salt="b").num_cached == 0
    assert run(llm, [*SYSTEM, 7]).num_cached == 0
    assert run(llm, [*SYSTEM, 7], salt="a").num_cached == len(SYSTEM)


def test_what_asks_for_the_prompts_probabilities_reads_all_of_it() -> None:
    llm = reusing()
    run(llm, [*SYSTEM, 7])
    request = run(llm, [*SYSTEM, 7], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert request.num_cached == 0
    assert len(request.prompt_logprobs or ()) == len(SYSTEM)


def test_short_prefixes_and_failed_requests_are_not_kept() -> None:
    llm = reusing()
    run(llm, [1, 2, 3], SamplingParams(max_tokens=2))
    assert llm.engine.cache.free_slots == 3
    (request,) = llm.new_requests([*SYSTEM, 7], LONG)
    llm.engine.add(request)
    llm.engine.step()
    llm.engine._faults.fail(request, RuntimeError("planted"))
    assert llm.engine.cache.free_slots == 3


def test_a_prompt_shorter_than_what_a_drafter_is_shown_of_it_is_read() -> None:
    """Another request's prefix is kept: there is something to compare with."""
    llm = reusing("del")
    assert llm.recipe.drafter.needs.hidden_layers.last > 3  # type: ignore[union-attr]
    run(llm, [*SYSTEM, 7])
    short = run(llm, [100, 101, 102])
    assert (short.num_cached, short.error) == (0, None)
    assert short.output_ids == run(with_config({"method": "none"}), [100, 101, 102]).output_ids


def test_kept_slots_give_way_the_oldest_first() -> None:
    llm = reusing(max_num_seqs=2)
    prompts = [[*range(begin, begin + 30)] for begin in (300, 400, 500)]
    for prompt in prompts:
        run(llm, prompt)
    assert run(llm, [*prompts[1], 9]).num_cached == 30
    assert run(llm, [*prompts[2], 9]).num_cached == 30
    assert run(llm, [*prompts[0], 9]).num_cached == 0
    together = [llm.new_requests([*range(begin, begin + 20)], LONG)[0] for begin in (600, 700, 800)]
    for request in together:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    assert all(request.num_output == 8 for request in together)


def test_a_slot_that_was_copied_is_used_again() -> None:
    llm = reusing()
    first, second = [*SYSTEM, *range(300, 360)], [*range(400, 430)]
    run(llm, first)
    run(llm, second)
    assert run(llm, [*SYSTEM, 7]).num_cached == len(SYSTEM)
    run(llm, [*range(500, 530)])  # a stranger takes the place of the second
    assert run(llm, [*first, 9]).num_cached == len(first)
    assert run(llm, [*second, 9]).num_cached == 0


def test_the_cache_does_not_exceed_its_limit() -> None:
    llm = reusing(max_num_seqs=8, prefix_cache_bytes=1)
    for begin in range(300, 900, 100):
        run(llm, [*range(begin, begin + 30)])
    assert llm.engine.cache.num_slots == 1
    roomy = reusing(max_num_seqs=8)
    for begin in range(300, 900, 100):
        run(roomy, [*range(begin, begin + 30)])
    assert roomy.engine.cache.num_slots > 1


@pytest.mark.parametrize(("name", "method"), [("base", "suffix"), ("base", "draft_model"), ("hybrid", "suffix")])
def test_random_conversations_are_the_same_text(name: str, method: str) -> None:
    rng = random.Random(1)
    model = target() if name == "base" else with_states(name)
    llm = reusing(method, target=model)
    plain = with_config({"method": "none"}, target=model)
    histories = [[*SYSTEM, rng.randrange(3, 900)] for _ in range(4)]
    cached = 0
    for _ in range(3):
        params = [
            SamplingParams(max_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99))
            for _ in histories
        ]
        if method == "draft_model":
            params = [SamplingParams(max_tokens=each.max_tokens) for each in params]
        requests = [llm.new_requests(tokens, each)[0] for tokens, each in zip(histories, params, strict=True)]
        for request in requests:
            llm.engine.add(request)
        for step in range(200):
            if not llm.engine.busy:
                break
            llm.engine.step()
            if step == 2:
                llm.engine.cancel(requests[rng.randrange(4)])
        for place, request in enumerate(requests):
            wanted = run(plain, histories[place], params[place]).output_ids
            assert request.output_ids == wanted[: request.num_output]
            assert request.finish_reason == "cancelled" or request.output_ids == wanted
            cached += request.num_cached
            histories[place] = [*request.tokens, *(rng.randrange(3, 900) for _ in range(rng.randrange(1, 30)))]
    assert cached > 300


@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_states_are_gone_back_to(name: str) -> None:
    """After an answer, in front of a prompt's end, and where a third prompt leaves two others; no neighbour's."""
    llm = reusing(target=with_states(name), max_num_seqs=8)
    plain = with_config({"method": "none"}, target=with_states(name))

    def reused(prompt: list[int], params: SamplingParams = LONG, salt: str | None = None) -> int:
        found = run(llm, prompt, params, salt)
        assert found.output_ids == run(plain, prompt, params).output_ids
        return found.num_cached

    long = [*SYSTEM, *range(200, 280)]
    first = run(llm, long)
    assert first.num_cached == 0
    assert reused([*first.tokens, 9, 10, 11]) == len(first.tokens) - 1
    assert reused(long) == len(long) - 1  # once more
    assert reused([*long, 3, 4]) == len(long) - 1  # another answer than was given
    seeded = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=4)
    assert reused(long, seeded) == len(long) - 1
    assert reused([*SYSTEM, *range(300, 350)]) == 0  # nothing was marked where it leaves the others
    assert reused([*SYSTEM, *range(400, 450)]) == len(SYSTEM)
    assert reused([*SYSTEM, *range(300, 350), 7]) == len(SYSTEM) + 49
    assert reused([*SYSTEM, 7, 8]) == len(SYSTEM)
    assert reused([*SYSTEM, 7, 8], salt="a") == 0


def test_a_running_request_s_marks_are_shared() -> None:
    """By a fork, which leaves the one that runs as it is."""
    model = with_states("mamba")
    llm, plain = reusing(target=model), with_config({"method": "none"}, target=model)
    prompt, params = [*SYSTEM, *range(200, 230)], SamplingParams(max_tokens=30, ignore_eos=True)
    (busy,) = llm.new_requests(prompt, params)
    llm.engine.add(busy)
    for _ in range(5):
        llm.engine.step()
    other = run(llm, [*prompt, 6])
    while not busy.finished:
        llm.engine.step()
    assert other.num_cached == len(prompt) - 1
    assert other.output_ids == run(plain, [*prompt, 6]).output_ids
    assert busy.output_ids == run(plain, prompt, params).output_ids


def test_marks_are_bounded() -> None:
    model = with_states("mamba")
    llm = reusing(target=model, prefix_cache_bytes=1)
    run(llm, [*SYSTEM, *range(200, 230)])
    assert llm.engine.cache.num_bytes == bytes_of_slots(llm)
    assert run(llm, [*SYSTEM, *range(200, 230)]).num_cached == 0
    roomy = reusing(target=model)
    run(roomy, [*SYSTEM, *range(200, 230)])
    assert roomy.engine.cache.num_bytes > bytes_of_slots(roomy)


def bytes_of_slots(llm: LLM) -> int:
    """All that a cache of states holds next to marks, when nothing runs."""
    cache = llm.engine.cache
    assert isinstance(cache, HybridCache)
    states = cache.states
    held = [states.base_LSHNP, states.conv_LSWC, states.raw_LSRC, states.gates_LSR2H, *cache.keys, *cache.values]
    return sum(each.nbytes for each in held if each is not None)


def test_an_answer_that_would_be_read_otherwise_is_not_reused(tmp_path: Path) -> None:
    """The library limits dt of a prompt's rows, and of an answer's it does not."""
    model = load(save_model("mamba2_limits", tmp_path / "limited"), device="cpu")
    llm, plain = reusing(target=model), with_config({"method": "none"}, target=model)
    first = run(llm, list(range(3, 43)))
    turn = [*first.tokens, 9, 10, 11]
    second = run(llm, turn)
    assert second.num_cached == 39
    assert second.output_ids == run(plain, turn).output_ids


def test_recipes_that_cannot_reuse_do_not() -> None:
    sparse = with_config(
        {"method": "suffix", "verification": {"attention": "per_head", "dense_below": 64}}, enable_prefix_caching=True
    )
    assert sparse.engine.prefixes is None


@pytest.mark.parametrize(
    ("first", "second", "limit", "count"),
    [([1, 2], [1, 2], 9, 2), ([1, 2], [1, 3], 9, 1), ([1, 2, 3], [1, 2, 3], 2, 2), ([], [1], 9, 0), ([2], [1], 9, 0)],
)
def test_common_prefix(first: list[int], second: list[int], limit: int, count: int) -> None:
    assert common_prefix(first, second, limit) == count


def variants() -> list[object]:
    """Of all drafters; the first of each by default, all of them with the slow tests."""
    known: set[str] = set()
    found = []
    for case in cases():
        found.append(pytest.param(case, id=case.label, marks=[pytest.mark.slow] if case.entry.name in known else []))
        known.add(case.entry.name)
    return found


def recipe_of(case: Case, **options: object) -> LLM:
    return with_config(case.config(target(), None, 5), max_num_seqs=3, **options)


@pytest.mark.parametrize("case", variants())
def test_a_drafter_that_reads_states_is_shown_those_of_reused_rows(case: Case) -> None:
    """The drafts are the same: replayed states equal computed ones."""
    reused, read = recipe_of(case, enable_prefix_caching=True), recipe_of(case)
    if not read.recipe.drafter.needs.hidden_layers:
        pytest.skip("it reads none")
    drafts = [noted(each) for each in (reused, read)]
    seeded = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.7, seed=4)  # drafts follow their own past
    rng = random.Random(2)
    tokens = [*SYSTEM, *(rng.randrange(3, 900) for _ in range(50))]
    for turn, params in enumerate((seeded, seeded, LONG)):
        found, wanted = run(reused, tokens, params), run(read, tokens, params)
        assert found.output_ids == wanted.output_ids
        assert (found.num_cached > 0) == (turn > 0)
        assert drafts[0] == drafts[1] or params is LONG
        tokens = [*found.tokens, *(rng.randrange(3, 900) for _ in range(1 + 30 * turn))]
    for each in drafts:
        each.clear()
    short = [*SYSTEM, 9]  # shorter than the kept prefix
    assert run(reused, short, seeded).output_ids == run(read, short, seeded).output_ids
    assert drafts[0] == drafts[1] != []


def test_a_kept_slot_has_the_rows_of_its_tokens_and_no_others() -> None:
    """Also where an answer stops within an accepted draft, of which rows after the last token were written."""
    drafts = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 6}  # all of them are accepted
    llm, plain = with_config(drafts, enable_prefix_caching=True), with_config({"method": "none"})
    prefixes, cache = llm.engine.prefixes, llm.engine.cache
    assert prefixes is not None
    behind, commit = list[int](), cache.commit

    def noted_commit(slot: int, rows: Any) -> None:
        commit(slot, rows)
        behind.append(cache.lengths[slot])

    cache.commit = noted_commit  # type: ignore[method-assign]
    within = 0
    for seed in range(8):
        prompt = [*range(100 + 9 * seed, 130 + 9 * seed)]
        end = run(plain, prompt).output_ids[1 + seed % 5]
        request = run(llm, prompt, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[end]))
        within += behind[-1] > len(request.tokens)
        assert [cache.lengths[slot] for slot in prefixes._kept] == [len(kept) for kept, _ in prefixes._kept.values()]
        again = [*request.tokens, 7, 8]
        assert run(llm, again).output_ids == run(plain, again).output_ids
    assert within > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("kept", [17, 40, 41])
@pytest.mark.parametrize("shared", [16, 17, 39, 41])
def test_a_drafter_is_shown_every_row_of_a_reused_prompt(kept: int, shared: int) -> None:
    """Row by row, once each, in order, and with the states that reading the whole prompt gives."""
    words = [*range(100, 100 + kept)]
    prompt = [*words[:shared], *range(500, 512)]
    shown = []
    for reuse in (True, False):
        llm = with_config({"method": "kangaroo", "adapter": "random:1"}, enable_prefix_caching=reuse)
        run(llm, words)
        seen: list[tuple[int, Any]] = []
        on_forward = llm.recipe.drafter.on_forward

        def noting(features: Any, *more: Any, seen: Any = seen, on_forward: Any = on_forward) -> Any:
            for each in features:
                (states,) = each.hidden.values()
                seen += [(each.begin + row, states[row].clone()) for row in range(len(states))]
            return on_forward(features, *more)

        llm.recipe.drafter.on_forward = noting  # type: ignore[method-assign]
        request = run(llm, prompt)
        assert (request.num_cached > 0) == (reuse and min(kept, shared) >= 16)
        shown.append(seen)
    for seen in shown:
        assert [place for place, _ in seen][: len(prompt)] == [*range(len(prompt))]
    for (place, found), (_, wanted) in zip(shown[0][: len(prompt)], shown[1], strict=False):
        assert torch.equal(found, wanted), place


def noted(llm: LLM) -> list[tuple[int, ...]]:
    """The tokens of all drafts, as they are made."""
    drafts: list[tuple[int, ...]] = []
    propose = llm.recipe.drafter.propose

    def noting(*given: object) -> object:
        made = propose(*given)  # type: ignore[arg-type]
        drafts.extend(each.tree.tokens for each in made if len(each))
        return made

    llm.recipe.drafter.propose = noting  # type: ignore[method-assign,assignment]
    return drafts


def test_replayed_features_are_bounded_and_released() -> None:
    llm = with_config({"method": "kangaroo", "adapter": "random:1"}, enable_prefix_caching=True, prefix_cache_bytes=1)
    prefixes = llm.engine.prefixes
    assert prefixes is not None
    for begin in range(300, 600, 100):
        run(llm, [*range(begin, begin + 30)])
    assert 0 < prefixes.shown.num_bytes <= 2 * 30 * 4 * llm.target.config.hidden_size
    prefixes.clear()
    assert prefixes.shown.num_bytes == 0


def test_a_drafter_that_fails_on_replayed_features_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_config({"method": "kangaroo", "adapter": "random:1"}, enable_prefix_caching=True)
    run(llm, [*SYSTEM, 7])

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.recipe.drafter, "on_forward", fail)
        request = run(llm, [*SYSTEM, 8])
    assert (request.finish_reason, request.error) == ("error", "planted")
    assert run(llm, [*SYSTEM, 9]).finish_reason == "length"
