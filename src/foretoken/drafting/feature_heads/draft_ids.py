"""The tokens that a draft network scores, where these are not all: a tensor next to its weights.

Letters: K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.drafting.feature_heads.block import BlockConfig

IDS = "draft_ids"


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


def spread_ids(config: BlockConfig) -> Tensor | None:
    """The tokens of an untrained network: as many as its config says, spread evenly; None: all."""
    size, whole = config.draft_vocab_size, config.vocab_size
    return torch.arange(size) * (whole // size) if size < whole else None
