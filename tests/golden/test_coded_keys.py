"""Keys and values that are narrower than computed: codes of 8 bits, bfloat16, a row's bits, memory, and refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.models.quantised.rounding import round_weights
from foretoken.native import build
from helpers.coded_rows import RoundedAttention, rounded
from helpers.golden import BRANCH, PARENTS, LayerPlan, Session
from helpers.native_models import error, make, text, twins
from helpers.tiny_models import save_model

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine to write codes")


@pytest.mark.parametrize("family", ["llama", "llama, odd width", "mistral, window", "gemma2", "olmo2", "glm4"])
def test_coded_keys_equal_the_written_definition(family: str) -> None:
    """Attention over keys and values that were rounded, each head's row by itself; without that, other numbers."""
    coded, _ = make(family, torch.float32, kv_cache_dtype="int8")
    twin, _ = twins(family, torch.float32)
    general = LanguageModel(twin, None, name=family, packed=False)
    tokens = text(75)
    found, expected, unrounded = (
        torch.cat([session.chunk(slot, tokens[a:b]) for a, b in ((0, 40), (40, 41), (41, 75))])
        for session in (Session(coded), Session(general, plan=RoundedAttention), Session(general, plan=LayerPlan))
        for slot in (session.cache.acquire(),)
    )
    near, far = ((each - expected).std() / expected.std() for each in (found, unrounded))
    assert near < far / 10  # a key in the middle between two codes may go either way


def test_a_row_is_a_scale_and_codes() -> None:
    """The very bits, in the first layer, with the same inputs; a row too small to count and one of zeros, too."""
    model, _ = make("qwen2", torch.float32)
    with torch.no_grad():
        model.model.model.embed_tokens.weight[5:7] *= torch.tensor([[1e-33], [0.0]])
    rows = []
    for kv_dtype in (None, torch.uint8):
        session = Session(model)
        session.cache = KVCache(model.num_layers, 1, model.max_length, kv_dtype=kv_dtype)
        session.chunk(session.cache.acquire(), text(250))
        rows.append((session.cache.keys[0], session.cache.values[0]))
    for plain, codes in zip(*rows, strict=True):
        assert plain is not None
        assert codes is not None
        scale_GT1 = codes[0, :, :250, :4].contiguous().view(torch.float32)
        found_GTD = (codes[0, :, :250, 4:].float() - 128.0) * scale_GT1
        assert torch.equal(found_GTD, rounded(plain[0, :, :250]))


