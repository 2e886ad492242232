"""The tokens that a draft network scores, where these are not all: a tensor next to its weights.

Letters: K draft vocabulary, V vocabulary.
"""

import itertools

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.block import BlockConfig

IDS = "draft_ids"
MAPS = ("d2t", "t2d")  # the same in the speculators format


def checked_ids(config: BlockConfig, ids_K: Tensor | None) -> Tensor | None:
    """The tokens that are scored; None: all.

    Raises:
        ValueError: they are missing or damaged.
    """
    size, whole = config.draft_vocab_size, config.vocab_size
    if ids_K is None:
        if size != whole:
            raise ValueError(f"{IDS} is missing, but draft_vocab_size={size} of {whole} tokens")
        return None
    if ids_K.shape != (size,) or ids_K.dtype != torch.int64:
        raise ValueError(f"{IDS} is {list(ids_K.shape)} of {ids_K.dtype}: int64, [{size}]")
    if int(ids_K[0]) < 0 or int(ids_K[-1]) >= whole or bool((ids_K[1:] <= ids_K[:-1]).any()):
        raise ValueError(f"{IDS}: increasing tokens below {whole} are wanted")
    return ids_K


def maps_of(ids_K: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return both maps of the tokens of a draft vocabulary."""
    return {
        "d2t": ids_K - torch.arange(len(ids_K)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True),
    }


def ids_of(size: int, whole: int, d2t_K: Tensor | None, t2d_V: Tensor | None) -> Tensor | None:
    """Return the tokens of the draft vocabulary, increasing; None: all.

    Args:
        size, whole: K and V.
        d2t_K: what each of them adds to its place; None: there is no such map.
        t2d_V: bool, which tokens are in it; None: there is no such map.
    Raises:
        ValueError: both maps are missing, one is damaged, or they contradict each other.
    """
    if d2t_K is None and t2d_V is None:
        if size != whole:
            raise ValueError(f"d2t and t2d are missing, but draft_vocab_size={size} of {whole} tokens")
        return None
    if t2d_V is not None and (t2d_V.shape != (whole,) or t2d_V.is_floating_point()):
        raise ValueError(f"t2d is {list(t2d_V.shape)} of {t2d_V.dtype}: bool, [{whole}]")
    if d2t_K is None:
        assert t2d_V is not None
        ids_K = t2d_V.nonzero().flatten()
        if len(ids_K) != size:
            raise ValueError(f"t2d marks {len(ids_K)} tokens, but draft_vocab_size={size}")
        return ids_K
    if d2t_K.shape != (size,) or d2t_K.is_floating_point() or d2t_K.dtype == torch.bool:
        raise ValueError(f"d2t is {list(d2t_K.shape)} of {d2t_K.dtype}: integers, [{size}]")
    ids_K = torch.arange(size) + d2t_K.long()
    tokens: list[int] = ids_K.tolist()
    if any(not 0 <= token < whole for token in tokens):
        raise ValueError(f"d2t leads to tokens {min(tokens)} to {max(tokens)}, of {whole}")
    if any(a >= b for a, b in itertools.pairwise(tokens)):
        raise ValueError("d2t leads to tokens that do not increase")
    if t2d_V is not None and not torch.equal(ids_K, t2d_V.nonzero().flatten()):
        raise ValueError("t2d marks other tokens than those that d2t leads to")
    return ids_K
