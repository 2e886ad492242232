"""Many blocks of many texts in one pass of the block network, for training.

Every block equals ``BlockNetwork.forward`` of its own anchor: keys and values of the context are computed once for a
text, and a mask hides the rows from a block's root on.

Letters: B sequences, T positions, F width of the target's states, W width, G key/value heads, n query heads of a group,
d head width, A anchors of a sequence, k slots, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.feature_heads.block import rotate
from foretoken.methods.diffuspec.network import BlockNetwork


def many_blocks(
    network: BlockNetwork, states_BTF: Tensor, tokens_BT: Tensor, anchors_BA: Tensor, embedding_VW: Tensor
) -> Tensor:
    """Return the inputs of the target's LM head, [B, A, k, W], for many blocks of a text at once.

    Args:
        states_BTF: the target's states of rows 0..T-1, the depths concatenated.
        tokens_BT: x.
        anchors_BA: positions of roots, from 1 on; a block attends only to the rows before its root.
        embedding_VW: see ``embedding_of``.
    """
    config, length = network.config, states_BTF.shape[1]
    slots, group = config.slots, config.heads // config.kv_heads
    s_BTF = network.fused(states_BTF)
    keys, values = network.split_context(network.context(s_BTF))
    positions = torch.arange(length + slots, device=tokens_BT.device)
    cos_Td, sin_Td = network.rotary_at(positions)
    before_BAF = s_BTF.gather(1, (anchors_BA - 1)[..., None].expand(-1, -1, s_BTF.shape[-1]))
    h = network.entering(F.embedding(tokens_BT.gather(1, anchors_BA), embedding_VW), before_BAF)
    at_BAk = anchors_BA[..., None] + torch.arange(1, slots + 1, device=tokens_BT.device)
    cos, sin = (each[at_BAk][:, :, None] for each in (cos_Td, sin_Td))  # [B, A, 1, k, d / 2]
    hidden = positions[:length] >= anchors_BA[..., None]  # [B, A, T]
    for number in range(network.num_layers):
        layer = network.layer(number)
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
    return network.norm(h)
