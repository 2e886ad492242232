"""The block network: a masked block of slots, filled in one pass over what the target made of the text before it.

    s_i         the target's states of row i, a depth beside the other, each normed
    context     keys and values of row i in layer l  =  W_l s_i, keys rotated to position i: nothing else is read of it
    entering    slot j of the block behind root x_n:   mask_j + enter([e(x_n); s_{n-1}])      at position n + j
    layers      every slot sees the context and all k slots, itself and later ones included
    slot j ── norm ── rows of the target's head: q of x_{n+j}, given x_0 .. x_n and not the slots before it

Paper: DFlash, arXiv:2602.06036: features of several depths are fed as keys and values to every layer of a block
diffusion drafter. Differs: states are normed before they are fused, and a product of its own makes each layer's keys
and values of them at once (own fusion weights for each layer, as DFlare, arXiv:2606.02091, has them); root and last
state enter every slot instead of the root being a row of the block; a mask of its own for each slot; two layers and
three depths.

Letters: B sequences, T positions, F width of the target's states, W width, L layers, G key/value heads, d head width,
A anchors of a sequence, k slots, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import Block, BlockConfig, Norm, fields_for, rotate
from foretoken.drafting.feature_heads.draft_ids import IDS, checked_ids, spread_ids
from foretoken.drafting.feature_heads.state_head import StateHead
from foretoken.forward import anatomy
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel

LAYERS, SLOTS = 2, 8
MOST_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class BlockNetworkConfig(BlockConfig):
    """What a block network is, and whose.

    Attributes:
        layers: L.
        slots: k, tokens that a pass drafts.
        depths: of the target's residual stream that are read, increasing.
    """

    sizes = (*BlockConfig.sizes, "layers", "slots")

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
    def reads_final(self) -> bool:
        return False

    def depths_of(self, num_layers: int) -> tuple[int, ...]:
        return self.depths


class BlockNetwork(StateHead):
    """The weights, and their arithmetic piece by piece.

    Args:
        config: what it is.
        ids_K: int64, increasing: the tokens that it scores; None: all.
    """

    algorithm = "diffuspec"
    title = "DiffuSpec block network"
    option = "head"
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

    # ------------------------------------------------------------------ the arithmetic

    def fused(self, states_TF: Tensor) -> Tensor:
        """s [..., F]: the target's states, each depth normed for itself."""
        depths = states_TF.float().unflatten(-1, (len(self.config.depths), -1))
        return F.rms_norm(depths, depths.shape[-1:], eps=self.config.norm_eps).flatten(-2)

    def split_context(self, product_TO: Tensor) -> tuple[Tensor, Tensor]:
        """What ``context`` gives, as keys and values of all layers, [..., T, L, G, d]; keys are normed, not rotated."""
        config = self.config
        heads = product_TO.unflatten(-1, (2, config.layers, config.kv_heads, config.head_dim))
        keys, values = heads[..., 0, :, :, :], heads[..., 1, :, :, :]
        if config.norm_heads:
            keys = F.rms_norm(keys, keys.shape[-1:], eps=config.norm_eps) * self.key_gains()
        return keys, values

    def key_gains(self) -> Tensor:
        """[L, 1, d]: of the norms of each layer's keys."""
        norms = [self.layer(number).self_attn.k_norm for number in range(self.num_layers)]
        return torch.stack([norm.weight for norm in norms if norm is not None])[:, None]

    def entering(self, e_AW: Tensor, s_AF: Tensor) -> Tensor:
        """What enters the first layer, [..., A, k, W].

        Args:
            e_AW: embeddings of roots.
            s_AF: fused states of the rows before them.
        """
        return self.enter(torch.cat([e_AW, s_AF], dim=-1))[..., None, :] + self.masks

    def blocks(self, states_BTF: Tensor, tokens_BT: Tensor, anchors_BA: Tensor, embedding_VW: Tensor) -> Tensor:
        """What the head reads, [B, A, k, W], for many blocks of a sequence at once.

        Args:
            states_BTF: the target's states of rows 0..T-1, the depths side by side.
            tokens_BT: x.
            anchors_BA: positions of roots, from 1 on; what lies at and behind one is not seen from its block.
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
        unseen = positions[:length] >= anchors_BA[..., None]  # [B, A, T]
        for number in range(self.num_layers):
            read, residual = self.go_on(number, h)
            q, k, v = self.project(read, cos, sin, number)  # [B, A, H or G, k, d]
            k_ctx = rotate(keys[:, :, number].transpose(1, 2), cos_Td[:length], sin_Td[:length])  # [B, G, T, d]
            v_ctx = values[:, :, number].transpose(1, 2)
            q = q.unflatten(2, (config.kv_heads, group)) * config.head_dim**-0.5  # [B, A, G, n, k, d]
            far = torch.einsum("bagnkd,bgtd->bagnkt", q, k_ctx).masked_fill(unseen[:, :, None, None, None], -torch.inf)
            near = torch.einsum("bagnkd,bagjd->bagnkj", q, k)
            weights = torch.cat([far, near], dim=-1).softmax(-1)
            out = torch.einsum("bagnkt,bgtd->bagnkd", weights[..., :length], v_ctx)
            out = out + torch.einsum("bagnkj,bagjd->bagnkd", weights[..., length:], v)
            attended = out.permute(0, 1, 4, 2, 3, 5).reshape(*anchors_BA.shape, slots, -1)
            h = self.close(residual, attended, number)
        return self.read_out(h)

    # ------------------------------------------------------------------ files, and whose it is

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width, vocabulary or depth.

        Raises:
            MismatchError: it is one; the field of ``config.json`` is named.
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
        """Begin with the last state's deepest depth entering every slot, and the target's final norm."""
        width = self.config.width
        if self.config.target_width == width:
            self.enter.weight.mul_(0.3)
            self.enter.weight[:, -width:] += torch.eye(width, device=self.enter.weight.device)
        gain_D = anatomy.gain_of(anatomy.find(model).final_norm)
        if gain_D is not None and gain_D.shape == self.norm.weight.shape:
            self.norm.weight.copy_(gain_D)

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the ids of the tokens that it scores."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        return found if self.ids_K is None else {**found, IDS: self.ids_K}

    @classmethod
    def of(cls, config: BlockNetworkConfig, tensors: Mapping[str, Tensor]) -> BlockNetwork:
        """The network that a config and saved weights describe, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = dict(tensors)
        network = cls(config, ids_K=checked_ids(config, found.pop(IDS, None)))
        network.take(found)
        return network.eval()

    @classmethod
    def random(
        cls, target: LanguageModel, *, draft_vocab_size: int | None = None, seed: int = 0, **fields: Any
    ) -> BlockNetwork:
        """A network that nobody trained.

        Args:
            draft_vocab_size: how many tokens it scores, every so many-th one; at most, and without it, all.
            fields: others of the config.
        """
        size = None if draft_vocab_size is None else min(draft_vocab_size, target.vocab_size)
        config = config_for(target.config, target.name, fingerprint_of(target.source), draft_vocab_size=size, **fields)
        network = cls(config, ids_K=spread_ids(config))
        network.draw(torch.Generator().manual_seed(seed), spread=0.2)
        network.begin_near(target.model)
        return network.eval()

    @classmethod
    def how(cls, target: str, draft: str, config: BlockNetworkConfig | None = None) -> str:
        """The command that trains a network."""
        return f"foretoken train diffuspec --target {target} --out DIR"


