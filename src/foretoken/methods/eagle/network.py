"""EAGLE's head: one decoder layer over pairs of a feature of the target and the token behind it.

    pair i      feature g_i of row i  ─┐
                token x_{i+1}         ─┴─ block ── h_i ── head ── q of x_{i+2}
    drafting    h_i takes the place of g_{i+1}, which the target has not computed yet

    EAGLE-3     g = fc([states of three depths]);  attention over [norm(e); norm(g)], residual from g, MLP, norm, head
    EAGLE-2     g = what the final norm gives;     x = fc([e; g]), a layer without its first norm, the target's head

Papers: EAGLE-2, arXiv:2406.16858 (the network is EAGLE-1's, arXiv:2401.15077, figure 6); EAGLE-3, arXiv:2503.01840,
section 3.1. Differs: the depths of a head of ours lie in the target as (2, L/2, L-3) lie in 32 layers; a head without
``lm_head`` reads its K rows in the target's own head.

Letters: B sequences, T rows, F width of the fused depths, W width, Q of queries, keys and values together, H query
heads, G key/value heads, d head width, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, UnsupportedArchitecture
from foretoken.drafting.learned_part import LearnedPart, check_fingerprint
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, UNKNOWN, EagleConfig, from_settings, to_settings
from foretoken.models import anatomy
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

_OLD_NAMES = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
_EAGLE2_NAMES = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Attention(nn.Module):
    """Its projections, and norms of each head's query and key where the block has them."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        read, bias = config.width if config.algorithm == EAGLE2 else 2 * config.width, config.attention_bias
        self.q_proj = nn.Linear(read, inner, bias=bias)
        self.k_proj = nn.Linear(read, kv, bias=bias)
        self.v_proj = nn.Linear(read, kv, bias=bias)
        self.o_proj = nn.Linear(inner, config.width, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.norm_heads else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.norm_heads else None


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)


