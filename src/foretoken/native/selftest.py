"""Self-test of a new library: a row's bits must depend on the row's own prefix only.

A tiny random decoder reads the same rows one by one, in chunks of every size that a product treats in its own way, and
as a tree, with one thread and with two. The last of them lie in a second tile of attention's columns (types.h), and the
tree on its edge. All must agree bit for bit: with a window, with every option of a layout beyond the common anatomy,
including experts, and with quantised weights, keys and values; a product with such weights must have the bits of its
definition. It takes about a second.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.quantised_weight import QuantisedLinear, rounded
from foretoken.forward.span import Span
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Block, Experts, Layout, Projection
from foretoken.native.packing import TiledLinear, packed_of
from foretoken.native.team import Team

_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP, _VOCAB = 64, 4, 2, 32, 96, 50
_EXPERTS, _CHOSEN, _CHANNELS = 5, 2, 32
_NUM_BLOCKS = 2
# dtype of unquantised weights; bits and group of quantised ones, if any; anatomy. With quantised weights, keys and
# values are narrower, too: in codes, or where all rows share a scale, in bfloat16
_KINDS: tuple[tuple[torch.dtype, tuple[int, int | None] | None, Literal["common", "uncommon", "parallel"]], ...] = (
    (torch.float32, None, "common"),
    (torch.bfloat16, None, "uncommon"),
    (torch.bfloat16, (8, 32), "common"),
    (torch.float32, (4, 32), "uncommon"),
    (torch.bfloat16, None, "parallel"),
    (torch.float32, (8, None), "parallel"),
)
_TOKENS = tuple((7 + 11 * each) % _VOCAB for each in range(262))
_CHUNKS = (
    (13, 13, 7, 229),
    (2, 3, 4, 5, 6, 13, 200, 29),
    (7, 8, 9, 9, 222, 7),
    (10, 11, 12, 14, 100, 115),
)  # of all of them
_TREE_PREFIX = 254
_CAPACITY = 288
_PARENTS = (-1, -1, 0, 0, 2, 2, 4, 3, 6)


def failure(library: ctypes.CDLL) -> str | None:
    """The reason why a library is faulty; None if it passes."""
    for dtype, scheme, anatomy in _KINDS:
        name = f"{dtype}" if scheme is None else f"{scheme[0]} bits in {dtype}"
        layout = _layout(dtype, scheme)
        if anatomy != "common":
            layout = _uncommon(layout, scheme) if anatomy == "uncommon" else _parallel(layout, scheme)
        decoder = NativeDecoder(layout, library)
        kv_dtype = None if scheme is None else torch.bfloat16 if scheme[1] is None else torch.uint8
        alone = _rows(decoder, [1] * len(_TOKENS), threads=1, kv_dtype=kv_dtype)
        if not alone.isfinite().all():
            return f"{name}: logits are not finite"
        for threads in (1, 2):
            for chunks in _CHUNKS:
                if not torch.equal(_rows(decoder, chunks, threads=threads, kv_dtype=kv_dtype), alone):
                    sizes = ", ".join(map(str, chunks))
                    return f"{name}: rows in chunks of {sizes} on {threads} threads differ from single ones"
        tree = _tree(decoder, kv_dtype=kv_dtype)
        for node, row in enumerate(_paths(decoder, kv_dtype=kv_dtype), -1):
            if not torch.equal(tree[node + 1], row):
                return f"{name}: a tree's row differs from its own path"
        if scheme is not None and not _as_defined(*scheme, library):
            return f"{name}: a product differs from its definition"
    return None


def _as_defined(bits: int, group: int | None, library: ctypes.CDLL) -> bool:
    """Whether a product has the bits of forward/quantised_weight.py, its rows of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    weight = rounded(torch.randn(80, 64, generator=generator), bits, group)
    x_TK = torch.randn(11, 64, generator=generator) * torch.logspace(-2, 2, 11)[:, None]
    ours = TiledLinear(packed_of([weight], torch.float32, library), 80, None, library)(x_TK)
    return torch.equal(ours, QuantisedLinear(weight)(x_TK))


