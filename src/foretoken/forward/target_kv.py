"""The target's last layer of full attention: its index, its sizes, and the rotary tables of its keys.

A drafter that reads this layer's keys in place must rotate its own queries by the same tables: the same base, the same
scaling for long contexts, and the factor that such a scaling puts on cos and sin.

Letters: T rows, d head width, G key/value heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy

# Families that rotate the keys of all layers by one table, element i paired with i + half of the table's width.
FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
_TABLES = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the sequence


@dataclass(frozen=True, slots=True)
class TargetKV:
    """The layer that caches keys and values of the whole context, and the parameters of a query against them.

    Attributes:
        layer: index in the target, from 0.
        heads, kv_heads, head_dim: of its attention.
        rotary: the target's module of rotary tables.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Any

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin on the target's device, float32 [T, d / 2 or less], the attention factor included."""
        device = self.rotary.inv_freq.device
        with torch.no_grad():
            cos, sin = self.rotary(torch.zeros(1, 1, device=device), positions_T[None].to(device))
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]


def apply_rotary(x: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Apply rotary positions to [..., T, d]; elements beyond the tables' width stay unchanged."""
    half = cos_Th.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    pieces = [left * cos_Th - right * sin_Th, right * cos_Th + left * sin_Th]
    return torch.cat([*pieces, x[..., 2 * half :]] if 2 * half < x.shape[-1] else pieces, dim=-1)


def find(model: Any, name: str) -> TargetKV:
    """Find the last layer of full attention in a causal language model of transformers.

    Args:
        name: of the model, for messages.
    Raises:
        UnsupportedArchitecture: no layer sees the whole context, or the rotation of its keys is not a known one.
    """
    text = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedArchitecture(
            f"'{name}' is of type '{kind}': the angles of its keys are not known, only those of "
            f"{', '.join(sorted(FAMILIES))}; use method='draft_model' or 'suffix'"
        )
    layer = last_full_layer(text)
    if layer is None:
        raise UnsupportedArchitecture(
            f"'{name}' has no layer of full attention: all of its {text.num_hidden_layers} layers see a window of "
            f"{text.sliding_window} positions; use method='draft_model' or 'suffix'"
        )
    rotary = getattr(anatomy.find(model).body, "rotary_emb", None)
    tables = getattr(rotary, "rope_type", None)
    if tables not in _TABLES:
        raise UnsupportedArchitecture(
            f"'{name}' has rotary tables of type '{tables}': known are {', '.join(sorted(_TABLES))}"
        )
    heads = text.num_attention_heads
    return TargetKV(
        layer=layer,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rotary=rotary,
    )


def last_full_layer(text: Any) -> int | None:
    """Return the last layer without a window, from a decoder's configuration; None: all layers have one."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"]
        kinds *= text.num_hidden_layers
    return max((layer for layer, kind in enumerate(kinds) if kind == "full_attention"), default=None)