class Block(nn.Module):
    """The decoder layer, under the names of the speculators format."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        if config.algorithm == EAGLE3:
            self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
            self.hidden_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)


class Eagle(LearnedPart, nn.Module):
    """The head's weights, and its arithmetic piece by piece; what strings the pieces together is told where it stands.

    Args:
        config: what it is.
        ids_K: int64, increasing: the tokens that it scores; None: all.
        own_head: whether it has a head of its own.
        own_embedding: whether it has an embedding of its own.
    """

    algorithm = "eagle"
    model_types = (EAGLE3, EAGLE2)
    title = "EAGLE head"
    option = "head"
    Config = EagleConfig

    def __init__(
        self,
        config: EagleConfig,
        *,
        ids_K: Tensor | None = None,
        own_head: bool = False,
        own_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.ids_K = config, ids_K
        self.three = config.algorithm == EAGLE3
        fused = config.num_features * config.target_width
        if self.three:
            self.fc = nn.Linear(fused, config.width, bias=False)
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(fused, eps=config.norm_eps)
            if config.fc_norm:
                norms = (nn.RMSNorm(config.target_width, eps=config.norm_eps) for _ in range(config.num_features))
                self.fc_norm = nn.ModuleList(norms)
        else:
            self.fc = nn.Linear(2 * config.width, config.width, bias=config.fusion_bias)
        self.layers = nn.ModuleList([Block(config)])
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False) if own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if own_embedding else None

    # ------------------------------------------------------------------ the arithmetic

    @property
    def block(self) -> Block:
        """The decoder layer."""
        found = self.layers[0]
        assert isinstance(found, Block)
        return found

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Features [..., W] of the target's states [..., F], the depths side by side."""
        if not self.three:
            return states_TF
        if self.config.norm_before_fc:
            states_TF = self.input_norm(states_TF)
        if self.config.fc_norm:
            pieces = states_TF.split(self.config.target_width, dim=-1)
            states_TF = torch.cat([norm(each) for norm, each in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        return self.fc(states_TF)

    def open(self, g_TW: Tensor, e_TW: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of pairs, and where their residual begins.

        Args:
            g_TW, e_TW: features, and embeddings of the tokens behind them, [..., W].
        """
        if not self.three:
            x_TW = self.fc(torch.cat([e_TW, g_TW], dim=-1))
            return x_TW, x_TW
        normed_TW = self.block.hidden_norm(g_TW)
        read = torch.cat([self.block.input_layernorm(e_TW), normed_TW], dim=-1)
        return read, normed_TW if self.config.norm_before_residual else g_TW

    def project(self, read: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, T, d], keys and values [..., G, T, d], rotated.

        Args:
            read: [..., T, W] or [..., T, 2W], see :meth:`open`.
            cos_Td, sin_Td: of the rows' positions, see :meth:`rotary_at`.
        """
        parts = self.block.self_attn
        heads = (projection(read) for projection in (parts.q_proj, parts.k_proj, parts.v_proj))
        q, k, v = (each.unflatten(-1, (-1, self.config.head_dim)).transpose(-2, -3) for each in heads)
        if parts.q_norm is not None and parts.k_norm is not None:
            q, k = parts.q_norm(q), parts.k_norm(k)
        return rotate(q, cos_Td, sin_Td).to(v.dtype), rotate(k, cos_Td, sin_Td).to(v.dtype), v

    def close(self, residual_TW: Tensor, attended: Tensor) -> Tensor:
        """The block's output h [..., W].

        Args:
            attended: [..., T, H d].
        """
        mlp = self.block.mlp
        h_TW = residual_TW + self.block.self_attn.o_proj(attended)
        u_TW = self.block.post_attention_layernorm(h_TW)
        out: Tensor = h_TW + mlp.down_proj(F.silu(mlp.gate_proj(u_TW)) * mlp.up_proj(u_TW))
        return out

    def read_out(self, h_TW: Tensor) -> Tensor:
        """What the head reads."""
        return self.norm(h_TW) if self.three else h_TW

    def following(self, h_TW: Tensor) -> Tensor:
        """The feature that stands for the target's at the next position."""
        return self.norm(h_TW) if self.config.norm_output else h_TW

    def rotary_at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, d / 2]."""
        half = self.config.head_dim // 2
        rates = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=positions_T.device) / half)
        angles = positions_T.to(torch.float64)[:, None] * rates
        return angles.cos().float(), angles.sin().float()

    def embedding_of(self, model: Any) -> Tensor:
        """The table that its tokens are looked up in, [V, W]: its own, or the target's.

        Args:
            model: of transformers.
        """
        if self.embed_tokens is not None:
            return self.embed_tokens.weight
        return _weight(anatomy.find(model).embedding, model, "embedding")[: self.config.vocab_size]

    def head_of(self, model: Any) -> Tensor:
        """The rows that score its tokens, [K, W]: its own, or those of the target's head."""
        if self.lm_head is not None:
            return self.lm_head.weight
        weight_VW = _weight(anatomy.find(model).head, model, "head")[: self.config.vocab_size]
        return weight_VW if self.ids_K is None else weight_VW[self.ids_K.to(weight_VW.device)]

    def get_output_embeddings(self) -> nn.Linear | None:
        """Its own head, which is trained as embeddings are (train/optimiser.py)."""
        return self.lm_head

    # ------------------------------------------------------------------ files

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the two maps between the vocabularies."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        if not self.three:
            return {_renamed(name, _EAGLE2_NAMES): value for name, value in found.items()}
        if self.ids_K is not None:
            found["d2t"] = self.ids_K - torch.arange(len(self.ids_K))
            found["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, self.ids_K, True)
        return found

    @classmethod
    def of(cls, config: EagleConfig, tensors: Mapping[str, Tensor]) -> Eagle:
        """The head that a config and saved weights describe, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = {_renamed(name, _OLD_NAMES): value for name, value in tensors.items()}
        ids_K = _ids_of(config, found.pop("d2t", None), found.pop("t2d", None))
        head = cls(config, ids_K=ids_K, own_head=_HEAD in found, own_embedding=_EMBEDDING in found)
        expected = head.state_dict()
        for name in sorted(expected.keys() | found.keys()):
            if name not in found:
                raise ValueError(f"the tensor {name} is missing")
            if name not in expected:
                raise ValueError(f"the tensor {name} is not of such a head")
            if found[name].shape != expected[name].shape:
                raise ValueError(f"{name} is {list(found[name].shape)}, but {list(expected[name].shape)} is described")
        head.load_state_dict({name: value.float() for name, value in found.items()})
        return head.eval()

    @classmethod
    def random(
        cls,
        target: LanguageModel,
        *,
        algorithm: str = EAGLE3,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> Eagle:
        """A head that nobody trained, whose deepest feature is handed to the target's own head.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        config = config_for(
            target.config,
            target.name,
            fingerprint_of(target.source),
            algorithm=algorithm,
            draft_vocab_size=None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size),
            **fields,
        )
        few = config.draft_vocab_size < config.vocab_size
        ids_K = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size) if few else None
        head, generator = cls(config, ids_K=ids_K), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in head.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
                weight.copy_(1 + 0.2 * noise if weight.dim() < 2 else noise * gain / weight.shape[-1] ** 0.5)
            head.begin_near(target.model)
        return head.eval()

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Begin where the deepest feature is handed on as it is, and normed as the target norms it."""
        width = self.config.width
        if self.config.target_width != width:
            return
        eye_WW = torch.eye(width, device=self.fc.weight.device)
        self.fc.weight.mul_(0.3)
        self.fc.weight[:, -width:] += eye_WW
        gain = getattr(anatomy.find(model).final_norm, "weight", None)
        if self.three and isinstance(gain, Tensor) and gain.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain)

    @classmethod
    def how(cls, target: str, draft: str, config: EagleConfig | None = None) -> str:
        """The command that trains a head."""
        return f"foretoken train eagle --target {target} --out DIR"

    def check_target(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        """Refuse a head of another target; one that says no fingerprint is judged by its shapes."""
        config = self.config
        if config.target_fingerprint != UNKNOWN:
            remedy = f"train one with '{self.how(target.name, '', config)}'"
            made = f"the {self.title} was trained for the target"
            check_fingerprint(made, config.target, config.target_fingerprint, target, remedy)
        self.check_shape(target)

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: it is one; the field of ``config.json`` is named.
        """
        config = self.config
        width = model.config.get_text_config(decoder=True).hidden_size
        for name, ours, theirs in (
            ("target_hidden_size", config.target_width, width),
            ("transformer_layer_config.vocab_size", config.vocab_size, model.vocab_size),
        ):
            if ours != theirs:
                raise MismatchError(f"the EAGLE head's {name} is {ours}, but that of '{model.name}' is {theirs}")
        shares = [self.embed_tokens is None and _EMBEDDING, self.lm_head is None and _HEAD]
        if config.width != width and any(shares):
            missing = next(each for each in shares if each)
            raise MismatchError(
                f"the EAGLE head is {config.width} wide and '{model.name}' {width}, so it cannot share the target's: "
                f"{missing} is missing"
            )
        depths = config.depths_of(model.num_layers)
        if min(depths) < 1 or max(depths) > model.num_layers:
            raise MismatchError(
                f"the EAGLE head's eagle_aux_hidden_state_layer_ids are {list(depths)}, but '{model.name}' has "
                f"{model.num_layers} layers"
            )

    def _settings(self) -> dict[str, Any]:
        return to_settings(self.config)

    @classmethod
    def _fields(cls, settings: Any) -> dict[str, Any]:
        return from_settings(settings)


