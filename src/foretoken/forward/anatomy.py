"""Where a decoder's parts are: embedding, layers, final norm and head, found by walking the model.

Nearly every decoder of the library is built alike, under changing names: one module, the *body*, holds the list of
layers and next to it the norm after them; the causal model around it adds the head.

    tokens ── embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── head ── logits
             └──────────────────────── body ────────────────────────┘
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture

# Names of the norm after the last layer in the library's decoders. A body may hold other norms (of the embedding, say),
# so the names are listed rather than guessed.
_FINAL_NORMS = (
    *("norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm", "ln_out", "layer_norm"),
    "embedding_norm",  # LFM2's
)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of one model; the modules themselves, not copies.

    Attributes:
        body: embedding to final norm; called with ``input_ids`` it computes everything but the head.
        embedding: token ids to vectors, before any scaling, position or projection that the body adds.
        layers: L of them; each maps the residual stream [B, T, D] to the next.
        final_norm: its output is the input of the head, unless the model projects or scales in between.
        head: maps [B, T, D] to logits, before any scaling or capping that the model adds.
    """

    body: nn.Module
    embedding: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    head: nn.Module


def find(model: Any) -> Anatomy:
    """Find the parts of a causal language model of transformers.

    Raises:
        UnsupportedArchitecture: a part was not found; the message names it and the module found instead.
    """
    kind = type(model).__name__
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    body, layers = _layers(model, kind, count)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for part, what in ((embedding, "token embedding"), (head, "language head")):
        if part is None:
            raise UnsupportedArchitecture(f"{kind}: has no {what}")
    return Anatomy(body, embedding, layers, _final_norm(body, kind), head)


def last_own_layers(text: Any) -> dict[str, int]:
    """Of each type of attention, the last layer that has keys and values of its own.

    Args:
        text: config of the text part.
    """
    layers = text.num_hidden_layers
    kind = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    types = list(getattr(text, "layer_types", None) or [kind] * layers)
    return {
        kind: layer for layer, kind in enumerate(types[: layers - (getattr(text, "num_kv_shared_layers", None) or 0)])
    }


def kv_sources(text: Any) -> dict[int, int]:
    """Of each layer that reads another layer's keys and values (Gemma 3n, Gemma 4), that layer."""
    own, last = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0), last_own_layers(text)
    types = list(getattr(text, "layer_types", None) or ())
    return {layer: last[kind] for layer, kind in enumerate(types[own:], own)}


def cache_argument(module: nn.Module) -> str:
    """The argument through which a module of transformers takes its cache: ``cache`` from 5.24 on."""
    named = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in named), "past_key_values")


def gain_of(norm: nn.Module) -> Tensor | None:
    """The gain [D] of an RMSNorm, which is its weight or, in some families, 1 + weight; None if it is neither."""
    weight_D = getattr(norm, "weight", None)
    if not isinstance(weight_D, Tensor) or weight_D.dim() != 1:
        return None
    with torch.no_grad():
        probe_11D = torch.linspace(-1, 2, len(weight_D), device=weight_D.device)[None, None]
        found_D = norm(probe_11D.to(weight_D.dtype))[0, 0].float()
        for gain_D in (weight_D.detach().float(), 1 + weight_D.detach().float()):
            given_D = F.rms_norm(probe_11D, gain_D.shape, gain_D, 1e-6)[0, 0]
            if torch.allclose(given_D, found_D, atol=1e-4 if weight_D.dtype == torch.float32 else 0.05):
                return gain_D
    return None


def _layers(model: nn.Module, kind: str, count: int) -> tuple[nn.Module, nn.ModuleList]:
    # outer modules come first, so the experts of a layer are never taken for the layers
    for body in model.modules():
        for part in body.children():
            if isinstance(part, nn.ModuleList) and len(part) == count:
                return body, part
    raise UnsupportedArchitecture(f"{kind}: has no list of {count} layers, the number that its config names")


def _final_norm(body: nn.Module, kind: str) -> nn.Module:
    parts = dict(body.named_children())
    for name in _FINAL_NORMS:
        if name in parts:
            return parts[name]
    raise UnsupportedArchitecture(f"{kind}: no norm found after the layers (next to them are: {', '.join(parts)})")
