"""The door into Hugging Face models: our attention function, registered with the library's attention interface.

``model(..., plan=plan)`` carries the plan down to every attention layer, which then calls :func:`attend` instead of
its own kernel. Everything else of the model (projections, rotary, norms, experts) stays the library's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.protocols import Plan

NAME = "foretoken"

# Keywords that say nothing about the arithmetic of a causal step, or that the batch already carries.
_IGNORED = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: Plan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's attention signature; batch size is 1 because the batch is packed.

    Args:
        module: the calling layer; ``layer_idx`` says which cache it owns.
        query, key, value: [1, H, T, D], [1, G, T, D], [1, G, T, Dv].
        attention_mask: must be None: the plan knows who sees whom.
    Returns:
        [1, T, H, Dv] and None (attention weights are never materialised).
    Raises:
        UnsupportedArchitecture: a keyword that changes the arithmetic and is not honoured here.
    """
    layer = getattr(module, "layer_idx", None)
    if plan is None or layer is None:
        raise UnsupportedArchitecture(
            f"{type(module).__name__} does not hand the attention plan and its layer index down to attention"
        )
    if attention_mask is not None:
        raise UnsupportedArchitecture(f"{type(module).__name__} builds an attention mask of its own")
    for name, given in others.items():
        if given is not None and name not in _IGNORED:
            raise UnsupportedArchitecture(f"{type(module).__name__} passes '{name}' to attention, which is not known here")
    output = plan.attend(
        layer,
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return output[None], None


AttentionInterface.register(NAME, attend)
