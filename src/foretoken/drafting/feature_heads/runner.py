"""A draft network over packed rows and a cache of its own, built from its description: natively or by torch.

The token's half of the input of the first layer does not depend on the token's position, so it is a table:

    stacked        W [norm(e); norm(g)] = W_e norm(e) + W_g norm(g)      table [V, Q], added to queries, keys and values
    concatenated   fc [e; g]            = W_e e       + W_g g            table [V, W], added to the layer's input
    gated          h2, and its half of the gate                          table [V, 2W]

With it the first layer of a stacked entry is an ordinary one; its input is the feature. For a large vocabulary the
product is computed for each row instead.

Letters: T packed rows, M wanted rows, F width of the fused states, W width, Q queries, keys and values together, O
width of a token's part, K draft vocabulary, V vocabulary.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.errors import ConfigError
from foretoken.core.threads import threads_for
from foretoken.drafting.feature_heads.description import Concatenated, Gated, Stacked
from foretoken.drafting.feature_heads.native.chains import Prefetch
from foretoken.drafting.feature_heads.native.checks import Extent
from foretoken.drafting.feature_heads.native.pairs import GrownTree, PairDecoder, Pairing
from foretoken.drafting.feature_heads.native_layers import described, fits, native_block, rounded, rounded_block
from foretoken.drafting.feature_heads.own_rows import OwnRows
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork, PairNetwork, gated
from foretoken.drafting.prefetch import DraftPass
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Head, Projection
from foretoken.native.packing import TiledLinear, tiled

TABLE_BYTES = 64 << 20  # of the tokens' parts, at most

_Product = Callable[[Tensor], Tensor]  # float32 in, float32 out; a row's bits depend on that row only


class Runner:
    """One draft network for one target, in the target's dtype and on its device.

    Args:
        target: if it has a native decoder, the network runs natively too where its sizes allow.
        network: copied, unless it has the target's dtype and device already.
        rounding: of ``SCHEMES``, for the layers and the rows that are not the target's; None: the target's dtype.
    Raises:
        ConfigError: rounding is given, but the network does not run natively, or has rows of no whole groups.
    """

    def __init__(self, target: LanguageModel, network: PairNetwork, rounding: str | None = None) -> None:
        self._target, self._native = target, None  # type: LanguageModel, NativeNetwork | None
        if all(each.dtype == target.dtype and each.device == target.device for each in network.parameters()):
            self._net = network
        else:
            self._net = deepcopy(network).to(device=target.device, dtype=target.dtype)
        with torch.inference_mode():
            self._embedding_VW = self._net.embedding_of(target.model).detach().to(target.device, target.dtype)
            weight_KW = self._net.lm_head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if network.ids_K is None else network.ids_K.to(target.device)
            self.lm_head = OwnRows(weight_KW, ids_K, target.vocab_size)
            if target.native_decoder is not None and isinstance(network, LayeredNetwork) and fits(network.config):
                scores = (
                    target.native_decoder.head if self.own_rows is None else rounded(Projection(weight_KW), rounding)
                )
                self._native = NativeNetwork(
                    network, self._embedding_VW, scores, self.lm_head.columns, target, rounding
                )
            elif rounding is not None:
                raise ConfigError(
                    f"dtype={rounding!r}: a rounded head is computed by the native decoder, which this target or its "
                    "head does not run in; leave dtype out"
                )

    @property
    def num_layers(self) -> int:
        """Layers of its cache."""
        return self._net.num_layers

    @property
    def num_scored(self) -> int:
        """K."""
        return self._target.vocab_size if self.lm_head.columns is None else len(self.lm_head.columns)

    @property
    def own_rows(self) -> str | None:
        """What scores the tokens if the target's whole LM head does not, as words after "it has"; else None."""
        if self.lm_head.columns is not None:
            return f"a vocabulary of its own, of {len(self.lm_head.columns)} tokens"
        return f"a head of its own ({self._net.description.lm_head.own_rows})" if self._net.has_own_rows else None

    @property
    def native(self) -> bool:
        """Whether it runs natively."""
        return self._native is not None

    @property
    def several(self) -> "NativeNetwork | None":
        """Makes several passes of a chain, or all levels of a tree, in one call; None: this network cannot."""
        return self._native if self._native is not None and self._native.pairs is not None else None

    @torch.inference_mode()
    def features(self, states_TF: Tensor) -> Tensor:
        """Return [T, W] of the target's states, the taps side by side; a row's bits depend on that row only."""
        if self._native is not None:
            return self._native.fuse(states_TF)
        return self._net.fuse(states_TF.to(self._target.device, self._target.dtype))

    @torch.inference_mode()
    def forward(
        self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, *, top: int, rows: HeadRows | None = None
    ) -> tuple[Output, Tensor]:
        """Run pairs; keys and values go into the cache.

        Args:
            batch: a row for each pair, with its token.
            g_TW: their features.
            top: how many tokens of each wanted row to rank.
            rows: of the target's LM head, scored in place of all; only without ``own_rows``.
        Returns:
            logits of the wanted rows over the target's vocabulary, or over the columns of ``rows``, with the ranked
            tokens, and the features recycled from these rows, [M, W].
        """
        if self._native is not None:
            ((output, _, _, following_MW),) = self._native.passes(batch, cache, g_TW, top=top, rows=rows)
            assert following_MW is not None
            return output, following_MW
        net, target = self._net, self._target
        e_TW = F.embedding(batch.ids_1T(target.device)[0], self._embedding_VW)
        positions_T = batch.positions_1T(target.device)[0]
        h_MW = net.decode(g_TW, e_TW, positions_T, DensePlan(cache, batch))[batch.wanted]
        if not batch.wanted:
            return Output.of(h_MW), h_MW
        scored_MW, following_MW = net.read_out(h_MW), net.recycled(h_MW)
        if rows is not None or (self.own_rows is None and not net.description.lm_head.copied):
            return target.score(scored_MW, top=top, final_norm=False, head=rows), following_MW
        return Output.of(self.lm_head.score(scored_MW), top=top, columns=self.lm_head.columns), following_MW


