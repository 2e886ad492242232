"""Fuzzy groups of layers: the attentions of neighbouring layers all read the stream from before the group.

    exact    for each layer j:  h += attention_j(norm_j(h));   h += mlp_j(norm'_j(h))
    fuzzy    for each layer j:  a_j = attention_j(norm_j(h))             the same h: they can run at the same time
             for each layer j:  h += a_j;                      h += mlp_j(norm'_j(h))

Neighbouring layers change the stream little, so a_j is nearly exact. The MLPs stay in order, with exact
inputs. The keys and values that such attentions write are fuzzy, too.

Letters: B batch, T rows, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward.anatomy import Anatomy, find
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import forwards_replaced, passed_by
from foretoken.models.language_model import LanguageModel

Groups = tuple[range, ...]
"""Consecutive runs of layers that cover each layer once; those of one layer are exact."""

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_TRIED = (5, 9, 14, 23)  # tokens of the trial
_TOLERANCE = 1e-3  # of its logits, relative to the largest; a part that is left out changes them by far more


def groups_of(num_layers: int, size: int) -> Groups:
    """The rule of the paper: borders at multiples of ``size``, the first and the last layer alone."""
    borders = sorted({0, 1, *range(size, num_layers - 1, size), num_layers - 1, num_layers})
    return tuple(range(a, b) for a, b in pairwise(borders) if a < b)


@contextmanager
def fuzzy(parts: Anatomy, groups: Groups) -> Iterator[None]:
    """While inside, a forward of the library's model runs these groups; it must call its layers itself, in order."""
    many = [group for group in groups if len(group) > 1]
    leads, others = [parts.layers[group[0]] for group in many], [parts.layers[i] for group in many for i in group[1:]]
    with passed_by(others), forwards_replaced(leads, [_group(parts, group) for group in many]):
        yield


def check(model: LanguageModel) -> None:
    """Refuse a model with layers of other than the four parts of a group, or of different kinds.

    Raises:
        UnsupportedArchitecture: they have other parts, or their parts do not add up to the model's results.
    """
    parts = find(model.model)
    kinds = {(type(layer), getattr(layer.self_attn, "sliding_window", None)) for layer in parts.layers if _plain(layer)}
    strange = next((layer for layer in parts.layers if not _plain(layer)), None)
    if strange is not None:
        names = ", ".join(name for name, _ in strange.named_children())
        raise UnsupportedArchitecture(
            f"model '{model.name}': its layers have {names}; groups are for attention, MLP and a norm before each"
        )
    if len(kinds) > 1:
        raise UnsupportedArchitecture(f"model '{model.name}': its layers are not alike, and only like ones are grouped")
    expected_MV, found_MV = _logits(model, None), _logits(model, parts)
    if float((expected_MV - found_MV).abs().max()) > _TOLERANCE * float(expected_MV.abs().max()) * _coarse(model.dtype):
        raise UnsupportedArchitecture(
            f"model '{model.name}': its layers do more than add attention and MLP to their input"
        )


def _plain(layer: nn.Module) -> bool:
    return {name for name, _ in layer.named_children()} == _PARTS


def _coarse(dtype: torch.dtype) -> float:
    return 1.0 if dtype == torch.float32 else 50.0


def _logits(model: LanguageModel, parts: Anatomy | None) -> Tensor:
    """Of the trial's tokens by the library's layers, or by their four parts."""
    cache = model.new_cache(1)
    batch = PackedBatch.of_text(_TRIED, cache)
    plan = DensePlan(cache, batch)
    plan.native = None
    if parts is None:
        return model.forward(batch, plan).logits_MV.float()
    with forwards_replaced(list(parts.layers), [_group(parts, [number]) for number in range(len(parts.layers))]):
        return model.forward(batch, plan).logits_MV.float()


def _group(parts: Anatomy, numbers: Sequence[int]) -> Callable[..., Tensor]:
    """The replacement for the forward of a group's first layer: the whole group, [B, T, D] to [B, T, D]."""
    layers: list[Any] = [parts.layers[number] for number in numbers]

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended = [
            layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0] for layer in layers
        ]
        for layer, each in zip(layers, attended, strict=True):
            hidden_states = hidden_states + each
            hidden_states = hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))
        return hidden_states

    return forward
