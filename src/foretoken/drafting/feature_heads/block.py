"""Decoder layers of heads that draft from a target's hidden states, and the config fields that describe them.

Names of the weights are those of the speculators format.

Letters: T rows, W width, d head width.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.learned_part import LearnedConfig


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LearnedConfig):
    """What the layers of a head are, and whose; subclasses add how they are entered.

    Attributes:
        width, target_width: of the layers, and of the target's residual stream.
        heads, kv_heads, head_dim, mlp_width, rope_theta, norm_eps: of a layer.
        vocab_size, draft_vocab_size: V of the target, K that the head scores.
        norm_heads: norms over each head's query and key (Qwen3).
        attention_bias: of the four projections of attention.
        norm_output: the next feature is taken behind the final norm.
        max_length: positions that it was made for.
    """

    flags: ClassVar[tuple[str, ...]] = ("norm_heads", "attention_bias", "norm_output")
    sizes: ClassVar[tuple[str, ...]] = (
        "width",
        "target_width",
        "heads",
        "kv_heads",
        "head_dim",
        "mlp_width",
        "vocab_size",
        "draft_vocab_size",
        "max_length",
    )

    width: int
    target_width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    norm_heads: bool = False
    attention_bias: bool = False
    norm_output: bool = False
    max_length: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.sizes:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name}={value!r}")
        for name in self.flags:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is above the target's vocab_size={self.vocab_size}"
            )

    @property
    @abstractmethod
    def reads_final(self) -> bool:
        """Whether it reads what the target's final norm gives, and not states of the residual stream."""

    @abstractmethod
    def depths_of(self, num_layers: int) -> tuple[int, ...]:
        """The depths of a target of so many layers that it reads, in the order in which they are fused."""


def fields_for(
    config: Any, target: str, fingerprint: str, *, title: str, draft_vocab_size: int | None, mlp_width: int | None
) -> dict[str, Any]:
    """The fields of a :class:`BlockConfig` for a model of transformers.

    Its attention is like the target's; its MLP has by default a quarter of the target's channels, because drafting is
    bound by the weights that it reads.

    Args:
        config: the target's configuration.
        title: what messages call the head, as in "no TITLE fits it".
        draft_vocab_size: None: all of the vocabulary.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    text = config.get_text_config(decoder=True)
    try:
        width, heads = text.hidden_size, text.num_attention_heads
        text.num_hidden_layers  # noqa: B018  (whether it says so)
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{target}: no {title} fits it, its config does not say {error.name}") from None
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and "rope_theta" not in rope:  # one table for each type of layer
        rope = next((each for each in rope.values() if isinstance(each, dict)), {})
    quarter = (getattr(text, "intermediate_size", None) or 4 * width) // 4
    return {
        "width": width,
        "target_width": width,
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "mlp_width": mlp_width or max(32, quarter // 32 * 32),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "norm_eps": float(getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6),
        "vocab_size": text.vocab_size,
        "draft_vocab_size": draft_vocab_size or text.vocab_size,
        "max_length": getattr(text, "max_position_embeddings", None) or 4096,
        "target": target,
        "target_fingerprint": fingerprint,
    }


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weights; where products are computed in bfloat16, it gives what they read."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            found: Tensor = _Normed.apply(x, self.weight, self.eps, torch.get_autocast_dtype(kind))
            return found
        return super().forward(x.to(self.weight.dtype))


class _Normed(torch.autograd.Function):
    """RMSNorm in float32 that gives another dtype, in a third of the passes that the library's gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_W: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(wide, weight_W, scale)
        ctx.narrow = x.dtype
        return ((wide * scale).mul_(weight_W)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide, weight_W, scale = ctx.saved_tensors
        grad, unit = grads[0].float(), wide * scale
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grad * unit).flatten(0, -2).sum(0)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None, None
        grad = grad * weight_W
        inner = torch.linalg.vecdot(grad, unit).unsqueeze(-1).div_(-wide.shape[-1])
        return torch.addcmul(grad, unit, inner).mul_(scale).to(ctx.narrow), d_weight, None, None


class Attention(nn.Module):
    """Its projections, and norms of each head's query and key where the layer has them.

    Args:
        read: width of what queries, keys and values are made from.
    """

    def __init__(self, config: BlockConfig, read: int) -> None:
        super().__init__()
        inner, kv, bias = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(read, inner, bias=bias)
        self.k_proj = nn.Linear(read, kv, bias=bias)
        self.v_proj = nn.Linear(read, kv, bias=bias)
        self.o_proj = nn.Linear(inner, config.width, bias=bias)
        self.q_norm = Norm(config.head_dim, eps=config.norm_eps) if config.norm_heads else None
        self.k_norm = Norm(config.head_dim, eps=config.norm_eps) if config.norm_heads else None


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)


class Block(nn.Module):
    """A decoder layer.

    Args:
        paired: its attention reads a token and a feature side by side, each with a norm of its own (EAGLE-3).
        normed: it has a norm before attention, as every ordinary layer; without, and not paired: EAGLE-2's.
    """

    def __init__(self, config: BlockConfig, *, paired: bool = False, normed: bool = True) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, 2 * config.width if paired else config.width), Mlp(config)
        if normed:
            self.input_layernorm = Norm(config.width, eps=config.norm_eps)
        if paired:
            self.hidden_norm = Norm(config.width, eps=config.norm_eps)
        self.post_attention_layernorm = Norm(config.width, eps=config.norm_eps)


def rotate(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary positions on [..., T, d]; element i is paired with i + d / 2."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td], dim=-1)
