"""A model of transformers put together from tensors, some of them quantised; no dense twin of those ever exists.

The library builds the modules and their buffers without memory for a single weight. Linear layers with
a quantised weight are replaced, everything else is filled in, and a parameter left without a value is an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.initialization import no_init_weights

from foretoken.core.errors import ModelError
from foretoken.core.stand_ins import with_all_kernels
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.forward.stored_embedding import StoredEmbedding, is_plain_embedding
from foretoken.forward.stored_weight import StoredWeight

_CHECKED = 1 << 20  # elements that are checked at a time: a check takes memory of the same size
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def skeleton(auto: Any, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """The library's modules with real buffers, and parameters on the device "meta"; in eval mode.

    Args:
        auto: the door to the model, ``AutoModelForCausalLM`` or a sister.
        options: of ``from_config``.
    Raises:
        ModelError: the library cannot build a model of such a config.
    """
    try:
        with _without_weights(), no_init_weights():
            return with_all_kernels(lambda: auto.from_config(config, dtype=dtype, **options).eval())
    except Exception as error:  # sizes that do not go together fail anywhere in hundreds of families
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"its config makes no model ({reason})") from error


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters lose their memory the moment they are registered; buffers (rotary tables) are computed as ever."""

    def drop(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # also one that two modules share
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    with register_module_parameter_registration_hook(drop):  # type: ignore[arg-type]  # may return a parameter
        yield


def fill(model: Any, tensors: Iterable[tuple[str, Tensor | QuantisedWeight | QuantisedExperts]], name: str) -> Any:
    """Give a skeleton its values, one at a time.

    Args:
        model: of :func:`skeleton`.
        tensors: by the names that the model's own parameters have; a quantised one stands for the weight of a linear
            layer, or of the embedding. Plain ones are converted to the model's dtype. Quantised
            experts stand for the module of this name.
        name: the user's name for the model, for messages.
    Returns:
        the model.
    Raises:
        ModelError: a tensor has no place in the model, does not fit it, is missing, or holds values that are not
            finite; or codes without the scales that would make a weight of them.
    """
    expected = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    dtype = model.dtype
    for key, value in tensors:
        if isinstance(value, QuantisedExperts):
            _check_experts(value, expected.get(f"{key}.gate_up_proj"), key, name)
            model.set_submodule(key, value)
            continue
        place = expected.get(key)
        if place is None:
            raise ModelError(f"model '{name}': its tensor '{key}' has no place in a {type(model).__name__}")
        if tuple(value.shape) != tuple(place.shape):
            raise ModelError(
                f"model '{name}': weights do not fit its config ('{key}': {list(value.shape)} in the checkpoint, "
                f"{list(place.shape)} in the model)"
            )
        parent, _, leaf = key.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(value, QuantisedWeight):
            if type(module) is nn.Linear:
                model.set_submodule(parent, QuantisedLinear(value, module.bias).eval())
                continue
            if not isinstance(module, nn.Embedding):
                raise ModelError(
                    f"model '{name}': its tensor '{key}' is quantised, which a {type(module).__name__} cannot take"
                )
            if isinstance(value, StoredWeight) and dtype == torch.float32 and is_plain_embedding(module):
                model.set_submodule(parent, StoredEmbedding(value, getattr(module, "embed_scale", None)).eval())
                continue
            value = value.dense()
        elif value.dtype not in _PLAIN:
            raise ModelError(
                f"model '{name}': its tensor '{key}' is of {str(value.dtype).removeprefix('torch.')}, no dtype of "
                "an unquantised weight: the tensors that describe its quantisation are missing, or are not supported"
            )
        value = value.to(place.dtype if place.dtype.is_floating_point and place.dtype != dtype else dtype)
        if not all(bool(part.isfinite().all()) for part in value.flatten().split(_CHECKED)):
            raise ModelError(f"model '{name}': its tensor '{key}' holds values that are not finite")
        if isinstance(module, QuantisedLinear):
            module.bias = value  # no parameter of it
        else:
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    _tie(model)
    missing = sorted(key for key, parameter in model.named_parameters() if parameter.is_meta)
    missing += sorted(
        f"{key}.bias" for key, each in model.named_modules() if isinstance(each, QuantisedLinear) and _lacks_bias(each)
    )
    if missing:
        raise ModelError(
            f"model '{name}': weights are missing from the checkpoint ('{missing[0]}', {len(missing)} in all); "
            "it would answer at random"
        )
    return model


def _check_experts(experts: QuantisedExperts, place: nn.Parameter | None, key: str, name: str) -> None:
    found = [experts.num_experts, 2 * experts.channels, experts.width]
    if place is None or list(place.shape) not in (found, [found[0], found[2], found[1]]):  # GPT-OSS's lie transposed
        expected = "no experts" if place is None else list(place.shape)
        raise ModelError(
            f"model '{name}': weights do not fit its config ('{key}': {found} in the checkpoint, {expected} in the "
            "model)"
        )


def _tie(model: Any) -> None:
    """A head that is missing is the embedding, where the config says so."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        type(head) is nn.Linear
        and head.weight.is_meta
        and not isinstance(embedding, StoredEmbedding)
        and model.config.get_text_config(decoder=True).tie_word_embeddings
    ):
        head.weight = embedding.weight


def _lacks_bias(linear: QuantisedLinear) -> bool:
    return linear.bias is not None and linear.bias.is_meta
