"""The native CPU decoder against the library, and its own promise: a row's result depends on nothing but its past."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.core.tree import TokenTree
from foretoken.forward import attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.adoption import fit
from foretoken.models.language_model import LanguageModel
from foretoken.native import build
from helpers.golden import BRANCH, PARENTS, LayerPlan, Session
from helpers.native_models import COMMON, FAMILIES, error, make, plain, text

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

UNCOMMON = ("smollm3", "phi3", "granite", "olmo2", "gemma2", "gemma3", "glm4", "gpt_neox", "phi", "cohere", "nemotron")
GEMMA4 = ("gemma4, shared keys and inputs", "gemma4, values are keys")
PARALLEL = "stablelm, parallel, heads normed"


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_chain_and_tree_match_the_library_in_float32(family: str) -> None:
    model, reference = make(family, torch.float32)
    session = Session(model)
    slot = session.cache.acquire()
    tokens = text(75)
    expected = plain(reference, tokens)
    chunks = torch.cat([session.chunk(slot, tokens[a:b]) for a, b in ((0, 40), (40, 41), (41, 75))])
    assert error(chunks, expected) < 1e-4

    tree = TokenTree(text(len(PARENTS), 2), PARENTS)
    root = 7
    paths = [[*tokens, root, *(tree.tokens[i] for i in tree.path_to(node))] for node in range(-1, len(tree))]
    expected = torch.stack([plain(reference, path)[-1] for path in paths])
    for rows in (session.draft(slot, root, tree), session.levels(slot, root, tree)):
        assert all(error(row, row_of_path) < 1e-4 for row, row_of_path in zip(rows, expected, strict=True))

    session.draft(slot, root, tree)
    session.cache.commit(slot, [0, *(node + 1 for node in BRANCH)])
    after = session.chunk(slot, [9, 10])
    path = [*tokens, root, *(tree.tokens[node] for node in BRANCH), 9, 10]
    assert error(after, plain(reference, path)[-2:]) < 1e-4


def test_a_wrong_position_is_far_outside_the_tolerance() -> None:
    model, reference = make("llama", torch.float32)
    session = Session(model)
    slot = session.cache.acquire()
    tokens = text(20)
    batch = PackedBatch()
    batch.add_chunk(slot, 0, tokens, wanted=20)
    batch.positions[10:] = [position + 1 for position in batch.positions[10:]]
    assert error(session.forward(batch), plain(reference, tokens)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen2", "qwen3", "youtu", *UNCOMMON, *GEMMA4])
def test_bfloat16_is_as_close_to_exact_as_the_library_is(family: str) -> None:
    model, reference = make(family, torch.bfloat16)
    tokens = text(60)
    session = Session(model)
    ours = session.chunk(session.cache.acquire(), tokens)
    theirs = plain(reference, tokens)
    exact = plain(reference.float(), tokens)
    assert error(ours, exact) <= 1.1 * error(theirs, exact)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "mistral, window", "qwen3", "olmo2", "gemma2", "glm4", "youtu", PARALLEL, *GEMMA4]
)
def test_a_row_does_not_depend_on_its_company_bit_for_bit(family: str, dtype: torch.dtype | str) -> None:
    """One token at a time, as plain decoding does, is the measure; every other way must give the same bits."""
    model, _ = make(family, dtype)
    tokens = text(60)
    one = Session(model)
    slot = one.cache.acquire()
    single = torch.cat([one.chunk(slot, [token]) for token in tokens])

    for edges in ([0, 60], [0, 13, 30, 31, 60], [0, 5, 10, 60], [0, 14, 60]):
        other = Session(model)
        slot = other.cache.acquire()
        chunked = torch.cat([other.chunk(slot, tokens[a:b]) for a, b in itertools.pairwise(edges)])
        assert torch.equal(chunked, single)

    # a tree, in a packed batch with a prompt and another request, each row against its own path read token by token
    tree = TokenTree(text(len(PARENTS), 2), PARENTS)
    session = Session(model)
    first, second, third = (session.cache.acquire() for _ in range(3))
    session.chunk(first, tokens[:50])
    session.chunk(second, tokens[:9])
    batch = PackedBatch()
    batch.add_chunk(second, 9, tokens[9:12], wanted=3)
    batch.add_tree(first, 50, tokens[50], tree)
    batch.add_chunk(third, 0, tokens[:33], wanted=1)
    rows = session.forward(batch)
    assert torch.equal(rows[:3], single[9:12])
    assert torch.equal(rows[-1], single[32])
    for node in range(-1, len(tree)):
        path = [tokens[50], *(tree.tokens[i] for i in tree.path_to(node))]
        alone = Session(model)
        slot = alone.cache.acquire()
        alone.chunk(slot, tokens[:50])
        last = torch.cat([alone.chunk(slot, [token]) for token in path])[-1]
        assert torch.equal(rows[3 + node + 1], last)

    # after the branch is committed, the cache is what plain decoding would have left
    session.cache.commit(first, [0, *(node + 1 for node in BRANCH)])
    path = [tokens[50], *(tree.tokens[node] for node in BRANCH)]
    alone = Session(model)
    slot = alone.cache.acquire()
    alone.chunk(slot, tokens[:50])
    for token in path:
        alone.chunk(slot, [token])
    assert torch.equal(session.chunk(first, [8]), alone.chunk(slot, [8]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int, dtype: torch.dtype | str) -> None:
    model, _ = make("llama", dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (2, threads):
            torch.set_num_threads(count)
            session = Session(model)
            results.append(session.chunk(session.cache.acquire(), text(70)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("family", "dtype", "keys"),
    [
        ("llama", torch.float32, "auto"),
        ("llama, one group", torch.bfloat16, "auto"),
        ("llama", torch.bfloat16, "int8"),
        ("gemma2", torch.bfloat16, "auto"),  # scores are capped, and some layers have windows
    ],
)
def test_attention_that_is_divided_by_columns_changes_nothing(
    family: str, dtype: torch.dtype, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns 1024 and 2048 begin a span; several threads divide few rows by spans, and one does not."""
    monkeypatch.setitem(COMMON, "max_position_embeddings", 2304)
    model, reference = make(family, dtype, kv_cache_dtype=keys)
    tokens, tree = text(2070), TokenTree(text(len(PARENTS), 2), PARENTS)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            session = Session(model)
            slot = session.cache.acquire()
            rows = [session.chunk(slot, tokens[:2040])]
            alone = session.cache.fork(slot)
            rows += [session.draft(slot, tokens[2040], tree)]
            for node in range(-1, len(tree)):
                own = session.cache.fork(alone)
                path = [tokens[2040], *(tree.tokens[i] for i in tree.path_to(node))]
                last = torch.cat([session.chunk(own, [token]) for token in path])[-1]
                assert torch.equal(rows[1][node + 1], last)
                session.cache.release(own)
            rows += [torch.cat([session.chunk(alone, [token]) for token in tokens[2040:]])]
            whole = session.cache.acquire()
            assert torch.equal(session.chunk(whole, tokens)[2040:], rows[2])
            results.append(torch.cat(rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    if dtype is torch.float32:
        assert error(rows[2], plain(reference, tokens)[2040:]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
def test_the_library_modules_still_work_over_the_packed_weights(dtype: torch.dtype | str) -> None:
    """A plan that is not described goes layer by layer through the library, over the same memory."""
    model, reference = make("qwen2", dtype)
    tokens = text(30)
    cache = model.new_cache(1)
    slot = cache.acquire()
    batch = PackedBatch()
    batch.add_chunk(slot, 0, tokens, wanted=30)
    cache.reserve(slot, 30)
    ours = model.forward(batch, LayerPlan(cache, batch)).logits_MV
    theirs = plain(reference, tokens)
    exact = plain(reference.float(), tokens)
    assert error(ours, exact) <= max(1e-4, 1.5 * error(theirs, exact))


def test_nan_weights_give_nan_logits() -> None:
    """The engine finds a broken model by its NaN logits, so they must come through."""
    model, _ = make("llama", torch.bfloat16)
    kept = model.native_decoder
    assert kept is not None
    with torch.no_grad():
        model.model.model.embed_tokens.weight[5] = torch.nan
    session = Session(model)
    slot = session.cache.acquire()
    assert torch.isnan(session.chunk(slot, [5])).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "quick_gelu"}, "activation"),
        ({"head_dim": 24}, "head width"),
        ({"intermediate_size": 100}, "widths"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rotary"),
    ],
)
def test_other_anatomies_take_the_general_path(change: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model("llama", **{**COMMON, **change})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    assert reason in (fit.misfit(model) or "")
    assert LanguageModel(model, None, name="other").native_decoder is None


def test_a_new_cache_where_an_old_one_lay_gets_buffers_of_its_own() -> None:
    """As old in reallocations, at the same address: nothing may be written where the old one's rows were."""
    model, _ = make("llama", torch.float32)
    batch = PackedBatch()
    batch.add_chunk(0, 0, [5, 6, 7], wanted=1)

    def used() -> tuple[int, int]:
        cache = model.new_cache(1)
        cache.reserve(cache.acquire(), 3)
        model.forward(batch, DensePlan(cache, batch))
        return id(cache), cache.generation

    address, generation = used()
    others = [model.new_cache(1)]
    while id(others[-1]) != address and len(others) < 1000:  # the interpreter may have given it to something else
        others.append(model.new_cache(1))
    fresh = others[-1]
    fresh.reserve(fresh.acquire(), 3)
    fresh.generation = generation
    model.forward(batch, DensePlan(fresh, batch))
    assert fresh.keys[0] is not None


@pytest.mark.parametrize("first", [0, 3, 15, 16, 37, 95, 96, 99])
def test_of_tied_tokens_the_first_is_the_best(first: int) -> None:
    """A row of the head twice and its negative twice: in one vector, in others, and after the last whole one."""
    opposite = (first + 50) % 100
    reference = make("llama", torch.float32)[1]
    head = torch.zeros_like(reference.lm_head.weight)
    for sign, place in ((1, first), (1, 100), (-1, opposite), (-1, 98)):
        head[place] = sign * reference.lm_head.weight.data[first]
    config = AutoConfig.for_model("llama", **COMMON)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME).eval()
    twin.load_state_dict({**reference.state_dict(), "lm_head.weight": head})
    model = LanguageModel(twin, None, name="tied")
    assert model.native_decoder is not None
    session = Session(model)
    batch = PackedBatch()
    batch.add_chunk(session.cache.acquire(), 0, text(20), wanted=20)
    output = model.forward(batch, DensePlan(session.cache, batch), top=1)
    assert list(output.best) == output.logits_MV.argmax(-1).tolist() == list(output.top_ids)
    assert set(output.best) == {first, opposite}
