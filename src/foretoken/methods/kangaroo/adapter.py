"""Kangaroo's adapter: one attention layer between an early layer of a target and the target's own head.

    f (residual stream after exit_layer layers) ── norm ── attention ──(+)── norm ── the target's head
                                                └──────────────────────┘

Paper: arXiv:2404.18911, section 3.1. No MLP; 4 d^2 + 2 d parameters with as many key/value heads as query heads.
Differs: rotary positions always pair element i with i + head_dim / 2, whatever the target does.

Letters: B sequences, T rows, D width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError
from foretoken.core.protocols import Plan
from foretoken.drafting.learned_part import LearnedConfig, LearnedPart
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.models import grown
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.native.decoder import FusedDecoder
from foretoken.native.layout import Block, Head, Layout, Projection


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(LearnedConfig):
    """What an adapter is, and whose.

    Attributes:
        exit_layer: layers of the target below it.
        width: of the target's residual stream.
        heads, kv_heads, head_dim: of its attention; the target's.
        rope_theta, norm_eps: as in the target.
    """

    exit_layer: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("exit_layer", "width", "heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < (name != "exit_layer"):
                raise ValueError(f"{name}={value!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}")

    @classmethod
    def for_target(cls, config: Any, exit_layer: int, target: str, fingerprint: str) -> AdapterConfig:
        """The adapter that fits a model of transformers.

        Where layers differ from each other, it is like the layer below it. Its rotary frequencies are those of the
        target's base: a scaling for long contexts (linear, llama3, yarn) is not taken over.

        Args:
            config: the target's configuration.
        """
        text = config.get_text_config(decoder=True)
        below = max(0, exit_layer - 1)
        layers = getattr(text, "per_layer_config", None)  # of families whose layers have heads of several sizes
        if layers:
            text = layers[below]
        heads = text.num_attention_heads
        rope = getattr(text, "rope_parameters", None) or {}
        kinds = getattr(text, "layer_types", None) or ()
        if below < len(kinds):
            rope = rope.get(kinds[below], rope)  # one table for each type of layer, or one for all
        return cls(
            exit_layer=exit_layer,
            width=text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            norm_eps=float(getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6),
            target=target,
            target_fingerprint=fingerprint,
        )


class Adapter(LearnedPart, nn.Module):
    """The adapter's weights, and its arithmetic in the two forms that are needed: for training, and over a cache."""

    algorithm = "kangaroo"
    title = "Kangaroo adapter"
    option = "adapter"
    Config = AdapterConfig
    shelf = "exit-*"  # one folder for each depth
    grows = True
    old_files = ("adapter.json", "adapter.safetensors")

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
        """What the head reads, [B, T, D], for whole sequences whose positions count from 0."""
        batch, length, _ = f_BTD.shape
        cos_Td, sin_Td = self.rotary_tables(length, f_BTD.device)
        q, k, v = (each.view(batch, length, -1, self.config.head_dim).transpose(1, 2) for each in self._project(f_BTD))
        q, k = _rotate(q, cos_Td, sin_Td), _rotate(k, cos_Td, sin_Td)
        grouped = self.config.heads != self.config.kv_heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self._close(f_BTD, attended.transpose(1, 2).flatten(2))

    def over_cache(self, f_TD: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """What the head reads, [T, D], for packed rows over the plan's cache, into which keys and values go.

        Args:
            positions: int64 [T].
        """
        length = int(positions.max()) + 1
        cos_Td, sin_Td = (table[positions] for table in self.rotary_tables(length, f_TD.device))
        shape = (len(f_TD), -1, self.config.head_dim)
        q, k, v = (each.view(shape).transpose(0, 1) for each in self._project(f_TD))
        q, k = _rotate(q, cos_Td, sin_Td).to(v.dtype), _rotate(k, cos_Td, sin_Td).to(v.dtype)
        attended = plan.attend(0, q, k, v, scaling=self.config.head_dim**-0.5)
        return self._close(f_TD, attended.flatten(1))

    def rotary_tables(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [length, head_dim / 2]."""
        return self._rotary_at(torch.arange(length, device=device))

    def _rotary_at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        rates = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=positions_T.device) / half)
        angles = positions_T.to(torch.float64)[:, None] * rates
        return angles.cos().float(), angles.sin().float()

    def layout(self, head: Head, dtype: torch.dtype, max_length: int) -> Layout:
        """This adapter and the target's head as a decoder of one layer without MLP; every forward of it is entered.

        Args:
            head: the target's, packed.
            dtype: of the target.
            max_length: positions that a row may have.
        """
        config = self.config
        block = Block(
            q=Projection(self.q_proj.weight),
            k=Projection(self.k_proj.weight),
            v=Projection(self.v_proj.weight),
            out=Projection(self.o_proj.weight),
            attention_norm_D=self.norm_in.weight,
        )
        return Layout(
            dtype=dtype,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            mlp_width=0,
            norm_eps=config.norm_eps,
            scaling=config.head_dim**-0.5,
            num_blocks=1,
            blocks=(block,),
            rotary=self._rotary_at,
            max_length=max_length,
            final_norm_D=self.norm_out.weight,
            head=head,
        )

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16."""
        return {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}

    @classmethod
    def of(cls, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> Adapter:
        """The adapter that a config and saved weights describe, float32.

        Raises:
            RuntimeError: they do not fit each other.
        """
        adapter = cls(config)
        adapter.load_state_dict(tensors)
        return adapter.eval()

    @classmethod
    def random(cls, target: LanguageModel, *, exit_layer: int = 1, seed: int = 0) -> Adapter:
        """An adapter of one depth that nobody trained; its attention is weak, which leaves the target's own opinion."""
        config = AdapterConfig.for_target(target.config, exit_layer, target.name, fingerprint_of(target.source))
        adapter, generator = cls(config), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in adapter.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                gain = 0.3 if name.startswith("o_proj") else 1.0
                weight.copy_(1 + 0.2 * noise if weight.dim() < 2 else noise * gain / weight.shape[-1] ** 0.5)
            gain_D = anatomy.gain_of(anatomy.find(target.model).final_norm)
            if gain_D is not None:
                adapter.norm_out.weight.mul_(gain_D)
        return adapter.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: AdapterConfig | None = None) -> str:
        """The command that trains an adapter."""
        depth = 2 if config is None else config.exit_layer
        return f"foretoken train kangaroo --target {target} --exit-layer {depth} --out DIR"

    def grown(self, target: LanguageModel, origin: Origin) -> Adapter:
        """The same drafts for a model that was grown from its target: the adapter is grown as the target's layers were.

        So drafting costs what it costs beside a target of this size.
        """
        origin.check_shared(self.title, target.name)
        depth, copies = origin.depth(self.config.exit_layer), origin.copies
        config = AdapterConfig.for_target(target.config, depth, target.name, fingerprint_of(target.source))
        weights = {name: grown.widened(weight, copies) for name, weight in self.state_dict().items()}
        weights["norm_out.weight"] = grown.before_head(self.norm_out.weight.detach(), copies)
        return Adapter.of(config, weights)

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target that is not as deep, or whose attention has another shape.

        Raises:
            MismatchError: it is, or has.
        """
        config = self.config
        if not 1 <= config.exit_layer < model.num_layers:
            raise MismatchError(
                f"the adapter leaves after layer {config.exit_layer}, but '{model.name}' has {model.num_layers} layers"
            )
        fitting = AdapterConfig.for_target(model.config, config.exit_layer, config.target, config.target_fingerprint)
        for name in ("width", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(config, name), getattr(fitting, name)
            if ours != theirs:
                raise MismatchError(f"the adapter's {name} is {ours}, but that of '{model.name}' is {theirs}")

    def _project(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = self.norm_in(f)
        return self.q_proj(u), self.k_proj(u), self.v_proj(u)

    def _close(self, f: Tensor, attended: Tensor) -> Tensor:
        out: Tensor = self.norm_out(f + self.o_proj(attended))
        return out


class AdapterHead:
    """Hidden states of the adapter's depth to logits, in the target's dtype and on its device.

    Args:
        target: whose head it is; with a fused decoder, the adapter is fused too.
        adapter: copied.
    """

    def __init__(self, target: LanguageModel, adapter: Adapter) -> None:
        self._target = target
        self._fused: FusedDecoder | None = None
        if target.fused is not None:
            layout = adapter.layout(target.fused.head, target.dtype, target.max_length)
            self._fused = FusedDecoder(layout, target.fused.library)
        self._adapter = deepcopy(adapter).to(device=target.device, dtype=target.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: PackedBatch, cache: KVCache, hidden_TD: Tensor, *, top: int, head: HeadRows | None = None
    ) -> Output:
        """Logits of the wanted rows; keys and values go into the cache.

        Args:
            batch: packed rows; their tokens do not matter, only positions and segments.
            hidden_TD: what the target gave for these rows at the adapter's depth.
            top: how many tokens of each row to rank.
            head: score these rows of the target's head in place of all.
        """
        if self._fused is not None:
            packed, columns = (None, None) if head is None else (head.packed, head.columns)
            ranked = self._fused.forward(batch, NativePlan(cache), Span(0, 1, hidden_TD), top=top, head=packed)
            return Output.ranked(ranked, columns)
        positions = batch.positions_1T(self._target.device)[0]
        y_TD = self._adapter.over_cache(hidden_TD, positions, DensePlan(cache, batch))
        if not batch.wanted:
            return Output.of(y_TD[:0])
        return self._target.score(y_TD[batch.wanted], top=top, final_norm=False, head=head)


def _rotate(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary positions on [..., T, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td], dim=-1)
