"""The door into Hugging Face models: our attention function, registered with the library's attention interface.

Within ``with following(plan):`` every attention layer of a model that is called there comes to :func:`attend` instead
of its own kernel, and is answered by the plan. Everything else of the model (projections, rotary, norms, experts) stays
the library's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch.nn.functional as F
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

# Not a keyword of the model's forward: some families do not hand keywords down to their attention.
_plan: ContextVar[Plan | None] = ContextVar("plan", default=None)


@contextmanager
def following(plan: Plan) -> Iterator[None]:
    """Answer the attention calls of this thread with ``plan``."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def current() -> Plan:
    """The plan that this thread's forward follows.

    Raises:
        RuntimeError: there is none.
    """
    plan = _plan.get()
    if plan is None:
        raise RuntimeError("attention was called outside of a plan: run the model through LanguageModel.forward")
    return plan


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's attention signature; batch size is 1 because the batch is packed.

    Args:
        module: the calling layer; ``layer_idx`` says which cache it owns.
        query, key, value: [1, H, T, D], [1, G, T, D], [1, G, T, Dv].
        attention_mask: None except while a model is probed: the plan defines which rows a row attends to.
    Returns:
        [1, T, H, Dv] and None (attention weights are never materialised).
    Raises:
        UnsupportedArchitecture: a keyword that changes the arithmetic and is not honoured here.
    """
    layer = getattr(module, "layer_idx", None)
    plan = current()
    if layer is None:
        raise UnsupportedArchitecture(f"{type(module).__name__} does not know its layer index")
    if is_causal is False:
        raise UnsupportedArchitecture(f"{type(module).__name__} attends in both directions")
    if attention_mask is not None:
        check_mask = getattr(plan, "check_mask", None)
        if check_mask is None:
            raise UnsupportedArchitecture(f"{type(module).__name__} builds an attention mask of its own")
        check_mask(attention_mask, sliding_window)
    for name, given in others.items():
        if given is not None and name not in _IGNORED:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} passes '{name}' to attention, which is not known here"
            )
    width = value.shape[-1]
    wide = getattr(module, "wide_values", False)  # a native decoder keeps values as wide as keys
    if wide:
        value = F.pad(value, (0, key.shape[-1] - width))
    output = plan.attend(
        int(layer),
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    if wide:
        output = output[..., :width]
    return output.contiguous()[None], None  # as the library's own kernels: some families take a view of it


def admit(model_type: str) -> None:
    """Enter our name into the table of attentions that a family has of its own."""
    if model_type == "gptj":
        from transformers.models.gptj import modeling_gptj

        # the table went with 5.24
        getattr(modeling_gptj, "GPTJ_ATTENTION_CLASSES", {}).setdefault(NAME, modeling_gptj.GPTJAttention)


def redirect(model: nn.Module) -> None:
    """Let attention that is written out in a model come to :func:`attend`, where one method has all of it."""
    for module in model.modules():
        if type(module).__name__ in ("GPTJAttention", "CodeGenAttention"):
            module._attn = partial(_attend_written_out, module)  # type: ignore[assignment]


def _attend_written_out(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    scaling = 1.0 / float(module.scale_attn)
    return attend(module, query, key, value, attention_mask, scaling=scaling)[0].transpose(1, 2), None


AttentionInterface.register(NAME, attend)
