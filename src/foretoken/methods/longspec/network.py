"""LongSpec's draft network: one block with a short window of its own and cross-attention to the target's KV cache.

    x, embedded ─┬─ norm ─ q, k, v ─ self-attention, sliding window of 512 ──── out ─(+)
                 ├─ norm ─ q ─────── cross-attention to the target's K*, V* ─── out ─(+)
                 └─ norm ─ gated MLP ──────────────────────────────────────────────(+) ─ norm ─ the target's head

:meth:`LongSpec.forward` is the network of the paper, for one text. Tests compare the other implementations with it:
``runner.py`` serves one level of many drafts (in native code or with torch), ``noisy.py`` trains whole sequences. They
use the pieces that follow ``forward`` in this file.

The keys and values of the self-attention depend on a token's id and position alone. So drafting passes no hidden state
from one drafted token to the next, and training with the last ``gap`` target keys hidden equals serving at depth
``gap - 1`` of a draft.

Paper: arXiv:2502.17421, section 3.1. Differs: a norm before the head, initialised from the target's; the key and value
projections of the cross-attention are left out; the released module computes them and never uses them.

Letters: B sequences, T tokens, W width, H query heads, G key/value heads, d head width, P keys of the target.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, UnsupportedArchitecture
from foretoken.drafting.feature_heads.block import AttentionConfig
from foretoken.drafting.learned_part import LearnedPart
from foretoken.forward import anatomy, target_kv
from foretoken.forward.target_kv import TargetKV, apply_rotary
from foretoken.models.language_model import LanguageModel

WINDOW = 512  # tokens before the query in the self-attention's window
LEVELS = 5  # gaps in training: as deep as the paper's tree

# source of a weight's initial value: the target's first layer (0) or the layer with K*, V* (1)
_INITIAL = {
    "norm_self.weight": (0, "input_layernorm.weight"),
    **{f"{name}_proj.{kind}": (0, f"self_attn.{name}_proj.{kind}") for name in "qkv" for kind in ("weight", "bias")},
    "o_proj.weight": (0, "self_attn.o_proj.weight"),
    "norm_cross.weight": (1, "input_layernorm.weight"),
    "cross_q_proj.weight": (1, "self_attn.q_proj.weight"),
    "cross_q_proj.bias": (1, "self_attn.q_proj.bias"),
    "cross_o_proj.weight": (1, "self_attn.o_proj.weight"),
    "norm_mlp.weight": (1, "post_attention_layernorm.weight"),
    **{f"{name}_proj.weight": (1, f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")},
}
# module -> its name in saved files
_SAVED_AS = {
    "norm_self": "norm_window",
    "norm_cross": "norm_far",
    "cross_q_proj": "far_q_proj",
    "cross_o_proj": "far_o_proj",
}


@dataclass(frozen=True, kw_only=True)
class LongSpecConfig(AttentionConfig):
    """Sizes of a draft network, and its target.

    Attributes:
        layer: number of the target layer with K*, V*, from 0.
        vocab_size: of the target; width and heads are those of the target, too.
        mlp_width: of the network's own MLP.
        window: tokens before the query in the self-attention's window.
        levels: gaps to the target's keys in training; the maximum depth of a draft.
        max_length: positions in training.
    """

    from_zero = ("layer",)

    layer: int
    vocab_size: int
    mlp_width: int
    window: int
    levels: int
    max_length: int

    @property
    def seen(self) -> int:
        """Positions in the window of a row's self-attention, its own included."""
        return self.window + 1


