"""A draft vocabulary at run time: its drafts, which do not depend on other requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from foretoken.core.draft import Draft, Sampled
from foretoken.core.protocols import Outcome
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting import draft_columns
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.draft_vocabulary import DraftVocabulary
from foretoken.engine.llm import LLM
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.options.sampling import SamplingParams
from helpers.requests import make_request
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, ids, prompt_ids, target, with_config

METHODS = (
    {"method": "draft_model", "model": "zoo:draft"},
    {"method": "draft_model", "model": "zoo:draft", "tree": "topk"},
    {"method": "kangaroo", "threshold": 0.1},
    {"method": "del", "exit_layer": 6, "draft_length": 3},
)
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda each: "-".join(map(str, each.values())))
SOME = PROMPTS[:3]


def vocabulary(kept: Sequence[int] | None = None, **changes: object) -> DraftVocabulary:
    """Every third token of the zoo's vocabulary and the end of a text, by default."""
    chosen = sorted({*range(0, target().vocab_size, 3), *target().end_ids}) if kept is None else kept
    fields = {"vocab_size": target().vocab_size, "tokenizer": vocabulary_fingerprint(target().tokenizer), **changes}
    return DraftVocabulary(ids=chosen, **fields)  # type: ignore[arg-type]


def folder(place: Path, kept: Sequence[int] | None = None, **changes: object) -> str:
    vocabulary(kept, **changes).save(place)
    return str(place)


def trimmed(method: dict[str, object], place: str | None, **options: object) -> LLM:
    given = {"num_speculative_tokens": 4} if method["method"] == "draft_model" else {}
    return with_config({**method, **given, "draft_vocab": place}, **options)


def drafted(llm: LLM) -> list[Draft]:
    """Every draft that is proposed from now on."""
    seen: list[Draft] = []
    propose = llm.recipe.drafter.propose

    def watched(contexts, budgets):  # type: ignore[no-untyped-def]
        drafts = propose(contexts, budgets)
        seen.extend(drafts)
        return drafts

    llm.recipe.drafter.propose = watched  # type: ignore[method-assign]
    return seen


