"""Checks of the arguments of a native call over pairs, in addition to those of any forward (native/checks.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.drafting.feature_heads.native.chains import Prefetch
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.native.checks import Sizes, check_within, is_plain
from foretoken.native.layout import Projection


class Extent(NamedTuple):
    """How far a tree may grow within one call.

    Attributes:
        most: nodes that it is to have, at most.
        deepest: of its longest path.
        least: bound that the probability of a path must exceed for its last node to be expanded.
    """

    most: int
    deepest: int
    least: float


def check_pairing(sizes: Sizes, columns: int, token: Projection, feature: Projection | None) -> None:
    """Check the projections of a pair to a decoder's input.

    Args:
        columns: of queries, keys and values together.
    Raises:
        ValueError: the products have other sizes.
    """
    expected = (columns if feature is None else sizes.width, sizes.width)
    if tuple(token.weight_OK.shape) != expected or (feature and tuple(feature.weight_OK.shape) != expected):
        raise ValueError(f"a pair enters through products of {list(expected)}")


def check_chain(
    sizes: Sizes,
    batch: PackedBatch,
    cache: KVCache,
    num_tokens: int,
    scored: int,
    ids_C: Tensor | None,
    prefetch: Sequence[Prefetch],
    top: int,
) -> None:
    """Check passes over pairs, in addition to :func:`check` and :func:`check_head`.

    Args:
        num_tokens: of the embedding.
        scored: rows of the head.
        ids_C: the tokens that these stand for.
    Raises:
        InputError: a token is not in the embedding.
        ValueError: anything else.
    """
    if min(batch.tokens) < 0 or max(batch.tokens) >= num_tokens:
        token = next(each for each in batch.tokens if not 0 <= each < num_tokens)
        raise InputError(f"token {token} is not in the embedding, which has {num_tokens} entries")
    if ids_C is not None and (ids_C.shape != (scored,) or ids_C.dtype != torch.int32 or not is_plain(ids_C)):
        raise ValueError(f"ids_C is {list(ids_C.shape)} of {ids_C.dtype}: int32 [{scored}]")
    if not prefetch:
        return
    lasts = [segment.start + segment.num_rows - 1 for segment in batch.segments]
    if list(batch.wanted) != lasts or len(prefetch) != len(lasts) or top < 1:
        raise ValueError(
            f"{len(prefetch)} drafts go on from rows {list(batch.wanted)}, top={top}: from {lasts}, ranked"
        )
    tenths = len(prefetch[0].stands)
    for segment, last, each in zip(batch.segments, lasts, prefetch, strict=True):
        end = segment.prefix + segment.tail + segment.num_rows + each.most - 1
        check_within("prefetch.most", each.most, 1, sizes.max_length - batch.positions[last])
        if each.temperature > 0 and len(each.uniforms) != 2 * (each.most - 1):
            raise ValueError(f"{len(each.uniforms)} uniforms for {each.most} passes: two for each but the last one")
        if segment.seen is not None or end > cache.capacity or len(each.stands) != tenths or not tenths:
            raise ValueError(
                f"slot {segment.slot} needs {end} rows for a chain, but the capacity of the cache is {cache.capacity}: "
                "reserve them before the forward"
            )


def check_trees(
    sizes: Sizes, batch: PackedBatch, cache: KVCache, growing: Sequence[Extent], width: int, top: int
) -> None:
    """Check trees over pairs, in addition to :func:`check`, :func:`check_head` and :func:`check_chain`.

    Args:
        growing: of each segment.
        width: nodes of a level that are expanded.
        top: children of a node.
    Raises:
        ValueError: they do not fit.
    """
    lasts = [segment.start + segment.num_rows - 1 for segment in batch.segments]
    if list(batch.wanted) != lasts or len(growing) != len(lasts) or not 1 <= top <= width:
        raise ValueError(
            f"{len(growing)} trees of {top} of {width} grow from rows {list(batch.wanted)}: from {lasts}, ranked"
        )
    for segment, last, each in zip(batch.segments, lasts, growing, strict=True):
        check_within("growth.most", each.most, 1, None)
        check_within("growth.deepest", each.deepest, 1, sizes.max_length - batch.positions[last])
        end = segment.prefix + segment.tail + segment.num_rows + (each.deepest - 1) * width
        if segment.seen is not None or end > cache.capacity:
            raise ValueError(
                f"slot {segment.slot} needs {end} rows for a tree, but the capacity of the cache is {cache.capacity}: "
                "reserve them before the forward"
            )
