"""Kangaroo's adapter: one attention layer between an early layer of a target and the target's own head.

    f (residual stream after exit_layer layers) ── norm ── attention ──(+)── norm ── the target's head
                                                └──────────────────────┘

:meth:`Adapter.forward` is the network of the paper, and runs in training. ``runner.py`` computes the same for packed
rows over a cache, with torch or in native code; tests compare the two.

Paper: arXiv:2404.18911, section 3.1. No MLP; 4 d^2 + 2 d parameters with as many key/value heads as query heads.
Differs: rotary positions always pair element i with i + head_dim / 2, also if the target pairs them differently.

Letters: B sequences, T rows, D width, H query heads, G key/value heads, d head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, UnsupportedArchitecture
from foretoken.drafting.feature_heads.block import AttentionConfig, attention_of, rotate
from foretoken.drafting.learned_part import LearnedPart
from foretoken.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(AttentionConfig):
    """Sizes of an adapter, and its target.

    Attributes:
        exit_layer: number of target layers below it.
        rope_theta: as in the target, like all sizes.
    """

    from_zero = ("exit_layer",)

    exit_layer: int
    rope_theta: float

    @classmethod
    def for_target(cls, config: Any, exit_layer: int, target: str, fingerprint: str) -> "AdapterConfig":
        """Return the config of an adapter that fits a model of transformers.

        Where layers differ from each other, the adapter has the shape of the layer below it. Its rotary frequencies
        follow from the target's base alone, without a scaling for long contexts (linear, llama3, yarn).

        Args:
            config: the target's configuration.
        Raises:
            UnsupportedArchitecture: the target has no attention, so the adapter's attention has no shape.
        """
        text = config.get_text_config(decoder=True)
        below = max(0, exit_layer - 1)
        layers = getattr(text, "per_layer_config", None)  # in model families with heads of several sizes
        if layers:
            text = layers[below]
        heads = getattr(text, "num_attention_heads", None)
        if not heads:
            raise UnsupportedArchitecture(
                f"'{target}' is of type '{text.model_type}', which has no attention: no Kangaroo adapter fits it, as "
                "its attention has the target's shape; use method='draft_model' or 'suffix'"
            )
        rope = getattr(text, "rope_parameters", None) or {}
        kinds = getattr(text, "layer_types", None) or ()
        if below < len(kinds):
            rope = rope.get(kinds[below], rope)  # one table per type of layer, or one for all
        return cls(
            exit_layer=exit_layer, **attention_of(text, heads, rope), target=target, target_fingerprint=fingerprint
        )


class Adapter(LearnedPart, nn.Module):
    """The adapter: its weights and the plain forward pass."""

    algorithm = "kangaroo"
    title = "Kangaroo adapter"
    option = "adapter"
    Config = AdapterConfig
    shelf = "exit-*"  # one folder for each depth

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm_in = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.q_proj = nn.Linear(config.width, inner, bias=False)
        self.k_proj = nn.Linear(config.width, kv, bias=False)
        self.v_proj = nn.Linear(config.width, kv, bias=False)
        self.o_proj = nn.Linear(inner, config.width, bias=False)
        self.norm_out = nn.RMSNorm(config.width, eps=config.norm_eps)

    def forward(self, f_BTD: Tensor) -> Tensor:
        """Return A(f), the inputs of the target's head, [B, T, D], for whole texts (section 3.1).

            u = RMSNorm_in(f)      y = f + Wo CausalMHA(RoPE(Wq u), RoPE(Wk u), Wv u)      A(f) = RMSNorm_out(y)

        Args:
            f_BTD: residual stream of the target after ``exit_layer`` layers, at positions 0, 1, ..
        """
        heads = (-1, self.config.head_dim)
        cos_Th, sin_Th = self.rotary_at(torch.arange(f_BTD.shape[1], device=f_BTD.device))
        u_BTD = self.norm_in(f_BTD)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BHTd, k_BGTd, v_BGTd = (each(u_BTD).unflatten(-1, heads).transpose(1, 2) for each in projections)
        q_BHTd, k_BGTd = rotate(q_BHTd, cos_Th, sin_Th), rotate(k_BGTd, cos_Th, sin_Th)
        grouped = self.config.heads != self.config.kv_heads
        attended_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BGTd, v_BGTd, is_causal=True, enable_gqa=grouped)
        y_BTD = f_BTD + self.o_proj(attended_BHTd.transpose(1, 2).flatten(2))
        return self.norm_out(y_BTD)

    def rotary_at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at positions, float32 [T, head_dim / 2]."""
        half = self.config.head_dim // 2
        rates = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=positions_T.device) / half)
        angles = positions_T.to(torch.float64)[:, None] * rates
        return angles.cos().float(), angles.sin().float()

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights in bfloat16."""
        return {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}

    @classmethod
    def of(cls, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> "Adapter":
        """Build the adapter from a config and saved weights, float32.

        Raises:
            RuntimeError: config and weights do not fit each other.
        """
        adapter = cls(config)
        adapter.load_state_dict(tensors)
        return adapter.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: AdapterConfig | None = None) -> str:
        """Return the command that trains an adapter."""
        depth = 2 if config is None else config.exit_layer
        return f"foretoken train kangaroo --target {target} --exit-layer {depth} --out DIR"

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target that is too shallow, or has another shape of attention.

        Raises:
            MismatchError: names the differing field.
        """
        config = self.config
        if not 1 <= config.exit_layer < model.num_layers:
            raise MismatchError(
                f"the adapter exits after layer {config.exit_layer}, but '{model.name}' has {model.num_layers} "
                f"layers: train one with '{self.how(model.name, '')}'"
            )
        fitting = AdapterConfig.for_target(model.config, config.exit_layer, config.target, config.target_fingerprint)
        for name in ("width", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(config, name), getattr(fitting, name)
            if ours != theirs:
                raise MismatchError(f"the adapter's {name} is {ours}, but that of '{model.name}' is {theirs}")