class NativeNetwork:
    """The network as native products: a row's bits depend on the rows before it only.

    Attributes:
        pairs: the decoder that takes pairs; None for a gated entry, which is computed before the decoder is called.
    """

    def __init__(
        self,
        network: LayeredNetwork,
        embedding_VW: Tensor,
        scores: Projection | Head,
        columns: Columns | None,
        target: LanguageModel,
        rounding: str | None,
    ) -> None:
        self._columns = columns
        assert target.native_decoder is not None
        config, description, library = network.config, network.description, target.native_decoder.library
        self._net, self._dtype, self._library = deepcopy(network).float(), target.dtype, library
        fuse, last = description.fuse.product, description.lm_head.norm
        self._fuse = None if fuse is None else self._product(network.part(fuse).weight)
        blocks = [native_block(network.layer(number), *before) for number, before in enumerate(_inputs(network))]
        layout = described(
            config,
            target,
            [rounded_block(each, rounding) for each in blocks],
            mlp_width=config.mlp_width,
            rotary=network.rotary_at,
            max_length=target.max_length,
            final_norm_D=torch.ones(config.width) if last is None else network.part(last).weight,
            head=scores,
        )
        self.pairs: PairDecoder | None = None
        if isinstance(description.entry, Gated):
            self._gate = _NativeGate(network, description.entry, self._product, embedding_VW.float())
            self._decoder = NativeDecoder(layout, library)
        else:
            self.pairs = PairDecoder(layout, _pairing(network, description.entry, embedding_VW), library)

    def fuse(self, states_TF: Tensor) -> Tensor:
        """[T, W] float32."""
        if self._fuse is None:
            return self._net.fuse(states_TF.float())
        return self._fuse(self._net.normed_states(states_TF))

    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        top: int,
        rows: HeadRows | None = None,
        prefetch: Sequence[Prefetch] = (),
    ) -> list[DraftPass]:
        """As :meth:`Runner.forward`, and the further passes of each draft that are likely to be needed.

        Args:
            prefetch: one for each segment; only its last row is wanted; see native/pairs.py.
        """
        packed, columns = (None, self._columns) if rows is None else (rows.packed, rows.columns)
        if self.pairs is None:
            x_TW, depth = self._gate.enter(batch, g_TW), self._net.num_layers
            has_norm = self._net.description.lm_head.norm is not None
            span = Span(0, depth, x_TW, taps=(depth,), tap_rows=batch.wanted, final_norm=has_norm)
            found = self._decoder.forward(batch, NativePlan(cache), span, top=top, head=packed)
            return [DraftPass(Output.ranked(found, columns), following_MW=self._net.recycled(found.hidden[depth]))]
        ids_C = None if columns is None or not prefetch else columns.ids_C.int()
        made = self.pairs.passes(batch, cache, g_TW, top=top, head=packed, ids_C=ids_C, prefetch=prefetch)
        return [DraftPass.of(each, columns) for each in made]

    def trees(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        extents: Sequence[Extent],
        width: int,
        top: int,
        rows: HeadRows | None = None,
    ) -> list[GrownTree]:
        """As :meth:`Runner.forward`, and all levels of the trees that grow from its rows.

        Args:
            extents: one for each segment; only its last row is wanted; see native/pairs.py.
            width: nodes of a level that are expanded.
            top: children that a node gets.
        """
        assert self.pairs is not None
        packed, columns = (None, self._columns) if rows is None else (rows.packed, rows.columns)
        ids_C = None if columns is None else columns.ids_C.int()
        return self.pairs.trees(batch, cache, g_TW, extents=extents, width=width, top=top, head=packed, ids_C=ids_C)

    def _product(self, weight_OK: Tensor) -> _Product:
        packed = tiled(weight_OK.detach().to(self._dtype)).contiguous()
        linear = TiledLinear(packed, len(weight_OK), None, self._library)

        def product(x_TK: Tensor) -> Tensor:
            with threads_for(x_TK.numel()):
                x_TK = x_TK.to(packed.dtype)
            y_TO: Tensor = linear(x_TK)  # on threads of its own
            with threads_for(y_TO.numel()):
                return y_TO.float()

        return product


