"""Draft vocabularies of published heads: ``d2t``, offsets of draft tokens, and ``t2d``, the tokens that have one.

Letters: V vocabulary, K draft vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.draft_ids import MAPS, ids_of
from foretoken.drafting.feature_heads.state_network import StateNetwork
from foretoken.models.language_model import LanguageModel

LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
Network = TypeVar("Network", bound=StateNetwork)


def network_of(kind: Callable[..., Network], config: BlockConfig, tensors: Mapping[str, Tensor]) -> Network:
    """Build a network from saved weights, with the tables that are its own and not the target's.

    Args:
        kind: its class.
        tensors: with the maps, if it has a draft vocabulary.
    Raises:
        ValueError: config and weights do not fit each other; the message names the tensor.
    """
    found = dict(tensors)
    ids_K = ids_of(config.draft_vocab_size, config.vocab_size, *(found.pop(name, None) for name in MAPS))
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
