"""DFlash's block network, with DSpark's Markov head or DFlash2's convolutions and selector.

    context   c_i = hidden_norm(fc(states of row i at several depths)),  i < P: keys and values of every layer
    block     rows [anchor, mask, ..., mask] at positions P, P + 1, ...; they see the context and each other
    row j     predicts position P + j (j >= 1), or P + j + 1 where the anchor's row predicts, too
    Markov    logits of row k  +  W2 f(W1[token before], ...): the tokens of a block follow each other
    DFlash2   each half f of a layer is conv_1(f(conv_0(y))): rows are mixed with those before them in the block; of a
              row's best tokens b, <A[token before] * W n, B[b]> is added to the logits, and no other is drafted

P is the position of the anchor, the newest token, which the target has not read. Sliding layers see a block's own rows
up to themselves only, unless the config says otherwise.

Papers: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147.

Letters: N context rows, B rows of a block, F width of the fused states, W width, V vocabulary, K draft vocabulary, r
rank of the Markov head or of the selector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.feature_heads.block import Block, Norm, rotate
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.published.blocks import LayersConfig
from foretoken.drafting.published.probe import PublishedHead, looked_up, scored, tap_readings
from foretoken.forward import anatomy
from foretoken.models.language_model import LanguageModel

MOST_ROWS = 64
_BLOCKS_APART = 4  # tokens, in the probe's text
MARKOV = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayersConfig):
    """The sizes and options of a network, and its target.

    Attributes:
        depths: of the target's residual stream, in the order of fusion.
        rows: B.
        mask_token: of the rows after the anchor.
        anchor_predicts: the anchor's row predicts the next token; else every row its own place.
        causal: of each layer: a row of the block sees the block's rows up to itself only.
        markov_rank, markov_kind: r, and one of ``MARKOV``; 0: there is no Markov head.
        confidence: there is a head that predicts whether a token is accepted.
        conv_taps, conv_group: rows that DFlash2's convolutions read, and channels that share a coefficient; 0 taps:
            there are no convolutions.
        selector_rank, selector_top: r, and the candidates of a row; a rank of 0: there is no selector.
        embedding_scale, logit_scale, logit_cap: of embeddings and logits; a cap of 0 leaves logits as they are.
        target_layers: layers of the target; 0: not known.
    """

    from_zero = ("mask_token", "markov_rank", "logit_cap", "target_layers", "conv_taps", "selector_rank")

    depths: tuple[int, ...] = ()
    rows: int = 16
    mask_token: int = 0
    anchor_predicts: bool = False
    causal: tuple[bool, ...] = ()
    markov_rank: int = 0
    markov_kind: str = MARKOV[0]
    confidence: bool = False
    conv_taps: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top: int = 16
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    target_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.rows <= MOST_ROWS:
            raise ValueError(f"block_size={self.rows}: 2 to {MOST_ROWS}")
        if not self.depths or any(type(each) is not int or each < 1 for each in self.depths):
            raise ValueError(f"target_layer_ids give the depths {list(self.depths)}: at least one, from 1 on")
        if type(self.mask_token) is not int or not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token!r}: a token of {self.vocab_size}")
        if self.markov_kind not in MARKOV:
            raise ValueError(f"markov_head_type={self.markov_kind!r}: known are {', '.join(MARKOV)}")
        if self.conv_taps and self.width % self.conv_group:
            raise ValueError(f"conv_group_size={self.conv_group} does not divide hidden_size={self.width}")

    @property
    def taps(self) -> Taps:
        return Taps(self.depths, final=self.final_norm)

    @property
    def slots(self) -> int:
        """Tokens of a draft."""
        return self.rows if self.anchor_predicts else self.rows - 1


class MarkovHead(nn.Module):
    """Adds to a row's logits what the token before it says: draft tokens are drawn in order."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.width
        self.kind = config.markov_kind
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, token: int | Tensor, n: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input of W2, the embedding m of the token before, and the state after it; of one row or many.

        Args:
            token: the one before.
            n: the row's normed state.
            state: of the rows before; None: there is none.
        """
        m = self.markov_w1.weight[token].to(n.dtype)
        if self.kind == "vanilla":
            return m, m, None
        if self.kind == "gated":
            return self.gate_proj(torch.cat([n, m], -1)).sigmoid() * m, m, None
        state = torch.zeros_like(m) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, m, n], -1)).chunk(3, -1)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return output.tanh(), m, state


class Selector(nn.Module):
    """Scores a row's best tokens as successors of the token before it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.top = min(config.selector_top, config.draft_vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.width, config.selector_rank, bias=False)

    def forward(self, logits_K: Tensor, token: int, n_W: Tensor, ids_K: Tensor | None) -> Tensor:
        """Return the row's logits, -inf for all but its candidates."""
        best_C = logits_K.topk(self.top).indices
        successors_Cr = self.successor_codebook[best_C if ids_K is None else ids_K.to(best_C.device)[best_C]]
        addend_C = successors_Cr @ (self.predecessor_codebook[token] * self.hidden_projection(n_W))
        return torch.full_like(logits_K, -torch.inf).index_copy(0, best_C, logits_K[best_C] + addend_C.float())


