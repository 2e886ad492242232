"""LongSpec's network: one block that reads a short window of its own, and the target's keys of everything before.

    x, embedded ─┬─ norm ─ q, k, v ─ attention to the last 512 tokens and itself ─ out ─(+)    keys of its own
                 ├─ norm ─ query ─── attention to the target's keys and values ──── out ─(+)   K*, V*: read in place
                 └─ norm ─ gated MLP ───────────────────────────────────────────────────(+) ─ norm ─ the target's head

A token's own keys and values are made before anything else is read: they follow from its id and its position alone. So
no hidden state is carried from step to step, and to see K* up to ``gap`` positions before it is in training what depth
``gap - 1`` of a draft is in serving.

Paper: arXiv:2502.17421, section 3.1. Differs: a norm before the head, which begins as the target's; keys and values of
the second attention, which the released module makes and never reads, are not there.

Letters: B sequences, T tokens, W width, H query heads, G key/value heads, d head width, P keys of the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, UnsupportedArchitecture
from foretoken.drafting.learned_part import LearnedConfig, LearnedPart
from foretoken.forward import anatomy, target_kv
from foretoken.forward.target_kv import FarKeys, turned
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.language_model import LanguageModel

WINDOW = 512  # tokens before the query that the first attention sees
LEVELS = 5  # gaps that are trained: as deep as the paper's tree
_QUERIES = 512  # of a piece of training's window attention

# what a weight begins as: of the target's first layer (0) or of the one whose keys are read (1)
_BEGINNINGS = {
    "norm_window.weight": (0, "input_layernorm.weight"),
    **{f"{name}_proj.{kind}": (0, f"self_attn.{name}_proj.{kind}") for name in "qkv" for kind in ("weight", "bias")},
    "o_proj.weight": (0, "self_attn.o_proj.weight"),
    "norm_far.weight": (1, "input_layernorm.weight"),
    "far_q_proj.weight": (1, "self_attn.q_proj.weight"),
    "far_q_proj.bias": (1, "self_attn.q_proj.bias"),
    "far_o_proj.weight": (1, "self_attn.o_proj.weight"),
    "norm_mlp.weight": (1, "post_attention_layernorm.weight"),
    **{f"{name}_proj.weight": (1, f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")},
}


@dataclass(frozen=True, kw_only=True)
class LongSpecConfig(LearnedConfig):
    """What a drafter is, and whose.

    Attributes:
        layer: of the target whose keys and values it reads, from 0.
        width, vocab_size: of the target's residual stream, and of its vocabulary.
        heads, kv_heads, head_dim: of both attentions; the target's.
        mlp_width: of its own MLP.
        window: tokens before the query that the first attention sees.
        levels: gaps to the target's keys that it was trained for; drafts are no deeper.
        norm_eps: of all norms.
        max_length: positions that it was trained for.
    """

    layer: int
    width: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    window: int
    levels: int
    norm_eps: float
    max_length: int

    @property
    def seen(self) -> int:
        """Positions that a row sees in its own keys, the last of them its own: the one rule of the window."""
        return self.window + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("width", "vocab_size", "heads", "kv_heads", "head_dim", "mlp_width", "window", "levels", "max_length")
        for name in ("layer", *sizes):
            value = getattr(self, name)
            if type(value) is not int or value < (name != "layer"):
                raise ValueError(f"{name}={value!r}")
        if type(self.norm_eps) not in (int, float) or not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps!r}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}")


class LongSpec(LearnedPart, nn.Module):
    """The block's weights, its arithmetic piece by piece for serving, and whole for training."""

    algorithm = "longspec"
    title = "LongSpec head"
    option = "head"
    Config = LongSpecConfig
    grows = True
    own_head: Tensor | None = None  # [V, W], read in place of the target's where that is of another width

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm_window = nn.RMSNorm(width, eps=config.norm_eps)
        self.q_proj = nn.Linear(width, inner)
        self.k_proj = nn.Linear(width, kv)
        self.v_proj = nn.Linear(width, kv)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.norm_far = nn.RMSNorm(width, eps=config.norm_eps)
        self.far_q_proj = nn.Linear(width, inner)
        self.far_o_proj = nn.Linear(inner, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, width, bias=False)
        self.norm_out = nn.RMSNorm(width, eps=config.norm_eps)

    # ------------------------------------------------------------------ the arithmetic

    def project(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, T, d], keys and values [..., G, T, d] of embedded tokens [..., T, W], not turned yet."""
        u = self.norm_window(e)
        return self._heads(self.q_proj(u)), self._heads(self.k_proj(u)), self._heads(self.v_proj(u))

    def look_back(self, e: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind the first attention, and the queries of the second one, not turned yet.

        Args:
            e: [..., T, W].
            attended: [..., T, H d], what the first attention gave.
        """
        h = e + self.o_proj(attended)
        return h, self._heads(self.far_q_proj(self.norm_far(h)))

    def look_far(self, h: Tensor, attended: Tensor) -> Tensor:
        """The residual stream behind the second attention.

        Args:
            h: as :meth:`look_back` gave it.
            attended: [..., T, H d], what the second attention gave.
        """
        out: Tensor = h + self.far_o_proj(attended)
        return out

    def close(self, h: Tensor) -> Tensor:
        """What the target's head reads, [..., T, W].

        Args:
            h: as :meth:`look_far` gave it.
        """
        u = self.norm_mlp(h)
        out: Tensor = self.norm_out(h + self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u)))
        return out

    def forward(
        self,
        e_BTW: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        keys_BGTd: Tensor,
        values_BGTd: Tensor,
        gaps: Sequence[int],
    ) -> Tensor:
        """What the head reads for every token of whole sequences, [B, T, W]; the first ``gap`` of each see no K*.

        Args:
            e_BTW: embedded tokens.
            angles: cos and sin of each sequence's positions.
            keys_BGTd, values_BGTd: K* and V* of the same tokens.
            gaps: of each sequence: token t sees the target's keys of tokens <= t - gap.
        """
        cos_B1Th, sin_B1Th = (torch.stack(each)[:, None] for each in zip(*angles, strict=True))
        q, k, v = self.project(e_BTW)
        q, k = turned(q, cos_B1Th, sin_B1Th).to(v.dtype), turned(k, cos_B1Th, sin_B1Th).to(v.dtype)
        h, far_q = self.look_back(e_BTW, _flat(self._window(q, k, v)))
        far_q = turned(far_q, cos_B1Th, sin_B1Th).to(v.dtype)
        far = [
            self._far(far_q[row], keys_BGTd[row].to(v.dtype), values_BGTd[row].to(v.dtype), gap)
            for row, gap in enumerate(gaps)
        ]
        return self.close(self.look_far(h, _flat(torch.stack(far))))

    def _window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every token sees the last ``window`` before it, and itself: [B, H, T, d]."""
        length, seen, pieces = q.shape[2], self.config.seen, []
        for first in range(0, length, _QUERIES):
            last, begin = min(first + _QUERIES, length), max(0, first - seen + 1)
            at_R1 = torch.arange(first, last, device=q.device)[:, None]
            of_K = torch.arange(begin, last, device=q.device)
            seen_RK = (of_K <= at_R1) & (at_R1 - of_K < seen)
            pieces.append(self._attend(q[:, :, first:last], k[:, :, begin:last], v[:, :, begin:last], mask=seen_RK))
        return torch.cat(pieces, dim=2)

    def _far(self, q_HTd: Tensor, k_GTd: Tensor, v_GTd: Tensor, gap: int) -> Tensor:
        """Flash noisy training (section 3.2): the first queries and the last keys left out, the rest is causal."""
        length = q_HTd.shape[1]
        if length <= gap:
            return torch.zeros_like(q_HTd)
        each = (q_HTd[:, gap:], k_GTd[:, : length - gap], v_GTd[:, : length - gap])
        seen = self._attend(*(part[None] for part in each), causal=True)[0]
        return F.pad(seen, (0, 0, gap, 0))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        grouped = self.config.heads != self.config.kv_heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(-2, -3)

    # ------------------------------------------------------------------ files, and whose it is

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16."""
        return {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}

    @classmethod
    def of(cls, config: LongSpecConfig, tensors: Mapping[str, Tensor]) -> LongSpec:
        """The head that a config and saved weights describe, float32.

        Raises:
            RuntimeError: they do not fit each other.
        """
        head = cls(config)
        head.load_state_dict(tensors)
        return head.eval()

    @classmethod
    def random(cls, target: LanguageModel, *, seed: int = 0, **fields: Any) -> LongSpec:
        """A head that nobody trained: what it begins as, with biases and other weights drawn.

        Args:
            fields: others of the config.
        """
        keys = target_kv.find(target.model, target.name)
        head = cls(config_for(target.config, target.name, fingerprint_of(target.source), keys, **fields))
        generator = torch.Generator().manual_seed(seed)
        head.draw(generator)
        head.begin_near(target.model)
        with torch.no_grad():
            for weight in head.parameters():
                weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=generator))
        return head.eval()

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights; what the block adds to the residual stream begins small.

        Args:
            generator: None: torch's own.
        """
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(float(name.startswith("norm")))
                continue
            gain = 0.3 if name.startswith(("o_proj", "far_o_proj", "down_proj")) else 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain / weight.shape[-1] ** 0.5)

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Begin as the target's ends: its first layer reads the window, the one whose keys these are asks them.

        Of that layer are the MLP, too, and of the target the last norm; what has another shape stays as it was drawn.
        """
        parts = anatomy.find(model)
        layers = [dict(parts.layers[index].named_parameters()) for index in (0, self.config.layer)]
        own = dict(self.named_parameters())
        for name, (which, theirs) in _BEGINNINGS.items():
            weight = layers[which].get(theirs)
            if weight is not None and weight.shape == own[name].shape:
                own[name].copy_(weight)
        gain = getattr(parts.final_norm, "weight", None)
        if isinstance(gain, Tensor) and gain.shape == self.norm_out.weight.shape:
            self.norm_out.weight.copy_(gain)

    @torch.no_grad()
    def go_on_from(self, head: LongSpec, name: str) -> None:
        """Take the weights of another head, trained for this target or for one like it.

        Args:
            name: what messages call it.
        Raises:
            MismatchError: it has another shape, or another window.
        """
        for each in ("width", "heads", "kv_heads", "head_dim", "mlp_width", "window"):
            theirs, ours = getattr(head.config, each), getattr(self.config, each)
            if theirs != ours:
                raise MismatchError(f"{name}: its {each} is {theirs}, but that of the head to train is {ours}")
        self.load_state_dict(head.state_dict())

    @classmethod
    def how(cls, target: str, draft: str, config: LongSpecConfig | None = None) -> str:
        """The command that trains a head."""
        return f"foretoken train longspec --target {target} --out DIR"

    def grown(self, target: LanguageModel, origin: Origin) -> LongSpec:
        """The same drafts for a model that was grown from its target, at the same cost.

        The first copies of the original's heads are the original's, at the layer that became of its own: their keys are
        read, and no others. Embedding and head are the original's.
        """
        origin.check_shared(self.title, target.name)
        parts, width = anatomy.find(target.model), self.config.width
        layer = origin.depth(self.config.layer)  # what is copied from it comes behind it
        mark = fingerprint_of(target.source)
        head = LongSpec(replace(self.config, target=target.name, target_fingerprint=mark, layer=layer))
        head.load_state_dict(self.state_dict())
        with torch.no_grad():
            head.own_head = cast(Any, parts.head).weight.detach()[:, :width].clone()
        return head.eval()

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another shape, or one whose keys cannot be read.

        Raises:
            MismatchError: width, vocabulary, attention or the layer that is read differ.
            UnsupportedArchitecture: see ``forward/target_kv.py``.
        """
        keys = target_kv.find(model.model, model.name)
        if self.own_head is not None:  # it was made for this model
            return
        fitting = config_for(model.config, model.name, self.config.target_fingerprint, keys)
        for name in ("layer", "width", "vocab_size", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(self.config, name), getattr(fitting, name)
            if ours != theirs:
                raise MismatchError(f"the {self.title}'s {name} is {ours}, but that of '{model.name}' is {theirs}")


def config_for(config: Any, target: str, fingerprint: str, keys: FarKeys, **fields: Any) -> LongSpecConfig:
    """The head that fits a model of transformers; like the paper's, its MLP is as wide as the target's.

    Args:
        config: the target's configuration.
        keys: where its keys are.
        fields: others of :class:`LongSpecConfig`; what is None counts as not given.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    text = config.get_text_config(decoder=True)
    try:
        found = {
            "layer": keys.layer,
            "width": text.hidden_size,
            "vocab_size": text.vocab_size,
            "heads": keys.heads,
            "kv_heads": keys.kv_heads,
            "head_dim": keys.head_dim,
            "mlp_width": text.intermediate_size,
            "window": WINDOW,
            "levels": LEVELS,
            "norm_eps": float(text.rms_norm_eps),
            "max_length": text.max_position_embeddings,
        }
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{target}: no {LongSpec.title} fits it ({error})") from None
    given = {name: value for name, value in fields.items() if value is not None}
    return LongSpecConfig(**{**found, **given, "target": target, "target_fingerprint": fingerprint})


def _flat(attended: Tensor) -> Tensor:
    """[..., H, T, d] -> [..., T, H d]."""
    return attended.transpose(-2, -3).flatten(-2)