def config_for(
    config: Any,
    target: str,
    fingerprint: str,
    *,
    algorithm: str = EAGLE3,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    **fields: Any,
) -> EagleConfig:
    """A head that fits a model of transformers.

    Its attention is like the target's; its MLP has by default a quarter of the target's channels, because drafting is
    bound by the weights that it reads; its depths lie as (2, L/2, L-3) lie in 32 layers.

    Args:
        config: the target's configuration.
        draft_vocab_size: None: all of the vocabulary.
        fields: others of :class:`EagleConfig`.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    text = config.get_text_config(decoder=True)
    try:
        width, heads, layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{target}: no EAGLE head fits it ({error})") from None
    rope = getattr(text, "rope_parameters", None) or {}
    if rope and "rope_theta" not in rope:  # one table for each type of layer
        rope = next((each for each in rope.values() if isinstance(each, dict)), {})
    quarter = (getattr(text, "intermediate_size", None) or 4 * width) // 4
    depths = (max(1, round(layers * 2 / 32)), max(1, layers // 2), max(1, round(layers * 29 / 32)))
    return EagleConfig(
        **{
            "algorithm": algorithm,
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
            "depths": depths if algorithm == EAGLE3 else (),
            "max_length": getattr(text, "max_position_embeddings", None) or 4096,
            "target": target,
            "target_fingerprint": fingerprint,
            **fields,
        }
    )


def rotate(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotary positions on [..., T, d]; element i is paired with i + d / 2."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td], dim=-1)


def _weight(module: nn.Module, model: Any, what: str) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UnsupportedArchitecture(f"{type(model).__name__}: its {what} is no table that an EAGLE head could share")
    return weight


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _ids_of(config: EagleConfig, d2t_K: Tensor | None, t2d_V: Tensor | None) -> Tensor | None:
    """The tokens of the draft vocabulary, increasing; None: all.

    Raises:
        ValueError: a map is missing or damaged, or the two contradict each other.
    """
    size, whole = config.draft_vocab_size, config.vocab_size
    if d2t_K is None and t2d_V is None:
        if size != whole:
            raise ValueError(f"d2t and t2d are missing, but draft_vocab_size={size} of {whole} tokens")
        return None
    if d2t_K is None or t2d_V is None:
        raise ValueError(f"{'d2t' if d2t_K is None else 't2d'} is missing beside the other map")
    if d2t_K.shape != (size,) or d2t_K.is_floating_point() or d2t_K.dtype == torch.bool:
        raise ValueError(f"d2t is {list(d2t_K.shape)} of {d2t_K.dtype}: integers, [{size}]")
    if t2d_V.shape != (whole,) or t2d_V.is_floating_point():
        raise ValueError(f"t2d is {list(t2d_V.shape)} of {t2d_V.dtype}: bool, [{whole}]")
    ids_K = torch.arange(size) + d2t_K.long()
    if int(ids_K.min()) < 0 or int(ids_K.max()) >= whole:
        raise ValueError(f"d2t leads to tokens {int(ids_K.min())} to {int(ids_K.max())}, of {whole}")
    if any(a >= b for a, b in itertools.pairwise(ids_K.tolist())):
        raise ValueError("d2t leads to tokens that do not increase")
    if not torch.equal(ids_K, t2d_V.nonzero().flatten()):
        raise ValueError("t2d marks other tokens than those that d2t leads to")
    return ids_K


def unrolled(head: Eagle, states_BTF: Tensor, tokens_BT: Tensor, embedding_VW: Tensor, steps: int) -> Iterator[Tensor]:
    """What serving computes while it drafts ``steps`` tokens deep from every pair at once: the training-time test.

        column i of step s     reads its own output of step s - 1 and token x_{i+1+s}, at position i + s,
                               sees the pairs <= i as the target's features made them, and itself at steps 1..s

    Paper: EAGLE-3, arXiv:2503.01840, section 3.2 and figure 6.

    Args:
        states_BTF: the target's states of rows 0..T-1, the depths side by side.
        tokens_BT: x_0..x_{T-1}.
        embedding_VW: see :meth:`Eagle.embedding_of`.
        steps: S.
    Returns:
        for s = 0, 1, ..: what the head reads for columns 0..T-2-s, [B, T-1-s, W]; it predicts x_{i+2+s}.
    """
    config = head.config
    length = tokens_BT.shape[1] - 1
    cos_Td, sin_Td = head.rotary_at(torch.arange(length + steps, device=tokens_BT.device))
    e_BTW = F.embedding(tokens_BT, embedding_VW)
    g = head.fuse(states_BTF[:, :length])
    scaling, group = config.head_dim**-0.5, config.heads // config.kv_heads
    first: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(min(steps, length)):
        count = length - step  # columns whose token is known
        g = g[:, :count]
        read, residual = head.open(g, e_BTW[:, 1 + step : 1 + step + count])
        q, k, v = head.project(read, cos_Td[step : step + count], sin_Td[step : step + count])
        if first is None:
            first = k, v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1, scale=scaling)
        else:
            own = [(each[0][:, :, :count], each[1][:, :, :count]) for each in (*own, (k, v))]
            out = _attend(q, first, own, scaling, group)
        h = head.close(residual, out.transpose(1, 2).flatten(2))
        yield head.read_out(h)
        g = head.following(h)


def _attend(
    q_BHTd: Tensor, first: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], scaling: float, group: int
) -> Tensor:
    """Attention to the first step's pairs up to each column, and to the column's own later steps."""
    count = q_BHTd.shape[2]
    k, v = (each[:, :, :count].repeat_interleave(group, 1) for each in first)
    seen_TT = torch.ones(count, count, dtype=torch.bool, device=q_BHTd.device).tril()
    scores = (q_BHTd @ k.transpose(-1, -2) * scaling).masked_fill(~seen_TT, -torch.inf)
    wide = [(each_k.repeat_interleave(group, 1), each_v.repeat_interleave(group, 1)) for each_k, each_v in own]
    beside = [(q_BHTd * each_k).sum(-1, keepdim=True) * scaling for each_k, _ in wide]
    weights = torch.cat([scores, *beside], dim=-1).softmax(-1)
    out = weights[..., :count] @ v
    for place, (_, each_v) in enumerate(wide):
        out = out + weights[..., count + place, None] * each_v
    return out