class Convolution(nn.Module):
    """Mixes the rows of each block with those before them, by coefficients of the channel and of the row."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.taps, self.group = config.conv_taps, config.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.width))
        self.kernel_projection = nn.Linear(config.width, 2 * self.taps * config.width // self.group, bias=False)

    def forward(self, y_TW: Tensor, rows: int, half: Callable[[Tensor], Tensor]) -> Tensor:
        """Return conv_1(half(conv_0(y))); both kernels depend on y.

        Args:
            rows: of a block; the blocks lie one after the other.
        """
        per_row = self.kernel_projection(y_TW).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        kernels = (self.base_kernel + per_row).unbind(1)

        def mixed(z_TW: Tensor, kernel: Tensor) -> Tensor:
            z_RBW = z_TW.unflatten(0, (-1, rows))
            before = (F.pad(z_RBW, (0, 0, tap, 0))[:, :rows].flatten(0, 1) for tap in range(self.taps))
            return sum((kernel[:, tap] * z for tap, z in enumerate(before)), torch.zeros_like(z_TW))

        return mixed(half(mixed(y_TW, kernels[0])), kernels[1])


class Layer(Block):
    """A decoder layer; DFlash2's has a convolution around each half."""

    def __init__(self, config: DFlashConfig, window: int | None) -> None:
        super().__init__(config, window=window)
        self.attention_conv, self.mlp_conv = (Convolution(config) if config.conv_taps else None for _ in range(2))

    def over_blocks(
        self, x_TW: Tensor, rows: int, places: tuple[Tensor, Tensor], attend: Callable[..., Tensor]
    ) -> Tensor:
        """Return the layer's output for rows of blocks.

        Args:
            rows: of a block.
            places: cos and sin of the rows' positions.
            attend: (queries, keys, values of the rows) -> values weighted by attention, [T, H d].
        """

        def attention(y_TW: Tensor) -> Tensor:
            return self.self_attn.o_proj(attend(*self.project(y_TW, *places)))

        y_TW = self.input_layernorm(x_TW)
        x_TW = x_TW + (attention(y_TW) if self.attention_conv is None else self.attention_conv(y_TW, rows, attention))
        u_TW = self.post_attention_layernorm(x_TW)
        return x_TW + (self.mlp(u_TW) if self.mlp_conv is None else self.mlp_conv(u_TW, rows, self.mlp))