@every_method
def test_text_is_the_target_s_and_drafts_are_of_kept_tokens_and_those_of_the_request(
    method: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_columns, "LEAVE_AT", 1.0)  # a third of the vocabulary misses much
    llm = trimmed(method, folder(tmp_path))
    seen = drafted(llm)
    outputs = llm.generate(list(SOME), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    assert ids(outputs) == [greedy(prompt, 24) for prompt in SOME]
    own = {
        token
        for prompt, output in zip(SOME, outputs, strict=True)
        for token in (*prompt_ids(prompt), *output.token_ids)
    }
    tokens = {token for draft in seen for token in draft.tree.tokens}
    assert tokens
    assert tokens <= {*vocabulary().ids, *own}
    assert_idle(llm)


@every_method
def test_all_tokens_kept_is_the_untrimmed_drafter_bit_for_bit(method: dict[str, object], tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    proposals = []
    for place in (None, folder(tmp_path, range(target().vocab_size))):
        llm = trimmed(method, place)
        seen = drafted(llm)
        llm.generate([SOME[0]], params)
        proposals.append(seen)
    assert len(proposals[0]) == len(proposals[1])
    for whole, kept in zip(*proposals, strict=True):
        assert whole.tree.tokens == kept.tree.tokens
        if isinstance(whole.law, Sampled):
            assert isinstance(kept.law, Sampled)
            assert torch.equal(whole.law.q_KV, kept.law.q_KV)


@every_method
def test_a_seeded_request_drafts_the_same_alone_and_in_a_batch(method: dict[str, object], tmp_path: Path) -> None:
    """Others bring context rows of their own, and one of them has fallen back to the whole head."""
    llm = trimmed(method, folder(tmp_path))
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=11)
    alone = [ids(llm.generate([prompt], params))[0] for prompt in SOME]
    assert ids(llm.generate(list(SOME), params)) == alone


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@every_method
def test_where_no_kept_token_may_be_emitted_the_draft_is_empty(
    method: dict[str, object], temperature: float, tmp_path: Path
) -> None:
    """Only the ends of a text are kept, and none of them may come yet: the request lives, one token a step."""
    llm = trimmed(method, folder(tmp_path, sorted(target().end_ids), context_rows=0))
    seen = drafted(llm)
    params = SamplingParams(max_tokens=8, min_tokens=8, temperature=temperature, seed=1)
    (output,) = llm.generate([SOME[0]], params)
    assert output.error is None
    assert len(output.token_ids) == 8
    assert seen
    assert not any(len(draft) for draft in seen)


def test_the_end_of_a_text_can_be_drafted(tmp_path: Path) -> None:
    llm = trimmed(METHODS[0], folder(tmp_path, sorted(target().end_ids), context_rows=0))
    seen = drafted(llm)
    llm.generate([SOME[0]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert {token for draft in seen for token in draft.tree.tokens} <= set(target().end_ids)
    assert any(len(draft) for draft in seen)


# ------------------------------------------------------------------ context rows


def columns(**changes: object) -> DraftColumns:
    return DraftColumns(target(), vocabulary(range(10), **changes), target().vocab_size)


def tail(found: DraftColumns) -> list[int]:
    assert found.head is not None
    return found.head.columns.ids_C[10:].tolist()


def test_context_rows_are_the_most_frequent_of_the_prompt_and_then_those_of_the_output() -> None:
    found = columns(context_rows=4)
    request = make_request([50, 40, 3, 40, 60, 50, 40], vocab_size=target().vocab_size)
    found.begin([request])
    assert tail(found) == [40, 50, 60]
    request.tokens += [7, 60, 90, 91]
    found.begin([request])
    assert tail(found) == [40, 50, 60, 90]
    again = columns(context_rows=4)  # rebuilt from the tokens, as after a fork
    again.begin([request])
    assert tail(again) == tail(found)
    found.release(request.request_id)
    other = make_request([5, 70], vocab_size=target().vocab_size)
    found.begin([other])
    assert tail(found) == [70]


def test_rows_of_any_tail_give_the_logits_of_the_whole_head() -> None:
    found = columns()
    hidden_MD = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    whole_MV = target().score(hidden_MD).logits_MV
    tails = ([40, 50], [40, 50, 60], [60], [], list(range(100, 400)))
    for wanted in tails:
        assert found.head is not None
        found.head.set_tail(wanted)
        output = target().score(hidden_MD, head=found.head, top=2)
        assert output.columns is not None
        assert torch.equal(output.logits_MV, whole_MV[:, [*range(10), *wanted]])
        best = output.logits_MV.argmax(-1)
        assert list(output.best) == output.columns.ids_C[best].tolist()
        assert list(output.top_ids[::2]) == list(output.best)


def test_a_target_table_may_be_padded_beyond_the_draft_s() -> None:
    """Its distribution is over the target's tokens; those that the draft has no row for are no context rows."""
    beyond = target().vocab_size + 50
    found = DraftColumns(target(), vocabulary(range(10)), beyond)
    found.begin([make_request([beyond - 1, 70], vocab_size=beyond)])
    assert tail(found) == [70]
    assert found.head is not None
    assert found.head.columns.vocab_size == beyond


# ------------------------------------------------------------------ fall-back


def step(found: DraftColumns, request_id: int, tokens: list[int], accepted: int, extra: int) -> None:
    """A chain of which some tokens stood."""
    draft = Draft(TokenTree(tokens))
    path = tuple(range(accepted))
    found.observe([Outcome(request_id, draft, Verdict(path, extra), (*tokens[:accepted], extra))])


def test_a_request_that_misses_much_scores_all_tokens_until_it_would_miss_little() -> None:
    found = columns(context_rows=0)
    rare, common = make_request([1], vocab_size=target().vocab_size), make_request([2], vocab_size=target().vocab_size)
    for _ in range(20):
        found.begin([rare, common])
        step(found, rare.request_id, [1, 2, 3], 1, 77)
        step(found, common.request_id, [1, 2, 3], 3, 77)  # a bonus without a draft is no miss
    found.begin([rare, common])
    assert found.rows is None
    found.begin([common])
    assert found.rows is found.head
    for _ in range(60):
        found.begin([rare])
        step(found, rare.request_id, [1, 2, 3], 3, 4)
    found.begin([rare])
    assert found.rows is found.head


def test_refusals_that_kept_tokens_correct_are_no_reason_to_fall_back() -> None:
    found = columns(context_rows=0)
    request = make_request([1], vocab_size=target().vocab_size)
    for _ in range(40):
        found.begin([request])
        step(found, request.request_id, [1, 2, 3], 1, 9)
    found.begin([request])
    assert found.rows is found.head


def test_a_request_sees_its_own_columns_of_a_forward_of_all_tokens() -> None:
    found = columns()
    whole, kept = (make_request([1, token], vocab_size=target().vocab_size) for token in (70, 80))
    for _ in range(20):
        found.begin([whole])
        step(found, whole.request_id, [1, 2, 3], 1, 77)
    found.begin([whole, kept])
    assert found.rows is None
    output = target().score(torch.randn(2, 384, generator=torch.Generator().manual_seed(0)), top=1)
    assert found.view(output, 0, 1, whole, top=1, own=True) == (output, 0)
    seen, row = found.view(output, 1, 2, kept, top=1, own=True)
    assert row == 0
    assert seen.columns is not None
    assert seen.columns.ids_C.tolist() == [*range(10), 80]
    assert torch.equal(seen.logits_MV, output.logits_MV[1:, [*range(10), 80]])
