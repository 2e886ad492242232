"""The block network: a masked block of slots, filled in one pass, with the target's states as context.

    s_i         the target's states of row i at several depths, each normed, concatenated
    context     keys and values of row i in layer l  =  W_l s_i, keys rotated to position i; no other use of s_i
    input       slot j of the block after root x_n:   mask_j + W_in [e(x_n); s_{n-1}]      at position n + j
    layers      every slot attends to the context and to all k slots, itself and later ones included
    slot j ── norm ── rows of the target's head: q of x_{n+j}, given x_0 .. x_n but not the other slots' tokens

:meth:`BlockNetwork.forward` computes this for one block. Serving (``block.py``, with torch or in native code) and
training (:meth:`BlockNetwork.many_blocks`) are tested to be equal to it.

Paper: DFlash, arXiv:2602.06036: features of several depths are the keys and values of every layer of a block diffusion
drafter. It replaces the diffusion language model of DiffuSpec, arXiv:2510.02358. Differs: states are normed before
they are fused, and each layer has its own fusion weights for keys and values (as in DFlare, arXiv:2606.02091); root
and last state enter every slot, while DFlash makes the root a row of the block; every slot has its own mask; two
layers and three depths.

Letters: N rows before the root, B sequences, T positions, F width of the target's states, W width, L layers, H query
heads, G key/value heads, n query heads of a group, d head width, A anchors of a sequence, k slots, V vocabulary,
K draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import Block, BlockConfig, Norm, rotate
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.forward import anatomy
from foretoken.models.language_model import LanguageModel

LAYERS, SLOTS = 2, 8
MOST_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class BlockNetworkConfig(BlockConfig):
    """Sizes of a block network, and its target.

    Attributes:
        layers: L.
        slots: k, tokens that a pass drafts.
        depths: depths of the target's residual stream that are read, increasing.
    """

    layers: int = LAYERS
    slots: int = SLOTS
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots > MOST_SLOTS:
            raise ValueError(f"slots={self.slots}: {MOST_SLOTS} at most")
        found = self.depths
        if not isinstance(found, list | tuple) or not found or any(type(each) is not int or each < 1 for each in found):
            raise ValueError(f"depths={found!r}: at least one, each from 1 to the target's number of layers")
        if list(found) != sorted(set(found)):
            raise ValueError(f"depths={found!r}: increasing")
        object.__setattr__(self, "depths", tuple(found))

    @property
    def taps(self) -> Taps:
        return Taps(self.depths)


class BlockNetwork(StateNetwork):
    """The block network: its weights, the plain forward pass, and the pieces of serving and training.

    Args:
        config: its sizes.
        ids_K: int64, increasing: the scored tokens; None: all.
    """

    algorithm = "diffuspec"
    title = "DiffuSpec block network"
    Config = BlockNetworkConfig
    config: BlockNetworkConfig
    norm: Norm

    def __init__(self, config: BlockNetworkConfig, *, ids_K: Tensor | None = None) -> None:
        super().__init__(config, ids_K=ids_K)
        fused = len(config.depths) * config.target_width
        self.context = nn.Linear(fused, 2 * config.layers * config.kv_heads * config.head_dim, bias=False)
        self.enter = nn.Linear(config.width + fused, config.width, bias=False)
        self.masks = nn.Parameter(torch.zeros(config.slots, config.width))
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = Norm(config.width, eps=config.norm_eps)

    # ------------------------------------------------------------------ the network on one page

    def forward(self, states_NF: Tensor, e_W: Tensor) -> Tensor:
        """Return the inputs of the target's LM head for the k slots of one block, [k, W].

        Args:
            states_NF: the target's states of rows 0 .. n - 1, depths concatenated; row n, the root, has none yet.
            e_W: embedding of the root x_n.
        """
        config, n, eps = self.config, len(states_NF), self.config.norm_eps
        s_NF = F.rms_norm(states_NF.unflatten(-1, (len(config.depths), -1)), (config.target_width,), eps=eps).flatten(1)
        # context: keys and values of all layers in one product
        both = self.context(s_NF).unflatten(-1, (2, config.layers, config.kv_heads, config.head_dim))
        context_k, context_v = both.permute(1, 2, 3, 0, 4)  # [L, G, N, d] each
        # input of slot j: its mask, the root and the last state
        h_kW = self.masks + self.enter(torch.cat([e_W, s_NF[-1]]))
        cos, sin = self.rotary_at(torch.arange(n + config.slots + 1, device=e_W.device))
        at = slice(n + 1, None)  # positions of the slots
        for number in range(config.layers):
            layer, heads = self.layer(number), self.layer(number).self_attn
            u_kW = layer.input_layernorm(h_kW)
            projections = (heads.q_proj, heads.k_proj, heads.v_proj)
            q, k, v = (each(u_kW).unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for each in projections)
            k_context = context_k[number]
            if heads.q_norm is not None and heads.k_norm is not None:
                q, k, k_context = heads.q_norm(q), heads.k_norm(k), heads.k_norm(k_context)
            q = rotate(q, cos[at], sin[at])
            keys = torch.cat([rotate(k_context, cos[:n], sin[:n]), rotate(k, cos[at], sin[at])], dim=1)
            values = torch.cat([context_v[number], v], dim=1)
            # no mask: every slot attends to the whole context and the whole block
            attended = F.scaled_dot_product_attention(q[None], keys[None], values[None], enable_gqa=True)[0]
            h_kW = h_kW + heads.o_proj(attended.transpose(0, 1).flatten(1))
            m_kW, mlp = layer.post_attention_layernorm(h_kW), layer.mlp
            h_kW = h_kW + mlp.down_proj(F.silu(mlp.gate_proj(m_kW)) * mlp.up_proj(m_kW))
        return self.norm(h_kW)

    # ------------------------------------------------------------------ its pieces, for serving and training

    def fused(self, states_TF: Tensor) -> Tensor:
        """Return s [..., F]: the target's states, each depth normed separately."""
        depths = states_TF.float().unflatten(-1, (len(self.config.depths), -1))
        return F.rms_norm(depths, depths.shape[-1:], eps=self.config.norm_eps).flatten(-2)

    def split_context(self, product_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Split the product of ``context`` into keys and values of all layers, [..., T, L, G, d]; keys not rotated."""
        config = self.config
        heads = product_TO.unflatten(-1, (2, config.layers, config.kv_heads, config.head_dim))
        keys, values = heads[..., 0, :, :, :], heads[..., 1, :, :, :]
        if config.norm_heads:
            keys = F.rms_norm(keys, keys.shape[-1:], eps=config.norm_eps) * self.key_gains()
        return keys, values

    def key_gains(self) -> Tensor:
        """Return the gains of each layer's key norm, [L, 1, d]."""
        norms = [self.layer(number).self_attn.k_norm for number in range(self.num_layers)]
        return torch.stack([norm.weight for norm in norms if norm is not None])[:, None]

    def entering(self, e_AW: Tensor, s_AF: Tensor) -> Tensor:
        """Return the input of the first layer, [..., A, k, W].

        Args:
            e_AW: embeddings of roots.
            s_AF: fused states of the rows before them.
        """
        return self.enter(torch.cat([e_AW, s_AF], dim=-1))[..., None, :] + self.masks

    def many_blocks(self, states_BTF: Tensor, tokens_BT: Tensor, anchors_BA: Tensor, embedding_VW: Tensor) -> Tensor:
        """Return the inputs of the target's LM head, [B, A, k, W], for many blocks of many texts, for training.

        Keys and values of the context are computed once for a text; a mask hides the rows from a block's root on.

        Args:
            states_BTF: the target's states of rows 0 .. T - 1, the depths concatenated.
            tokens_BT: x.
            anchors_BA: positions of roots, from 1 on; a block attends only to the rows before its root.
            embedding_VW: see ``embedding_of``.
        """
        config, length = self.config, states_BTF.shape[1]
        slots, group = config.slots, config.heads // config.kv_heads
        s_BTF = self.fused(states_BTF)
        keys, values = self.split_context(self.context(s_BTF))
        positions = torch.arange(length + slots, device=tokens_BT.device)
        cos_Td, sin_Td = self.rotary_at(positions)
        before_BAF = s_BTF.gather(1, (anchors_BA - 1)[..., None].expand(-1, -1, s_BTF.shape[-1]))
        h = self.entering(F.embedding(tokens_BT.gather(1, anchors_BA), embedding_VW), before_BAF)
        at_BAk = anchors_BA[..., None] + torch.arange(1, slots + 1, device=tokens_BT.device)
        cos, sin = (each[at_BAk][:, :, None] for each in (cos_Td, sin_Td))  # [B, A, 1, k, d / 2]
        hidden = positions[:length] >= anchors_BA[..., None]  # [B, A, T]
        for number in range(self.num_layers):
            layer = self.layer(number)
            q, k, v = layer.project(layer.input_layernorm(h), cos, sin)  # [B, A, H or G, k, d]
            k_context = rotate(keys[:, :, number].transpose(1, 2), cos_Td[:length], sin_Td[:length])  # [B, G, T, d]
            v_context = values[:, :, number].transpose(1, 2)
            q = q.unflatten(2, (config.kv_heads, group)) * config.head_dim**-0.5  # [B, A, G, n, k, d]
            context = torch.einsum("bagnkd,bgtd->bagnkt", q, k_context)
            context = context.masked_fill(hidden[:, :, None, None, None], -torch.inf)
            block = torch.einsum("bagnkd,bagjd->bagnkj", q, k)
            weights = torch.cat([context, block], dim=-1).softmax(-1)
            out = torch.einsum("bagnkt,bgtd->bagnkd", weights[..., :length], v_context)
            out = out + torch.einsum("bagnkj,bagjd->bagnkd", weights[..., length:], v)
            attended = out.permute(0, 1, 4, 2, 3, 5).reshape(*anchors_BA.shape, slots, -1)
            h = layer.close(h, attended)
        return self.norm(h)

    # ------------------------------------------------------------------ files, and the target of a network

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: a field of ``config.json`` differs; the message names it.
        """
        super().check_shape(model)
        config = self.config
        if config.width != config.target_width:
            raise MismatchError(
                f"the {self.title}'s width is {config.width}, but embedding and head, which it shares with "
                f"'{model.name}', are {config.target_width} wide"
            )
        if config.depths[-1] > model.num_layers:
            raise MismatchError(
                f"the {self.title}'s depths are {list(config.depths)}, but '{model.name}' has {model.num_layers} layers"
            )

    @torch.no_grad()
    def begin_near(self, model: Any) -> None:
        """Initialise every slot's input as the last state's deepest depth, and the norm as the target's final norm."""
        width = self.config.width
        if self.config.target_width == width:
            self.enter.weight.mul_(0.3)
            self.enter.weight[:, -width:] += torch.eye(width, device=self.enter.weight.device)
        gain_D = anatomy.gain_of(anatomy.find(model).final_norm)
        if gain_D is not None and gain_D.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain_D)

    @classmethod
    def shape_for(cls, num_layers: int) -> dict[str, Any]:
        """Read the target after a quarter, half and three quarters of its layers."""
        return {"depths": tuple(sorted({max(1, round(num_layers * share)) for share in (0.25, 0.5, 0.75)}))}