class DFlashNetwork(PublishedHead):
    """The weights, and the plain forward pass.

    Args:
        config: its sizes.
        ids_K, own_head, own_embedding: see :class:`StateNetwork`.
    """

    config: DFlashConfig
    norm: Norm

    def __init__(self, config: DFlashConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.fc = nn.Linear(len(config.depths) * config.target_width, config.width, bias=False)
        self.hidden_norm = Norm(config.width, eps=config.norm_eps)
        self.layers = nn.ModuleList([Layer(config, config.window(number)) for number in range(config.layers)])
        self.norm = Norm(config.width, eps=config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = Selector(config) if config.selector_rank else None
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.width + config.markov_rank, 1)})

    def layer(self, number: int) -> Layer:
        found = self.layers[number]
        assert isinstance(found, Layer)
        return found

    def forward(self, states_NF: Tensor, tokens_B: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the normed states n of a block's rows, [B, W].

        Args:
            states_NF: the target's states of the rows before the anchor, the depths side by side.
            tokens_B: the anchor and the mask tokens.
            embedding_VW: of the tokens.
        """
        return self.blocks(states_NF, tokens_B[None], torch.tensor([len(states_NF)]), embedding_VW)[0]

    def blocks(self, states_NF: Tensor, tokens_RB: Tensor, anchors_R: Tensor, embedding_VW: Tensor) -> Tensor:
        """As :meth:`forward` for several blocks of one text, [R, B, W].

        Args:
            anchors_R: position of each block's anchor; the block sees the rows before it.
        """
        config, count = self.config, len(states_NF)
        c_NW = self.context(states_NF)
        x_TW = F.embedding(tokens_RB.flatten(), embedding_VW) * config.embedding_scale
        before_N, block_B = (torch.arange(size, device=c_NW.device) for size in (count, tokens_RB.shape[1]))
        own_T = (anchors_R[:, None] + block_B).flatten()
        positions = torch.cat([before_N, own_T])
        cos, sin = self.rotary_at(positions)
        ago = own_T[:, None] - positions
        block_T = torch.arange(len(anchors_R), device=c_NW.device).repeat_interleave(tokens_RB.shape[1])
        known = torch.cat([before_N < anchors_R[block_T, None], block_T[:, None] == block_T], dim=1)
        for number in range(config.layers):
            layer = self.layer(number)
            seen = known & (ago < layer.window) if layer.window else known
            if config.causal[number]:
                seen = seen & (ago >= 0)
            context = self.context_heads(number, c_NW, cos[:count], sin[:count])

            def attend(
                q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen, context: tuple[Tensor, Tensor] = context
            ) -> Tensor:
                keys, values = (torch.cat(both, 1)[None] for both in zip(context, (k, v), strict=True))
                found = F.scaled_dot_product_attention(q[None], keys, values, seen, enable_gqa=True)
                return found[0].transpose(0, 1).flatten(1)

            x_TW = layer.over_blocks(x_TW, tokens_RB.shape[1], (cos[count:], sin[count:]), attend)
        return self.norm(x_TW).unflatten(0, tokens_RB.shape)

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Initialise the norm as the target's final norm, which the LM head expects."""
        gain_D = anatomy.gain_of(anatomy.find(model).final_norm)
        if gain_D is not None and gain_D.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain_D)

    @property
    def rows_per_token(self) -> float:  # type: ignore[override]
        return self.config.rows / _BLOCKS_APART

    def readings(self, target: LanguageModel) -> dict[str, tuple[Any, ...]]:
        """See :class:`PublishedHead`."""
        config = self.config
        scale = getattr(anatomy.find(target.model).embedding, "embed_scale", 1.0)  # of Gemma's lookups
        scales = dict.fromkeys((config.embedding_scale, 1.0, float(scale)))
        return {**tap_readings(config, target.num_layers), "embedding_scale": tuple(scales)}

    def first_drafts(
        self, states_TF: Tensor, tokens_T: Tensor, embedding_VW: Tensor, head_KW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PublishedHead`: an anchor's block drafts the tokens after it."""
        anchors_R = torch.arange(_BLOCKS_APART, len(tokens_T), _BLOCKS_APART)
        tokens_RB = torch.full((len(anchors_R), self.config.rows), self.config.mask_token)
        tokens_RB[:, 0] = tokens_T[anchors_R]
        places_RB, table = looked_up(tokens_RB, embedding_VW)
        n_RBW = self.blocks(states_TF[:-1], places_RB, anchors_R, table)
        n_RW = n_RBW[:, 0 if self.config.anchor_predicts else 1]
        rows = zip(scored(n_RW, head_KW), tokens_T[anchors_R].tolist(), n_RW, strict=True)
        return anchors_R, torch.stack([self.following(*row, None)[0] for row in rows])

    def following(
        self, logits_K: Tensor, token: int, n_W: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a row's logits given the token before it, and what the confidence and the next row read.

        Args:
            logits_K: of the LM head.
            n_W, state: see :class:`MarkovHead`.
        """
        read, config = n_W, self.config
        logits_K = logits_K * config.logit_scale
        if self.markov_head is not None:
            f, m, state = self.markov_head(token, n_W, state)
            logits_K, read = logits_K + self.markov_head.markov_w2(f).float(), torch.cat([n_W, m])
        if config.logit_cap:
            logits_K = config.logit_cap * (logits_K / config.logit_cap).tanh()
        if self.candidate_selector is not None:
            logits_K = self.candidate_selector(logits_K, token, n_W, self.ids_K)
        return logits_K, read, state

    def context(self, states_TF: Tensor) -> Tensor:
        """c, [T, W]."""
        return self.hidden_norm(self.fc(states_TF))

    def context_heads(self, number: int, c_TW: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values of context rows in a layer, [G, T, d]; the layer's norm is not applied."""
        parts = self.layer(number).self_attn
        k, v = (
            projection(c_TW).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
            for projection in (parts.k_proj, parts.v_proj)
        )
        k = k if parts.k_norm is None else parts.k_norm(k)
        return rotate(k, cos_Td, sin_Td).to(v.dtype), v

    def rates(self) -> tuple[Tensor, float]:
        config = self.config
        if config.rope_scaling is None:
            return super().rates()
        return config.rope_scaling.frequencies(config.rope_theta, config.head_dim)
