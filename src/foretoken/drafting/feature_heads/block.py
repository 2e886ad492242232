"""Decoder layers of draft networks over a target's hidden states, and the config fields that describe them.

Names of the weights are those of the speculators format.

Letters: T rows, W width, H query heads, G key/value heads, d head width.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.learned_part import LearnedConfig


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(LearnedConfig):
    """The sizes of attention layers, and the target.

    Attributes:
        width: of the layers.
        heads, kv_heads, head_dim: of their attention.
        norm_eps: of all norms.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}")


def attention_of(text: Any, heads: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an :class:`AttentionConfig`, and ``rope_theta``, of the layers of a model of transformers.

    Args:
        text: the configuration of its text decoder.
        rope: parameters of its rotary embedding.
    """
    return {
        "width": text.hidden_size,
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "norm_eps": float(getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6),
    }


@dataclass(frozen=True, kw_only=True)
class BlockConfig(AttentionConfig):
    """The sizes of decoder layers; subclasses add fields of the fusion and of the entry.

    Attributes:
        target_width: of the target's residual stream.
        mlp_width, rope_theta: of a layer.
        vocab_size, draft_vocab_size: V of the target, K that the LM head scores.
        norm_heads: norms over each attention head's query and key (Qwen3).
        attention_bias: of the four projections of attention.
        norm_output: the next feature is the output of the final norm.
        max_length: positions that it was trained for.
    """

    target_width: int
    mlp_width: int
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    norm_heads: bool = False
    attention_bias: bool = False
    norm_output: bool = False
    max_length: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is above the target's vocab_size={self.vocab_size}"
            )

    @property
    @abstractmethod
    def taps(self) -> Taps:
        """The target's states that are read."""


def fields_for(
    config: Any, target: str, fingerprint: str, *, title: str, draft_vocab_size: int | None, mlp_width: int | None
) -> dict[str, Any]:
    """The fields of a :class:`BlockConfig` for a model of transformers.

    Its attention is like the target's; its MLP has by default a quarter of the target's channels, because drafting is
    bound by the weights that it reads.

    Args:
        config: the target's configuration.
        title: the network's name in messages, as in "no TITLE fits it".
        draft_vocab_size: None: all of the vocabulary.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes, or its layers give more than one state a token.
    """
    text = config.get_text_config(decoder=True)
    try:
        width, heads = text.hidden_size, text.num_attention_heads
        text.num_hidden_layers  # noqa: B018  (whether it says so)
    except AttributeError as error:
        raise UnsupportedArchitecture(
            f"{target}: no {title} fits it, its config does not say {error.name}; use method='draft_model' or 'suffix'"
        ) from None
    if getattr(text, "altup_num_inputs", 1) > 1:
        raise UnsupportedArchitecture(
            f"{target}: no {title} fits it, its layers pass on {text.altup_num_inputs} hidden states a token; use "
            "method='draft_model' or 'suffix'"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and "rope_theta" not in rope:  # one table for each type of layer
        rope = next((each for each in rope.values() if isinstance(each, dict)), {})
    channels = getattr(text, "intermediate_size", None) or 4 * width
    if not isinstance(channels, int):  # one number for each layer
        channels = channels[-1]
    quarter = channels // 4
    return {
        **attention_of(getattr(text, "per_layer_config", [text])[0], heads, rope),
        "target_width": width,
        "mlp_width": mlp_width or max(32, quarter // 32 * 32),
        "vocab_size": text.vocab_size,
        "draft_vocab_size": draft_vocab_size or text.vocab_size,
        "max_length": getattr(text, "max_position_embeddings", None) or 4096,
        "target": target,
        "target_fingerprint": fingerprint,
    }


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weights; under autocast it returns the dtype that products read."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            return _Normed.apply(x, self.weight, self.eps, torch.get_autocast_dtype(kind))
        return super().forward(x.to(self.weight.dtype))


class _Normed(torch.autograd.Function):
    """RMSNorm in float32 that returns another dtype, in a third of the memory passes of torch's gradient."""

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
    """The projections, and norms of each attention head's query and key where the layer has them.

    Args:
        read: width of the input of queries, keys and values.
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

    def forward(self, u_TW: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(u_TW)) * self.up_proj(u_TW))


class Block(nn.Module):
    """A decoder layer of Llama or Qwen3.

    Args:
        paired: its attention reads a token and a feature side by side, each with a norm of its own (EAGLE-3).
        normed: it has a norm before attention, as every ordinary layer; without, and not paired: EAGLE-2's.
        window: positions that a row sees, itself included; None: all.

    Attributes:
        scaling: of the scores of attention.
    """

    def __init__(
        self, config: BlockConfig, *, paired: bool = False, normed: bool = True, window: int | None = None
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, 2 * config.width if paired else config.width), Mlp(config)
        if normed:
            self.input_layernorm = Norm(config.width, eps=config.norm_eps)
        if paired:
            self.hidden_norm = Norm(config.width, eps=config.norm_eps)
        self.post_attention_layernorm = Norm(config.width, eps=config.norm_eps)
        self._head_dim, self.scaling, self.window = config.head_dim, config.head_dim**-0.5, window

    def forward(self, read: Tensor, residual_TW: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """The layer over one text, plainly: causal attention over ``read``, and the MLP, each added to the residual.

        Args:
            read: input of attention, [T, W], or [T, 2W] with ``paired``.
        """
        q, k, v = self.project(read, cos_Td, sin_Td)
        k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
        seen_TT = torch.ones(len(read), len(read), dtype=torch.bool, device=read.device).tril()
        if self.window is not None:
            seen_TT = seen_TT.triu(1 - self.window)
        weights_HTT = (self.scaling * q @ k.mT).masked_fill(~seen_TT, -torch.inf).softmax(-1)
        return self.close(residual_TW, (weights_HTT @ v).transpose(0, 1).flatten(1))

    def project(self, read: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, T, d], keys and values [..., G, T, d], rotated.

        Args:
            read: [..., T, W], or [..., T, 2W] with ``paired``.
            cos_Td, sin_Td: of the rows' positions.
        """
        parts = self.self_attn
        heads = (projection(read) for projection in (parts.q_proj, parts.k_proj, parts.v_proj))
        q, k, v = (each.unflatten(-1, (-1, self._head_dim)).transpose(-2, -3) for each in heads)
        if parts.q_norm is not None and parts.k_norm is not None:
            q, k = parts.q_norm(q), parts.k_norm(k)
        return rotate(q, cos_Td, sin_Td).to(v.dtype), rotate(k, cos_Td, sin_Td).to(v.dtype), v

    def close(self, residual_TW: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, [..., W].

        Args:
            attended: values weighted by attention, [..., T, H d].
        """
        h_TW = residual_TW + self.self_attn.o_proj(attended)
        return h_TW + self.mlp(self.post_attention_layernorm(h_TW))


def rotate(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary positions on [..., T, d]; element i is paired with i + d / 2."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td], dim=-1)