def unrolled(
    network: BlockNetwork,
    states_BTF: Tensor,
    tokens_BT: Tensor,
    embedding_VW: Tensor,
    steps: int,
    wanted_BC: Tensor,
) -> Iterator[Tensor]:
    """What the network reads out from every column, as drafting/feature_heads/unroll.py has it for chains of pairs.

    Returns:
        for s = 0, 1, ..: of the columns that are asked about, [N, W]: slot s + 1 of the block whose root is x_{c+1}.
    """
    length = tokens_BT.shape[1]
    anchors_BA = torch.arange(1, length, device=tokens_BT.device).expand(len(tokens_BT), -1)
    rows = network.blocks(states_BTF, tokens_BT, anchors_BA, embedding_VW)
    for step in range(min(steps, network.config.slots, length - 1)):
        yield rows[:, :, step][wanted_BC]


def config_for(
    config: Any,
    target: str,
    fingerprint: str,
    *,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    **fields: Any,
) -> BlockNetworkConfig:
    """A network that fits a model of transformers: its layers are as ``fields_for`` makes them, with normed heads; it
    reads the target after a quarter, half and three quarters of its layers.

    Args:
        config: the target's configuration.
        draft_vocab_size: None: all of the vocabulary.
        fields: others of :class:`BlockNetworkConfig`.
    Raises:
        UnsupportedArchitecture: the target does not say its sizes.
    """
    found = fields_for(
        config, target, fingerprint, title=BlockNetwork.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
    )
    layers = config.get_text_config(decoder=True).num_hidden_layers
    depths = tuple(sorted({max(1, round(layers * share)) for share in (0.25, 0.5, 0.75)}))
    return BlockNetworkConfig(**{**found, "depths": depths, **fields})