class LongSpec(LearnedPart, nn.Module):
    """The draft network: its weights, the plain forward pass, and the pieces for serving and training."""

    algorithm = "longspec"
    title = "LongSpec head"
    Config = LongSpecConfig
    own_head: Tensor | None = None  # [V, W], replaces a target head of another width

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm_self = nn.RMSNorm(width, eps=config.norm_eps)
        self.q_proj = nn.Linear(width, inner)
        self.k_proj = nn.Linear(width, kv)
        self.v_proj = nn.Linear(width, kv)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.norm_cross = nn.RMSNorm(width, eps=config.norm_eps)
        self.cross_q_proj = nn.Linear(width, inner)
        self.cross_o_proj = nn.Linear(inner, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, width, bias=False)
        self.norm_out = nn.RMSNorm(width, eps=config.norm_eps)

    # ------------------------------------------------------------------ the paper on one page

    def forward(
        self, e_TW: Tensor, cos_Th: Tensor, sin_Th: Tensor, keys_GPd: Tensor, values_GPd: Tensor, known_T: Tensor
    ) -> Tensor:
        """Return the inputs of the target's head for every token of one text, [T, W] (section 3.1).

        Args:
            e_TW: E[x], the tokens under the target's frozen embedding.
            cos_Th, sin_Th: the target's rotary tables at the tokens' positions.
            keys_GPd, values_GPd: K*, V*: KV cache of the target's last layer of full attention, rotary applied.
            known_T: number of visible target keys of each token, of P. All rows of a draft see the keys before the
                root, so a row of depth j (the root is at depth 0) at position t sees t - j of them: a gap of j + 1.
        """
        T, P = len(e_TW), keys_GPd.shape[1]
        t_T = torch.arange(T, device=e_TW.device)
        # self-attention in a sliding window: token t attends to t - 512 .. t of the draft network's own keys
        a = self.norm_self(e_TW)
        q, k, v = (self._heads(each(a)) for each in (self.q_proj, self.k_proj, self.v_proj))
        distance_TT = t_T[:, None] - t_T
        window_TT = (distance_TT >= 0) & (distance_TT <= self.config.window)
        q, k = apply_rotary(q, cos_Th, sin_Th), apply_rotary(k, cos_Th, sin_Th)
        h = e_TW + self.o_proj(attention(q, k, v, window_TT))
        # cross-attention to the target's cache: only a query and an output projection are trained
        c = self.norm_cross(h)
        q = apply_rotary(self._heads(self.cross_q_proj(c)), cos_Th, sin_Th)
        seen_TP = torch.arange(P, device=e_TW.device) < known_T[:, None]
        h = h + self.cross_o_proj(attention(q, keys_GPd, values_GPd, seen_TP))
        # feed-forward
        m = self.norm_mlp(h)
        h = h + self.down_proj(F.silu(self.gate_proj(m)) * self.up_proj(m))
        return self.norm_out(h)

    # ------------------------------------------------------------------ its pieces, for rows of any arrangement

    def self_projections(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [..., H, T, d], keys and values [..., G, T, d] of the self-attention, without rotary
        positions.

        Args:
            e: embedded tokens, [..., T, W].
        """
        a = self.norm_self(e)
        return self._heads(self.q_proj(a)), self._heads(self.k_proj(a)), self._heads(self.v_proj(a))

    def self_attention_out(self, e: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the self-attention, [..., T, W].

        Args:
            e: embedded tokens, [..., T, W].
            attended: concatenated heads, [..., T, H d].
        """
        return e + self.o_proj(attended)

    def cross_queries(self, h: Tensor) -> Tensor:
        """Return the queries of the cross-attention, [..., H, T, d], without rotary positions."""
        return self._heads(self.cross_q_proj(self.norm_cross(h)))

    def cross_attention_out(self, h: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the cross-attention, [..., T, W].

        Args:
            h: residual stream after the self-attention.
            attended: concatenated heads, [..., T, H d].
        """
        return h + self.cross_o_proj(attended)

    def output(self, h: Tensor) -> Tensor:
        """Apply MLP and last norm; return the inputs of the target's head, [..., T, W].

        Args:
            h: residual stream after the cross-attention.
        """
        m = self.norm_mlp(h)
        return self.norm_out(h + self.down_proj(F.silu(self.gate_proj(m)) * self.up_proj(m)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(-2, -3)

    # ------------------------------------------------------------------ files, and the target of a head

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights in bfloat16, by their names in files."""
        return {_renamed(name, _SAVED_AS): value.to(torch.bfloat16) for name, value in self.state_dict().items()}

    @classmethod
    def of(cls, config: LongSpecConfig, tensors: Mapping[str, Tensor]) -> "LongSpec":
        """Build the head from a config and saved weights, float32.

        Raises:
            RuntimeError: config and weights do not fit each other.
        """
        head, modules = cls(config), {saved: module for module, saved in _SAVED_AS.items()}
        head.load_state_dict({_renamed(name, modules): value for name, value in tensors.items()})
        return head.eval()

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None = None) -> None:
        """Initialise all weights at random; the block's contributions to the residual stream start small.

        Args:
            generator: None: torch's default generator.
        """
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(float(name.startswith("norm")))
                continue
            gain = 0.3 if name.startswith(("o_proj", "cross_o_proj", "down_proj")) else 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain / weight.shape[-1] ** 0.5)

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Copy weights of the target where shapes agree: self-attention from its first layer, cross-attention and MLP
        from the layer with K*, V*, and its last norm. Other weights keep their random values.
        """
        parts = anatomy.find(model)
        layers = [dict(parts.layers[index].named_parameters()) for index in (0, self.config.layer)]
        own = dict(self.named_parameters())
        for name, (which, theirs) in _INITIAL.items():
            weight = layers[which].get(theirs)
            if weight is not None and weight.shape == own[name].shape:
                own[name].copy_(weight)
        gain = getattr(parts.final_norm, "weight", None)
        if isinstance(gain, Tensor) and gain.shape == self.norm_out.weight.shape:
            self.norm_out.weight.copy_(gain)

    @torch.no_grad()
    def go_on_from(self, head: "LongSpec", name: str) -> None:
        """Copy the weights of another head for this target or a similar one.

        Args:
            name: of that head, for messages.
        Raises:
            MismatchError: a shape or the window differs.
        """
        for each in ("width", "heads", "kv_heads", "head_dim", "mlp_width", "window"):
            theirs, ours = getattr(head.config, each), getattr(self.config, each)
            if theirs != ours:
                raise MismatchError(f"{name}: its {each} is {theirs}, but that of the head to train is {ours}")
        self.load_state_dict(head.state_dict())

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another shape, or one without readable keys.

        Raises:
            MismatchError: width, vocabulary, attention or the layer with K*, V* differ.
            UnsupportedArchitecture: see ``forward/target_kv.py``.
        """
        kv = target_kv.find(model.model, model.name)
        if self.own_head is not None:  # the head was built for this model
            return
        fitting = config_for(model.config, model.name, self.config.target_fingerprint, kv)
        for name in ("layer", "width", "vocab_size", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(self.config, name), getattr(fitting, name)
            if ours != theirs:
                raise MismatchError(f"the {self.title}'s {name} is {ours}, but that of '{model.name}' is {theirs}")


def config_for(config: Any, target: str, fingerprint: str, kv: TargetKV, **fields: Any) -> LongSpecConfig:
    """Return the config of a head that fits a model of transformers; as in the paper, its MLP has the target's width.

    Args:
        config: the target's configuration.
        kv: the target layer with K*, V*.
        fields: further fields of :class:`LongSpecConfig`; None: not given.
    Raises:
        UnsupportedArchitecture: the target's configuration lacks a size.
    """
    text = config.get_text_config(decoder=True)
    try:
        found = {
            "layer": kv.layer,
            "width": text.hidden_size,
            "vocab_size": text.vocab_size,
            "heads": kv.heads,
            "kv_heads": kv.kv_heads,
            "head_dim": kv.head_dim,
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


def attention(q_HTd: Tensor, k_GPd: Tensor, v_GPd: Tensor, seen_TP: Tensor) -> Tensor:
    """Return softmax attention under a mask, heads concatenated: [T, H d]; 0 for a row without visible keys."""
    k_HPd, v_HPd = (each.repeat_interleave(len(q_HTd) // len(each), dim=0) for each in (k_GPd, v_GPd))
    scores_HTP = q_HTd @ k_HPd.transpose(1, 2) / q_HTd.shape[-1] ** 0.5
    weights_HTP = scores_HTP.masked_fill(~seen_TP, -math.inf).softmax(-1).nan_to_num(0.0)
    return (weights_HTP @ v_HPd).transpose(0, 1).flatten(1)


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """Rename the module in a parameter's name."""
    module, _, kind = name.partition(".")
    return f"{modules.get(module, module)}.{kind}"
