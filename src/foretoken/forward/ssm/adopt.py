"""Takes over the state-space mixers of a model: their recurrences are computed by the plan of the forward at hand."""

from functools import partial
from typing import Any

from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy, attention
from foretoken.forward.ssm import layout
from foretoken.forward.ssm.layout import Mixer


def mixers(model: Any, name: str) -> list[Mixer]:
    """Every mixer of a causal model, by layer; from now on each answers as the plan does, and so only inside of one.

    Args:
        model: of transformers; its mixers' forwards are replaced.
        name: the user's name for it, for messages.
    Raises:
        UnsupportedArchitecture: a mixer is of a form that is not known; the message has its layer and name.
    """
    try:
        found = layout.mixers(model)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"model '{name}' ({type(model).__name__}) is not supported: {error}") from error
    for mixer in found:
        mixer.module.forward = partial(_mix, mixer)
    if found:
        _number(model)
    return found


def _mix(mixer: Mixer, hidden_states: Tensor, *args: Any, **others: Any) -> Tensor:
    """In the place of the mixer's forward; the library's cache and masks stay out: a batch is packed."""
    projected = mixer.project(hidden_states[0])
    y_THP = attention.current().mix(mixer, projected)
    return mixer.finish(y_THP, projected.z)[None]


def _number(model: Any) -> None:
    """Give attention blocks the number of their layer where they have none: Zamba2 hands it over with each call."""
    module: Any
    for number, layer in enumerate(anatomy.find(model).layers):
        for module in layer.modules():
            if getattr(module, "layer_idx", 0) in (None, -1):
                module.layer_idx = number