def _weights(
    dtype: torch.dtype, scheme: tuple[int, int | None] | None, generator: torch.Generator
) -> Callable[[int, int], Projection]:
    def weight(outputs: int, inner: int) -> Projection:
        dense_OK = (torch.randn(outputs, inner, generator=generator) * 1.5 / inner**0.5).to(dtype)
        return Projection(dense_OK if scheme is None else rounded(dense_OK, *scheme))

    return weight


def _layout(dtype: torch.dtype, scheme: tuple[int, int | None] | None) -> Layout:
    generator = torch.Generator().manual_seed(0)
    weight = _weights(dtype, scheme, generator)

    def gain(count: int) -> Tensor:
        return 1 + 0.2 * torch.randn(count, generator=generator)

    blocks = [
        Block(
            q=weight(_HEADS * _HEAD_DIM, _WIDTH),
            k=weight(_KV_HEADS * _HEAD_DIM, _WIDTH),
            v=weight(_KV_HEADS * _HEAD_DIM, _WIDTH),
            out=weight(_WIDTH, _HEADS * _HEAD_DIM),
            attention_norm_D=gain(_WIDTH),
            q_norm_d=gain(_HEAD_DIM) if index else None,
            k_norm_d=gain(_HEAD_DIM) if index else None,
            window=5 if index else 0,
            gate=weight(_MLP, _WIDTH),
            up=weight(_MLP, _WIDTH),
            down=weight(_WIDTH, _MLP),
            mlp_norm_D=gain(_WIDTH),
        )
        for index in range(_NUM_BLOCKS)
    ]
    return Layout(
        dtype=dtype,
        width=_WIDTH,
        heads=_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        mlp_width=_MLP,
        norm_eps=1e-6,
        scaling=_HEAD_DIM**-0.5,
        num_blocks=_NUM_BLOCKS,
        blocks=blocks,
        rotary=_rotary,
        max_length=_CAPACITY,
        final_norm_D=gain(_WIDTH),
        head=weight(_VOCAB, _WIDTH),
        embedding_VD=torch.randn(_VOCAB, _WIDTH, generator=generator).to(dtype),
    )


def _rotary(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions_N[:, None].double() * 100.0 ** (-torch.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2))
    return angles.cos().float(), angles.sin().float()