@pytest.mark.parametrize(
    ("dtype", "keys"), [(torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float32, "bfloat16")]
)
@pytest.mark.parametrize("family", ["llama", "mistral, window", "gemma2"])
def test_a_row_does_not_depend_on_its_company_bit_for_bit(family: str, dtype: torch.dtype, keys: str) -> None:
    """As tests/golden/test_native.py has it for elements; prefixes end within a tile of attention and on its edge."""
    model, _ = make(family, dtype, kv_cache_dtype=keys)
    tokens = (text(101) * 3)[:240]
    one = Session(model)
    slot = one.cache.acquire()
    single = torch.cat([one.chunk(slot, [token]) for token in tokens])
    for edges in ([0, 240], [0, 13, 30, 31, 60, 120, 240], [0, 5, 10, 200, 240]):
        other = Session(model)
        slot = other.cache.acquire()
        chunked = torch.cat([other.chunk(slot, tokens[a:b]) for a, b in itertools.pairwise(edges)])
        assert torch.equal(chunked, single)

    tree = TokenTree(text(len(PARENTS), 2), PARENTS)
    session = Session(model)
    first, second, third = (session.cache.acquire() for _ in range(3))
    session.chunk(first, tokens[:237])
    session.chunk(second, tokens[:9])
    batch = PackedBatch()
    batch.add_chunk(second, 9, tokens[9:12], wanted=3)
    batch.add_tree(first, 237, tokens[237], tree)
    batch.add_chunk(third, 0, tokens[:33], wanted=1)
    rows = session.forward(batch)
    assert torch.equal(rows[:3], single[9:12])
    assert torch.equal(rows[-1], single[32])
    alone = Session(model)
    slot = alone.cache.acquire()
    alone.chunk(slot, tokens[:237])
    for node in range(-1, len(tree)):
        for token in (tokens[237], *(tree.tokens[i] for i in tree.path_to(node))):
            row = alone.chunk(slot, [token])[-1]
        assert torch.equal(rows[3 + node + 1], row)
        alone.cache.rollback(slot, 237)

    # after the branch is committed, the cache is what plain decoding would have left, and a fork is a copy of it
    session.cache.commit(first, [0, *(node + 1 for node in BRANCH)])
    for token in (tokens[237], *(tree.tokens[node] for node in BRANCH)):
        alone.chunk(slot, [token])
    twin = session.cache.fork(first)
    expected = alone.chunk(slot, [8])
    assert torch.equal(session.chunk(twin, [8]), expected)
    assert torch.equal(session.chunk(first, [8]), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    model, _ = make("llama", torch.bfloat16, kv_cache_dtype="int8")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_no_number_is_its_followers_alone(dtype: torch.dtype) -> None:
    """Its scale is not finite; whoever does not see it must not multiply by it, not even with a weight of zero."""
    model, _ = make("llama", dtype, kv_cache_dtype="int8")
    with torch.no_grad():
        model.model.model.embed_tokens.weight[5] = torch.nan
    session = Session(model)
    slot = session.cache.acquire()
    session.chunk(slot, [6 + token % 90 for token in text(22)])
    rows = session.draft(slot, 7, TokenTree([5, 9, 5, 11], [-1, -1, 1, 1]))  # two broken ones, each next to a sound one
    assert rows.isfinite().all(dim=1).tolist() == [True, False, True, False, True]
    sound, expected = session.draft(slot, 7, TokenTree([9, 11])), rows[[0, 2, 4]]
    assert torch.equal(sound, expected)
    chain = session.draft(slot, 9, TokenTree([5, 11]))  # the root's neighbour in a multiply-add of two columns
    assert chain.isfinite().all(dim=1).tolist() == [True, False, False]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_memory(dtype: str, share: int) -> None:
    """A head's row is its codes and a scale of 4 bytes."""
    sizes = []
    for kind in ("auto", "int8"):
        session = Session(load("zoo:base", dtype=dtype, device="cpu", kv_cache_dtype=kind))
        session.chunk(session.cache.acquire(), text(20))
        sizes.append(session.cache.num_bytes)
    width = session.model.config.head_dim
    assert sizes[1] * share * width == sizes[0] * (width + 4)


def test_where_they_cannot_be_had(tmp_path: Path) -> None:
    def refused(match: str, model: str, **options: object) -> None:
        with pytest.raises(ConfigError, match=match):
            LLM(model, device="cpu", kv_cache_dtype="int8", **options)  # type: ignore[arg-type]

    refused("not model .*: its type 'gpt_bigcode' is not one of", str(save_model("gpt_bigcode", tmp_path / "m")))
    refused("not model 'zoo:hybrid': it has state-space layers", "zoo:hybrid")
    refused("not model 'zoo:draft': its dtype is float16", "zoo:draft", dtype="float16")
    sparse = {"verification": {"attention": "per_head", "dense_below": 0}}
    refused("verification.attention reads keys and values as they", "zoo:draft", speculative_config=sparse)
    confirmed = {"verification": {"attention": "per_head", "dense_below": 0, "confirm": 4}}
    refused("verification.attention reads keys and values as they", "zoo:draft", speculative_config=confirmed)
    with pytest.raises(ConfigError, match=r"computes keys and values in torch\.bfloat16"):
        LLM("zoo:draft", device="cpu", dtype="bfloat16", kv_cache_dtype="float32")
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' must be one of 'auto', 'float32', 'bfloat16', 'int8'"):
        LLM("zoo:draft", device="cpu", kv_cache_dtype="fp8")


@pytest.mark.parametrize(("kind", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_keys_are_bfloat16_next_to_quantised_weights_or_as_the_option_says(kind: str, dtype: torch.dtype) -> None:
    twin, _ = twins("llama", torch.float32)
    round_weights(twin, "int8", "llama")
    session = Session(LanguageModel(twin, None, name="llama", kv_cache_dtype=kind))
    session.chunk(session.cache.acquire(), text(3))
    assert session.cache.keys[0] is not None
    assert session.cache.keys[0].dtype == dtype


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_keys_change_little_whichever_path_reads_them(family: str) -> None:
    rounded_keys, own = (make(family, torch.float32, kv_cache_dtype=kind)[0] for kind in ("bfloat16", "auto"))
    found, general, expected = (
        session.chunk(session.cache.acquire(), text(100))
        for session in (Session(rounded_keys), Session(rounded_keys, plan=LayerPlan), Session(own))
    )
    assert rounded_keys.new_cache(1).kv_dtype == torch.bfloat16
    assert own.new_cache(1).kv_dtype is None
    for rows in (found, general):
        assert 0 < (rows - expected).std() / expected.std() < 0.04


def test_a_plan_that_reads_keys_itself_is_refused() -> None:
    model, _ = make("llama", torch.float32, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="a plan has to read keys and values"):
        Session(model, plan=LayerPlan).chunk(0, text(3))


def test_a_model_of_its_own() -> None:
    """Close to the original, and not the same."""
    (coded, _), (own, _) = make("qwen3", torch.float32, kv_cache_dtype="int8"), make("qwen3", torch.float32)
    rows = []
    for model in (coded, own):
        session = Session(model, plan=DensePlan)
        rows.append(session.chunk(session.cache.acquire(), text(60)))
    assert 1e-4 < error(*rows) < 0.5
