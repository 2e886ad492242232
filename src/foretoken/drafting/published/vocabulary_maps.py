"""Draft vocabularies of published heads: ``d2t``, offsets of draft tokens, and ``t2d``, the tokens that have one.

Letters: V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.models.language_model import LanguageModel

MAPS = ("d2t", "t2d")
LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
Network = TypeVar("Network", bound=StateNetwork)


def maps_of(ids_K: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return both maps of the tokens of a draft vocabulary."""
    return {
        "d2t": ids_K - torch.arange(len(ids_K)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids_K, True),
    }


def network_of(kind: Callable[..., Network], config: BlockConfig, tensors: Mapping[str, Tensor]) -> Network:
    """Build a network from saved weights, with the tables that are its own and not the target's.

    Args:
        kind: its class.
        tensors: with the maps, if it has a draft vocabulary.
    Raises:
        ValueError: config and weights do not fit each other; the message names the tensor.
    """
    found = dict(tensors)
    ids_K = ids_of(config, *(found.pop(name, None) for name in MAPS))
    network = kind(config, ids_K=ids_K, own_head=LM_HEAD in found, own_embedding=EMBEDDING in found)
    network.take(found)
    return network.eval()


def check_tables(network: StateNetwork, model: LanguageModel) -> None:
    """Refuse a target of another width if the network would share its tables.

    Raises:
        MismatchError: names the missing table.
    """
    config, missing = network.config, LM_HEAD if network.lm_head is None else EMBEDDING
    if config.width != config.target_width and (network.lm_head is None or network.embed_tokens is None):
        raise MismatchError(
            f"the {network.title} is {config.width} wide and '{model.name}' {config.target_width}, so it cannot share "
            f"the target's: {missing} is missing"
        )


def ids_of(config: BlockConfig, d2t_K: Tensor | None, t2d_V: Tensor | None) -> Tensor | None:
    """Return the tokens of the draft vocabulary, increasing; None: all.

    Raises:
        ValueError: both maps are missing, one is damaged, or they contradict each other.
    """
    size, whole = config.draft_vocab_size, config.vocab_size
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
    if int(ids_K.min()) < 0 or int(ids_K.max()) >= whole:
        raise ValueError(f"d2t leads to tokens {int(ids_K.min())} to {int(ids_K.max())}, of {whole}")
    if any(a >= b for a, b in itertools.pairwise(ids_K.tolist())):
        raise ValueError("d2t leads to tokens that do not increase")
    if t2d_V is not None and not torch.equal(ids_K, t2d_V.nonzero().flatten()):
        raise ValueError("t2d marks other tokens than those that d2t leads to")
    return ids_K
