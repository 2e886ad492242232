"""The families of transformers that the native decoder supports: the names of their parts, and the steps between
them.

A family is a row of families.json with its differences from Llama, or from the family that it is ``like``. Numbers
(scales, caps, windows) are read from the model at hand (parts.py). A model that looks like a family but computes
something else is detected when it is tried (trial.py).

    norms        llama    x + attention(norm(x))                  before each branch
                 olmo2    x + norm(attention(x))                  after it
                 gemma2   x + norm(attention(norm(x)))            both
    parallel     cohere   x + attention(norm(x)) + mlp(norm(x))
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    Attributes:
        body: of the causal model, which holds everything but the head.
        layers, embedding, final_norm: in the body.
        rotary: in the body, what computes rotary tables.
        position_embedding: in the body, the learned position embedding; or None.
        first_position: the row of the position embedding for position 0.
        attention, mixer, mlp: of a layer; if a layer has no such name, it lacks the part. An MLP
            without a name is in the layer itself.
        router: in the module in the MLP's place, if it has ``experts``.
        shared: an MLP next to the experts, in the layer or in the module with the experts; in a layer without experts,
            the MLP; or None.
        alone: of layers that are attention or a mixer or an MLP and no more, the part, whichever it is; or None.
        attention_norm, attention_end_norm: of a layer, before attention (or the mixer) and after it; or None.
        mlp_norm, mlp_end_norm: the same of the MLP.
        mixed_like: the names of norms in layers with a mixer; None: as in others.
        centred: norms are LayerNorms.
        gain_offset: a norm multiplies by this plus its weight.
        parallel: the MLP has the input of attention; a setting in the config takes precedence.
        interleaved: rotary pairs neighbours.
        doubled: of the library's rotary tables, each angle stands twice side by side, not once in each half.
        single: of the library's rotary tables, each angle stands once.
        rotates_windows: layers without a window are not rotated.
        one_window: all layers have the config's window; else each has its own.
        caps_scores: attention scores are capped as the config says; a few configs say so for nothing.
    """

    body: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    position_embedding: str | None = None
    first_position: int = 0
    attention: str = "self_attn"
    mixer: str = "mixer"
    mlp: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    alone: str | None = None
    attention_norm: str | None = "input_layernorm"
    attention_end_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_end_norm: str | None = None
    mixed_like: Family | None = None
    centred: bool = False
    gain_offset: float = 0.0
    parallel: bool = False
    interleaved: bool = False
    doubled: bool = False
    single: bool = False
    rotates_windows: bool = False
    one_window: bool = False
    caps_scores: bool = False


_ROWS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _family(name: str) -> Family:
    row = dict(_ROWS[name])
    base = _family(row.pop("like")) if "like" in row else Family()
    if "mixed_like" in row:
        row["mixed_like"] = _family(row["mixed_like"])
    return replace(base, **row)


FAMILIES = {name: _family(name) for name in _ROWS}