def _inputs(network: LayeredNetwork) -> list[tuple[Tensor | None, int]]:
    """Of each layer: the gain of the norm before attention, and columns of its projections that a table replaces."""
    entry, found = network.description.entry, list[tuple[Tensor | None, int]]()
    for number in range(network.num_layers):
        if number == 0 and isinstance(entry, Stacked):
            # a normed residual is normed as it enters, see _pairing: attention then reads it as it is
            norm = None if entry.normed_residual else entry.feature_norm
        else:
            norm = f"layers.{number}.input_layernorm" if number or network.description.layers.first_norm else None
        gain = None if norm is None else network.part(norm).weight
        found.append((gain, network.config.width if number == 0 and isinstance(entry, Stacked) else 0))
    return found


def _pairing(network: LayeredNetwork, entry: Concatenated | Stacked, embedding_VW: Tensor) -> Pairing:
    """How pairs enter the native decoder; neither side of a concatenation may have a norm."""
    description, width = network.description, network.config.width
    last = description.lm_head.norm
    recycled_W = network.part(last).weight if description.recycle.normed and last is not None else None
    if isinstance(entry, Concatenated):
        assert entry.token_norm is None
        assert entry.feature_norm is None
        product = network.part(entry.product)
        token_WW, feature_WW = product.weight.split((width, width), dim=1)
        return Pairing(
            embedding_VW,
            Projection(token_WW),
            feature=Projection(feature_WW, product.bias),
            recycled_norm_W=recycled_W,
            final_norm=last is not None,
            table_bytes=TABLE_BYTES,
        )
    attention = network.layer(0).self_attn
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Pairing(
        embedding_VW,
        Projection(torch.cat([each.weight[:, :width] for each in heads])),
        token_norm_W=network.part(entry.token_norm).weight,
        feature_norm_W=network.part(entry.feature_norm).weight if entry.normed_residual else None,
        recycled_norm_W=recycled_W,
        final_norm=last is not None,
        table_bytes=TABLE_BYTES,
    )


class _NativeGate:
    """A gated entry in two parts: h2, and its half of the gate, follow from the token alone.

    Args:
        product: packs a weight [O, K].
        embedding_VW: float32.
    """

    def __init__(
        self, network: LayeredNetwork, entry: Gated, product: Callable[[Tensor], _Product], embedding_VW: Tensor
    ) -> None:
        width = network.config.width
        self._norm, self._embedding_VW = deepcopy(network.part(entry.token_norm)).float(), embedding_VW
        self._feature, self._token = (product(network.part(name).weight) for name in (entry.feature, entry.token))
        halves = network.part(entry.gate).weight.split(width, dim=1)
        self._feature_gate, self._token_gate = (product(half) for half in halves)
        self._table_VO: Tensor | None = None
        if len(embedding_VW) * 2 * width * 4 <= TABLE_BYTES:
            self._table_VO = torch.cat([self._of_tokens(piece) for piece in embedding_VW.split(1024)])

    def _of_tokens(self, e_TW: Tensor) -> Tensor:
        h2_TW = F.silu(self._token(self._norm(e_TW)))
        return torch.cat([h2_TW, self._token_gate(h2_TW)], dim=-1)

    def enter(self, batch: PackedBatch, g_TW: Tensor) -> Tensor:
        """The first layer's input, float32 [T, W]."""
        ids_T = torch.tensor(batch.tokens)
        part_TO = self._of_tokens(self._embedding_VW[ids_T]) if self._table_VO is None else self._table_VO[ids_T]
        h1_TW, (h2_TW, token_TW) = self._feature(g_TW), part_TO.chunk(2, dim=-1)
        return gated(h1_TW, h2_TW, self._feature_gate(h1_TW) + token_TW)