def _part_of_rotary(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _rotary(positions_N)
    return cos[:, 4:], sin[:, 4:]


def _uncommon(layout: Layout, scheme: tuple[int, int | None] | None) -> Layout:
    """The same weights, with the other ways to norm, rotate, scale and cap, and with experts in one block."""
    generator = torch.Generator().manual_seed(2)
    weight = _weights(layout.dtype, scheme, generator)

    def gain(count: int) -> Tensor:
        return 1 + 0.2 * torch.randn(count, generator=generator)

    first, second = layout.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    second = replace(
        second,
        attention_norm_D=None,
        mlp_norm_D=None,
        attention_end_norm_D=gain(_WIDTH),
        mlp_end_norm_D=gain(_WIDTH),
        q_norm_d=gain(_HEADS * _HEAD_DIM),
        k_norm_d=gain(_KV_HEADS * _HEAD_DIM),
        rotary=None,
        gate=None,
        up=None,
        down=None,
        experts=_experts(layout.dtype, weight, generator),
    )
    return replace(
        layout,
        blocks=[replace(first, rotary=1), second],
        rotary=(_rotary, _part_of_rotary),
        activation="gelu_tanh",
        interleaved=True,
        score_cap=2.0,
        embedding_scale=3.0,
        residual_scale=0.7,
        logit_scale=0.5,
        logit_cap=4.0,
    )


def _parallel(layout: Layout, scheme: tuple[int, int | None] | None) -> Layout:
    """A parallel block with biases everywhere, and a mixture next to an MLP; LayerNorms and learned positions."""
    generator = torch.Generator().manual_seed(3)
    weight = _weights(layout.dtype, scheme, generator)

    def noise(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    def biased(whole: Projection) -> Projection:
        return Projection(whole.weight_OK, noise(whole.outputs))

    first, second = layout.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    first = replace(
        first,
        out=biased(first.out),
        attention_shift_D=noise(_WIDTH),
        mlp_shift_D=noise(_WIDTH),
        q_norm_d=1 + noise(_HEADS, _HEAD_DIM),
        k_norm_d=1 + noise(_KV_HEADS, _HEAD_DIM),
        gate=None,
        up=biased(weight(_MLP, _WIDTH)),
        down=biased(weight(_WIDTH, _MLP)),
        parallel=True,
    )
    second = replace(
        second,
        gate=biased(weight(_CHANNELS, _WIDTH)),
        up=biased(weight(_CHANNELS, _WIDTH)),
        down=weight(_WIDTH, _CHANNELS),
        experts=replace(_experts(layout.dtype, weight, generator), normed=False, opening_D=noise(_WIDTH)),
    )
    return replace(
        layout,
        blocks=[first, second],
        activation="gelu",
        centred=True,
        final_shift_D=noise(_WIDTH),
        position_embedding_ND=noise(_CAPACITY, _WIDTH).to(layout.dtype),
        head=biased(weight(_VOCAB, _WIDTH)),
    )


def _experts(dtype: torch.dtype, weight: Callable[[int, int], Projection], generator: torch.Generator) -> Experts:
    return Experts(
        router_ED=torch.randn(_EXPERTS, _WIDTH, generator=generator).to(dtype),
        gate=weight(_EXPERTS * _CHANNELS, _WIDTH),
        up=weight(_EXPERTS * _CHANNELS, _WIDTH),
        down=weight(_EXPERTS * _WIDTH, _CHANNELS),
        chosen=_CHOSEN,
        normed=True,
    )


def _rows(decoder: NativeDecoder, chunks: Sequence[int], *, threads: int, kv_dtype: torch.dtype | None) -> Tensor:
    return _after(decoder, _TOKENS, chunks, threads=threads, kv_dtype=kv_dtype)[0]


def _paths(decoder: NativeDecoder, *, kv_dtype: torch.dtype | None) -> Iterator[Tensor]:
    """The last row of each node's path, the root's first, read token by token."""
    tree, before = _tree_tokens(), _TOKENS[:_TREE_PREFIX]
    _, cache = _after(decoder, before, [1] * len(before), threads=1, kv_dtype=kv_dtype)
    for node in range(-1, len(tree)):
        row = None
        for token in (3, *(tree.tokens[each] for each in (tree.path_to(node) if node >= 0 else ()))):
            row = _chunk(decoder, cache, (token,), threads=1)[-1]
        assert row is not None
        yield row
        cache.rollback(0, len(before))


def _tree_tokens() -> TokenTree:
    return TokenTree([(5 + 3 * each) % _VOCAB for each in range(len(_PARENTS))], _PARENTS)


def _tree(decoder: NativeDecoder, *, kv_dtype: torch.dtype | None) -> Tensor:
    _, cache = _after(decoder, _TOKENS[:_TREE_PREFIX], (_TREE_PREFIX,), threads=1, kv_dtype=kv_dtype)
    cache.reserve(0, 1 + len(_PARENTS))
    batch = PackedBatch()
    batch.add_tree(0, _TREE_PREFIX, 3, _tree_tokens())
    return _forward(decoder, cache, batch, threads=2)


def _after(
    decoder: NativeDecoder,
    tokens: tuple[int, ...],
    chunks: Sequence[int],
    *,
    threads: int,
    kv_dtype: torch.dtype | None,
) -> tuple[Tensor, KVCache]:
    cache = KVCache(_NUM_BLOCKS, 1, _CAPACITY, kv_dtype=kv_dtype)
    slot = cache.acquire()
    found = []
    for size in chunks:
        begin = cache.lengths[slot]
        found.append(_chunk(decoder, cache, tokens[begin : begin + size], threads=threads))
    return torch.cat(found), cache


def _chunk(decoder: NativeDecoder, cache: KVCache, tokens: Sequence[int], *, threads: int) -> Tensor:
    cache.reserve(0, len(tokens))
    batch = PackedBatch()
    batch.add_chunk(0, cache.lengths[0], tokens, wanted=len(tokens))
    logits = _forward(decoder, cache, batch, threads=threads)
    cache.commit(0, range(len(tokens)))
    return logits


def _forward(decoder: NativeDecoder, cache: KVCache, batch: PackedBatch, *, threads: int) -> Tensor:
    with Team(threads) as team:
        found = decoder.forward(batch, NativePlan(cache), Span(0, _NUM_BLOCKS), top=0).logits_MV.clone()
    team.close()
    return found
