"""The description of a decoder as data; native code computes every decoder with such a description.

    rows ── embedding ─┬─ norm ─ q, k, v ─ rotary ─ attention ─ out ─ norm ─(+)┬─ norm ─ gate, up ─ down ─ norm ─(+)─ …
                       └───────────────────────────────────────────────────────┘└─────────────────────────────────┘
         block: attention, a mixer or both, and an MLP, experts or both; or either     … ── norm ── head ── scale ── cap

Most anatomies lack some of these norms. In a parallel block the MLP has the input of attention. A language model is
described by models/adoption/description.py; a drafting method describes its own layers, and may share the head of the
target's decoder.

Letters: O outputs, K inner dimension, D width, d head width, V vocabulary, N positions, E experts, F channels of one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.forward.ssm.layout import Mixer
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native.packing import Tiles
from foretoken.native.superblocks import MixedTiles


class Projection(NamedTuple):
    """A linear map, ``scale * weight x + bias``.

    Attributes:
        weight_OK: in any floating dtype, packed in the layout's; or quantised, and packed as it is.
        bias_O: added in float32, or None.
        scale: float32 [O], or one for all outputs; allowed for a gate, an MLP's gated factor, attention's projections
            and a mixer's first projection.
    """

    weight_OK: Tensor | QuantisedWeight
    bias_O: Tensor | None = None
    scale: Tensor | float = 1.0

    @property
    def outputs(self) -> int:
        """O."""
        return int(self.weight_OK.shape[0])


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs, of which a row goes through a few; see experts.h.

        y = sum over the chosen experts e of  share_e * down_e(act(gate_e(x)) * up_e(x)),  or  down_e(act(up_e(x)))

    Attributes:
        router_ED: scores the experts; a row goes through the ``chosen`` experts with the highest scores.
        gate, up: of all experts, one below the other, [E F, D]; gate may be None.
        down: the same, [E D, F].
        chosen: experts of a row.
        normed: shares are a softmax over the chosen experts; else over all of them.
        router_bias_E: added to the scores, or None.
        sigmoid: shares are sigmoids of the scores, of the chosen ones divided by their sum if ``normed``.
        correction_E: added to sigmoids or to the softmax over all experts for the choice alone; or None.
        factor: of the shares.
        groups, open_groups, group_best: experts are chosen from the ``open_groups`` groups of neighbours with the
            highest sums of their ``group_best`` best scores, 1 or 2.
        opening_D: the output of the block's MLP is multiplied by sigmoid(opening . x); None: by 1.
    """

    router_ED: Tensor
    gate: Projection | None
    up: Projection
    down: Projection
    chosen: int
    normed: bool
    opening_D: Tensor | None = None
    router_bias_E: Tensor | None = None
    sigmoid: bool = False
    correction_E: Tensor | None = None
    factor: float = 1.0
    groups: int = 1
    open_groups: int = 1
    group_best: int = 1

    @property
    def count(self) -> int:
        """E."""
        return int(self.router_ED.shape[0])

    @property
    def width(self) -> int:
        """F."""
        return self.up.outputs // self.count


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): heads are products of compressed rows.

    Attributes:
        queries: from Q compressed elements to queries; None: the block's q gives queries.
        keys_values: from C compressed elements to each head's key without its rotated elements, and then its value.
        query_norm_Q, norm_C: gains of norms over compressed rows.
        value_dim: elements of a value, at most the layout's head_dim; in the cache zeros follow it.
        eps: of these norms.
    """

    queries: Projection | None
    keys_values: Projection
    query_norm_Q: Tensor | None
    norm_C: Tensor
    value_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Block:
    """One layer.

    Attributes:
        q, k, v, out: projections of attention; without v, values are the projections to keys; without k and v, it reads
            the keys and values of ``kv_layer`` or, without that, of another decoder's layer (cross-attention).
        kv_layer: keys and values are read from this earlier layer, with heads of the same sizes; or None.
        head_dim, kv_heads: of this layer; 0: the layout's.
        norm_values: each head's value is normed, without a gain.
        attention_norm_D: gain of the norm before it; None: attention reads the residual stream as it is.
        attention_end_norm_D: gain of the norm of its output; None: the output is added to the stream as it is.
        opening: as q; the sigmoid of its outputs multiplies what each head attended to; or None.
        q_norm_d, k_norm_d: gains of norms over each head's query and key, [d] or each head its own [heads, d], or over
            all of them together, [heads d]; or None.
        norm_last: queries and keys are normed after they are rotated.
        sinks_H: each head's score of a column that nothing is read from, or None.
        window: positions a row sees, itself included; 0: all.
        rotary: by which of the layout's rotaries; None: queries and keys are not rotated.
        gate, up, down: the MLP's projections, ``down(act(gate(x)) * up(x))``; gate None: ``down(act(up(x)))``; all
            None: there is no MLP.
        experts: in the place of the MLP, or next to it: then the sum of both; or None.
        mlp_norm_D, mlp_end_norm_D: as those of attention.
        attention_shift_D, mlp_shift_D: added after the norms before attention and the MLP, or None.
        parallel: the MLP reads the stream that attention reads, and both are added to it.
        parallel_mixer: a mixer with the input of attention, without an MLP; both outputs are added to the stream.
        latent: then q gives compressed queries, or queries, and k compressed keys and values and after them the rotated
            elements of keys, which all heads share; there is no v. A rotary turns the last elements of a head.
        input: how the layer's own input is taken (Gemma 4), where the layout has one; after the MLP.
        factor: of the stream at the end of the layer, which has a norm after its last branch.
    """

    q: Projection
    k: Projection | None
    v: Projection | None
    out: Projection
    attention_norm_D: Tensor | None
    opening: Projection | None = None
    q_norm_d: Tensor | None = None
    k_norm_d: Tensor | None = None
    window: int = 0
    rotary: int | None = 0
    gate: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    mlp_norm_D: Tensor | None = None
    attention_end_norm_D: Tensor | None = None
    mlp_end_norm_D: Tensor | None = None
    experts: Experts | None = None
    attention_shift_D: Tensor | None = None
    mlp_shift_D: Tensor | None = None
    parallel: bool = False
    parallel_mixer: "StateBlock | None" = None
    norm_last: bool = False
    sinks_H: Tensor | None = None
    latent: Latent | None = None
    kv_layer: int | None = None
    head_dim: int = 0
    kv_heads: int = 0
    norm_values: bool = False
    input: "LayerInput | None" = None
    factor: float = 1.0


class LayerInput(NamedTuple):
    """``x += norm(out(act(gate(x)) * input))``, with the layer's I of the inputs that :class:`Inputs` describes.

    Attributes:
        gate: I outputs.
        out: from them.
        norm_D: the gain of the norm.
    """

    gate: Projection
    out: Projection
    norm_D: Tensor


class Inputs(NamedTuple):
    """Inputs of all L layers, ``(norm(projection(e) * projected_factor) + embedding[token] * token_factor) *
    input_factor``, of a token's scaled embedding e; Gemma 4's per-layer embeddings.

    Attributes:
        projection: L I outputs.
        embedding: [V, L I], as a layout's ``embedding_VD``.
        gain_I: of the norm over each layer's part.
        projected_factor, token_factor, input_factor: numbers.
    """

    projection: Projection
    embedding: Tensor | StoredWeight
    gain_I: Tensor
    projected_factor: float
    token_factor: float
    input_factor: float

    @property
    def input_width(self) -> int:
        """I."""
        return len(self.gain_I)


@dataclass(frozen=True, slots=True)
class StateBlock:
    """A layer with a state-space mixer in the place of attention, or a mixer parallel to attention; see ssm.inc.

    Attributes:
        project: to z, x, B, C and dt of a row, in this order; of a delta net to z, q, k, v, a and b; of a short
            convolution to z, x and a factor of x. All but the last have multiples of 16 outputs.
        out: from the gated and normed rows.
        mixer: sizes and parameters of the recurrence between them.
        mixer_norm_D: gain of the norm before it.
        gain_I, norm_group, norm_eps: of the gated norm, and over how many channels each is taken; 0: rows are gated and
            multiplied by the gain, and not normed.
        norm_first: the norm is taken before the gate.
        gate, up, down, experts, mlp_norm_D: as in :class:`Block`.
    """

    project: tuple[Projection, ...]
    out: Projection
    mixer: Mixer
    mixer_norm_D: Tensor
    gain_I: Tensor
    norm_group: int
    norm_eps: float
    norm_first: bool = False
    gate: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    mlp_norm_D: Tensor | None = None
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class MLPBlock:
    """A layer without attention or mixer: an MLP alone.

    Attributes:
        gate, up, down, experts, mlp_norm_D: as in :class:`Block`.
    """

    up: Projection
    down: Projection
    mlp_norm_D: Tensor
    gate: Projection | None = None
    experts: Experts | None = None


class PackedBlock(NamedTuple):
    """A block's packed weights; see packing.py. None: the block has no such weight; a mixer's projection is `qkv`.

    ``experts``: gate and up, then down projections, those of all experts one after the other. ``mixer``: the in and
    the out projection of a mixer parallel to attention. ``latent``: of its queries, if any, and of keys and values.
    """

    qkv: Tiles | MixedTiles | None
    out: Tiles | None
    gate_up: Tiles | None
    down: Tiles | None
    experts: tuple[Tiles, Tiles] | None = None
    mixer: tuple[Tiles | MixedTiles, Tiles] | None = None
    latent: tuple[Tiles, ...] = ()


class Head(NamedTuple):
    """A packed head, which several decoders may share.

    Attributes:
        scale: of its logits.
        cap: a scaled logit x becomes ``cap * tanh(x / cap)``; 0: it stays.
        bias_V: float32, added before that, as many as the tiles have outputs; or None.
    """

    packed: Tiles
    vocab_size: int
    scale: float = 1.0
    cap: float = 0.0
    bias_V: Tensor | None = None


Rotary = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A decoder.

    Attributes:
        dtype: float32 or bfloat16, of weights that are not quantised, keys and values.
        width, heads, kv_heads, head_dim: sizes; ``head_dim`` a multiple of 16 of at most 512, ``width`` one of 32.
            Where blocks have their own, these are the largest.
        mlp_width: of the widest MLP; each is a multiple of 32; 0: no block has one. Experts have widths of their own.
        norm_eps: of all norms.
        scaling: of attention scores.
        num_blocks: number of blocks.
        blocks: first to last; iterated once, so a generator may load each block when it is needed.
        rotary: positions int64 [N] -> cos and sin, float32 [N, half], ``half`` at most head_dim / 2, and perhaps a
            factor of queries [N]; or several.
        max_length: positions that a row may have.
        final_norm_D: gain of the norm before the head.
        head: projection to V logits, or another decoder's packed head.
        embedding_VD: in ``dtype``, or in a float32 layout the blocks of a file; None: every forward is entered with
            hidden states.
        activation: of gates, or of MLPs without: "silu", "gelu", "gelu_tanh", "relu" or "relu_squared"; of gates alone:
            "clamped_swiglu".
        centred: norms subtract the mean first (LayerNorm); else they do not (RMSNorm).
        final_shift_D: added after the norm before the head, or None.
        position_embedding_ND: in ``dtype``, of ``max_length`` positions: added to embeddings; or None.
        interleaved: rotary pairs elements 2 i and 2 i + 1 of a head, not i and i + half.
        score_cap: a scaled attention score x becomes ``score_cap * tanh(x / score_cap)``; 0: it stays.
        embedding_scale: of embeddings.
        residual_scale: of the outputs of attention and MLPs.
        logit_scale, logit_cap: of a head that is a projection; see :class:`Head`.
        inputs: of each layer; or None.
    """

    dtype: torch.dtype
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    scaling: float
    num_blocks: int
    blocks: Iterable[Block | StateBlock | MLPBlock]
    rotary: Rotary | tuple[Rotary, ...]
    max_length: int
    final_norm_D: Tensor
    head: Projection | Head
    embedding_VD: Tensor | StoredWeight | None = None
    activation: str = "silu"
    interleaved: bool = False
    score_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    centred: bool = False
    final_shift_D: Tensor | None = None
    position_embedding_ND: Tensor | None = None
    inputs: Inputs | None = None
