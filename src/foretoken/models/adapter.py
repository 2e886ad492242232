"""Kangaroo's adapter: one attention layer between an early layer of a target and the target's own head.

    f (residual stream after exit_layer layers) ── norm ── attention ──(+)── norm ── the target's head
                                                └──────────────────────┘

Paper: arXiv:2404.18911, section 3.1. No MLP; 4 d^2 + 2 d parameters with as many key/value heads as query heads.
Differs: rotary positions always pair element i with i + head_dim / 2, whatever the target does.

Letters: B sequences, T rows, D width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ModelError
from foretoken.core.files import write_whole
from foretoken.core.protocols import Plan

CONFIG, WEIGHTS = "adapter.json", "adapter.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter is, and whose.

    Attributes:
        exit_layer: layers of the target below it.
        width: of the target's residual stream.
        heads, kv_heads, head_dim: of its attention; the target's.
        rope_theta, norm_eps: as in the target.
        target: what the target was called when it was trained.
        target_fingerprint: models/fingerprint.py; it is of no use to another target.
    """

    exit_layer: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    target: str
    target_fingerprint: str

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


class Adapter(nn.Module):
    """The adapter's weights, and its arithmetic in the two forms that are needed: for training, and over a cache."""

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
        half = self.config.head_dim // 2
        rates = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
        angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rates
        return angles.cos().float(), angles.sin().float()

    def save(self, folder: Path) -> None:
        """Write ``adapter.json`` and ``adapter.safetensors`` (bf16); each replaces a whole file or none."""
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        write_whole(folder / WEIGHTS, save(weights))
        write_whole(folder / CONFIG, json.dumps(asdict(self.config), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """Read a saved adapter, float32.

        Raises:
            ModelError: there is none, or it is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            config = AdapterConfig(**{each.name: settings[each.name] for each in fields(AdapterConfig)})
            _check_types(config)
            adapter = cls(config)
            adapter.load_state_dict(load_file(folder / WEIGHTS))
        except FileNotFoundError:
            raise ModelError(f"{folder}: has no adapter ({CONFIG} and {WEIGHTS})") from None
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{folder}: the adapter cannot be read ({str(error).splitlines()[0]})") from None
        return adapter.eval()

    def _project(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = self.norm_in(f)
        return self.q_proj(u), self.k_proj(u), self.v_proj(u)

    def _close(self, f: Tensor, attended: Tensor) -> Tensor:
        out: Tensor = self.norm_out(f + self.o_proj(attended))
        return out


def _check_types(config: AdapterConfig) -> None:
    """Raise ValueError where a file says what no adapter can be."""
    for name in ("exit_layer", "width", "heads", "kv_heads", "head_dim"):
        value = getattr(config, name)
        if type(value) is not int or value < (name != "exit_layer"):
            raise ValueError(f"{name}={value!r}")
    for name in ("rope_theta", "norm_eps"):
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}")
    for name in ("target", "target_fingerprint"):
        if not isinstance(getattr(config, name), str):
            raise ValueError(f"{name}={getattr(config, name)!r}")


def _rotate(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary positions on [..., T, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td], dim=-1)
