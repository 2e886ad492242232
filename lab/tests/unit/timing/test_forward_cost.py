"""What a verification forward costs on paper, against counts written out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.forward import attention
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.models.language_model import LanguageModel
from foretoken.models.quantised.rounding import round_weights
from foretoken_lab.timing.forward_cost import AttentionShapes


def make(kind: str, dtype: str | None = None, **options: object) -> LanguageModel:
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            **options,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    if dtype is not None:
        round_weights(model, dtype, kind)
    return LanguageModel(model.eval(), None, name=kind)


def test_dense_counts_every_column_of_every_row() -> None:
    model = make("llama")
    cost = AttentionShapes(model).cost(100, 3, None)
    columns = 101 + 102 + 103
    assert cost.attention_flops == 3 * 4 * (2 * 16 + 2 * 16) * columns
    assert cost.flops == cost.attention_flops + 2 * 3 * model.num_parameters
    assert cost.bytes == 4 * (model.num_parameters + 3 * 2 * 2 * 16 * 103)
    assert cost.read == 1.0


@pytest.mark.parametrize(
    ("score", "products", "numbers"),
    [
        ("mean", 2 * 16 * 6, 2 * 16 * 6),
        ("bounds", 2 * 2 * 16 * 6, 2 * 2 * 16 * 6),
        ("exact", 4 * 16 * 100, 2 * 16 * 48),
    ],
)
@pytest.mark.parametrize(("anchors", "choosing"), [(None, 3), ([2], 2)], ids=["all", "first and one"])
def test_sparse_counts_the_kept_columns_and_the_layers_that_select(
    anchors: list[int] | None, choosing: int, score: str, products: int, numbers: int
) -> None:
    """``exact``: four heads times every column; of the keys, 48 of a head's 100 are read for nothing else."""
    model = make("llama")
    sparse = SparseAttention(BlockRule(budget=0.5, dense_below=0, size=16, score=score), anchors)
    cost = AttentionShapes(model).cost(100, 3, sparse)
    kept = 3 * 16 + 4  # floor(50 * 2 / 16) = 6 blocks of a layer; 96 of 100 rows are in whole blocks
    assert cost.attention_flops == 3 * 4 * (2 * 16 + 2 * 16) * (3 * kept + 1 + 2 + 3) + 2 * choosing * products
    assert cost.bytes == 4 * (model.num_parameters + 3 * 2 * 2 * 16 * (kept + 3) + choosing * numbers)
    assert cost.read == pytest.approx(kept / 100)


def test_where_all_rows_vote_each_has_a_product_with_every_key() -> None:
    shapes = AttentionShapes(make("llama"))
    root, votes = (
        shapes.cost(100, 3, SparseAttention(BlockRule(budget=0.5, dense_below=0, size=16, voters=voters)))
        for voters in ("root", "all")
    )
    assert votes.attention_flops - root.attention_flops == 2 * 3 * 2 * 4 * 16 * 100


def test_a_window_bounds_reads_and_untied_embeddings_are_not_multiplied() -> None:
    model = make("mistral", sliding_window=20, tie_word_embeddings=False)
    cost = AttentionShapes(model).cost(100, 2, SparseAttention(BlockRule(budget=0.1, dense_below=0, size=16)))
    assert cost.read == pytest.approx(0.2)
    assert cost.flops - cost.attention_flops == 2 * 2 * (model.num_parameters - 100 * 32)


def test_of_routed_experts_a_row_uses_its_share() -> None:
    model = make("qwen3_moe", num_experts=4, num_experts_per_tok=1, moe_intermediate_size=24, norm_topk_prob=True)
    cost = AttentionShapes(model).cost(100, 2, None)
    experts = 3 * 4 * 3 * 24 * 32
    assert cost.flops - cost.attention_flops == 2 * 2 * (model.num_parameters - experts * 3 // 4)
    assert cost.bytes == 4 * (model.num_parameters + 3 * 2 * 2 * 16 * 102)


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_codes_are_read_with_their_scales_and_the_table_is_not(dtype: str, bits: int) -> None:
    plain, coded = make("llama"), make("llama", dtype)
    norms, columns = 4 * 7 * 32, 4 * 3 * 2 * 2 * 16 * 103
    elements = plain.num_parameters - 7 * 32  # the head, which is the embedding, among them
    # float16, one scale for 32 elements, and a minimum in int4; keys and values in bfloat16
    scales = 2 * (elements // 32) * (1 if dtype == "int8" else 2)
    assert AttentionShapes(plain).cost(100, 3, None).bytes == 4 * elements + norms + columns
    assert AttentionShapes(coded).cost(100, 3, None).bytes == elements * bits // 8 + scales + norms + columns // 2
