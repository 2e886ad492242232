"""Our decoder layers (block.py) in the form that the native decoder takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from foretoken.drafting.feature_heads.block import AttentionConfig, BlockConfig
from foretoken.drafting.feature_heads.block import Block as DraftBlock
from foretoken.models.language_model import LanguageModel
from foretoken.models.quantised.rounding import rounded_as
from foretoken.native.layout import Block, Layout, Projection


def fits(config: BlockConfig) -> bool:
    """Whether the native decoder takes layers of these sizes."""
    head_dim = config.head_dim
    return head_dim % 16 == 0 and head_dim <= 512 and config.width % 32 == 0 and config.mlp_width % 32 == 0


def described(config: AttentionConfig, target: LanguageModel, blocks: Sequence[Block], **others: Any) -> Layout:
    """Layers of these sizes as a decoder.

    Args:
        target: has a native decoder.
        blocks: the layers.
        others: further fields of :class:`Layout`.
    """
    return Layout(
        dtype=target.dtype,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scaling=config.head_dim**-0.5,
        num_blocks=len(blocks),
        blocks=blocks,
        **others,
    )


def native_block(layer: DraftBlock, norm_W: Tensor | None, skipped: int = 0) -> Block:
    """One layer.

    Args:
        norm_W: gain of the norm before attention; None: there is none.
        skipped: leading columns of queries, keys and values that are computed elsewhere.
    """
    parts, mlp = layer.self_attn, layer.mlp
    q, k, v = (Projection(each.weight[:, skipped:], each.bias) for each in (parts.q_proj, parts.k_proj, parts.v_proj))
    return Block(
        q=q,
        k=k,
        v=v,
        out=Projection(parts.o_proj.weight, parts.o_proj.bias),
        attention_norm_D=norm_W,
        q_norm_d=None if parts.q_norm is None else parts.q_norm.weight,
        k_norm_d=None if parts.k_norm is None else parts.k_norm.weight,
        window=layer.window or 0,
        gate=Projection(mlp.gate_proj.weight),
        up=Projection(mlp.up_proj.weight),
        down=Projection(mlp.down_proj.weight),
        mlp_norm_D=layer.post_attention_layernorm.weight,
    )


def rounded_block(block: Block, rounding: str | None) -> Block:
    """The layer with all its projections rounded, or as it is."""
    names = ("q", "k", "v", "out", "gate", "up", "down")
    parts: dict[str, Any] = {name: rounded(getattr(block, name), rounding, name) for name in names}
    return replace(block, **parts)


def rounded(part: Projection, rounding: str | None, name: str = "lm_head") -> Projection:
    """The projection with a rounded weight, or as it is.

    Args:
        rounding: one of ``SCHEMES``, or None.
        name: for messages.
    """
    if rounding is None:
        return part
    assert isinstance(part.weight_OK, Tensor)
    return part._replace(weight_OK=rounded_as(part.weight_OK, rounding, name, "head"))
