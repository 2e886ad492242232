"""The text part of a model that also reads images: generation from text needs nothing else.

A wrapper of transformers holds a text model that the library mostly knows by itself, and a head. Where it has a causal
class for that text model, this class is put around the same modules: the image tower is freed, and the fast paths for
the text model's family are open. Where it has none, or the two give other logits, the wrapper itself is run.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from foretoken.core.stand_ins import with_all_kernels
from foretoken.forward import attention
from foretoken.models.adoption.trial import TrialPlan, trial_batch

_REACH = 64  # positions of the comparison


def text_part(model: Any) -> Any:
    """The causal language model inside of a wrapper, over the wrapper's own modules; else the wrapper.

    Args:
        model: a model of transformers, loaded with our attention implementation, on its device.
    """
    config = model.config.get_text_config(decoder=True)
    if config is model.config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return model
    with torch.device("meta"):
        alone = with_all_kernels(lambda: MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))
    prefix = alone.base_model_prefix
    body = getattr(alone, prefix, None)
    inner = [module for module in model.modules() if type(module) is type(body)]
    if len(inner) != 1:
        return model
    setattr(alone, prefix, inner[0])
    alone.set_output_embeddings(model.get_output_embeddings())
    alone.eval()
    if any(each.is_meta for each in (*alone.parameters(), *alone.buffers())) or not _same(model, alone):
        return model
    alone.generation_config = model.generation_config
    config._name_or_path = model.config._name_or_path
    return alone


def _same(model: Any, alone: Any) -> bool:
    """Whether both give the same logits; the probes report an error that the wrapper raises for such a batch."""
    try:
        return torch.equal(_logits(model), _logits(alone))
    except Exception:
        return False


def _logits(model: Any) -> Tensor:
    device = next(model.parameters()).device
    batch = trial_batch(_REACH)
    with torch.inference_mode(), attention.following(TrialPlan(batch)):
        logits: Tensor = model(
            input_ids=batch.ids_1T(device), position_ids=batch.positions_1T(device), use_cache=False
        ).logits
    return logits
