"""The architectures that are read: what their tensors are called, how values are stored, and which fields they have.

llama.cpp stores some weights otherwise than the library has them:

* Llama and Granite have the rows of queries and keys re-ordered, since it rotates neighbouring pairs (0, 1), (2, 3), …
  of a head where the library rotates (0, D/2), (1, D/2 + 1), …; whole rows move, so that this is undone exactly for
  blocks, too.
* Gemma and Nemotron compute 1 + w in a norm, and the file has that sum.

Phi-3 and GLM-4 have one matrix for the gate and the other factor of an MLP, in the library's own order. With Qwen's
experts llama.cpp divides the weights of the chosen ones by their sum for Qwen3 only (``norm_topk_prob``).

The architectures are rows of families.json.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.models.gguf.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is stored.

    Attributes:
        model_type: of the library.
        tensors: a layer's tensors, and the library's modules.
        parameters: a layer's tensors, with their ending, that are parameters without one.
        experts: the module of a layer that holds routed experts; None: there are none.
        clamped_experts: whether the experts are GPT-OSS's.
        interleaved: whether rows of queries and keys are re-ordered.
        offset_norms: whether norms are stored as 1 + w.
        partial_rotary: whether the rotary embedding may cover a part of a head.
        epsilon: the field of the norms' epsilon, and the config's name for it.
        sizes, numbers: the config's names for fields, besides the sizes that all have.
        present: the config's names for whether a tensor is present.
        constants: values of the config that no field has.
        reads: fields that change the computation and are in the config; others are refused.
    """

    model_type: str
    tensors: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    experts: str | None = None
    clamped_experts: bool = False
    interleaved: bool = False
    offset_norms: bool = False
    partial_rotary: bool = False
    epsilon: Sequence[str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()

    @property
    def channels(self) -> str:
        """The field with the width of an MLP, of one expert where there are some."""
        return "feed_forward_length" if self.experts is None else "expert_feed_forward_length"

    def options(self, fields: Fields) -> dict[str, Any]:
        """The values of the config in addition to the sizes that all have."""
        return {
            **self.constants,
            **{name: fields.size(found) for name, found in self.sizes.items()},
            **{name: fields.number(found) for name, found in self.numbers.items()},
            **{name: tensor in fields.tensors for name, tensor in self.present.items()},
            **_COMPUTED.get(self.model_type, lambda fields: {})(fields),
        }


def _gemma_scale(fields: Fields, layers_of_27b: int) -> int:
    """Return the square of the divisor of scores: a head's width, but not in the models of 27 B; no field has it."""
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    if fields.size("block_count") == layers_of_27b:
        return width // heads
    return fields.size("attention.key_length", absent=max(1, width // heads))


_COMPUTED: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma2": lambda fields: {
        "query_pre_attn_scalar": _gemma_scale(fields, 46),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", absent=50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", absent=30.0),
    },
    "gemma3_text": lambda fields: {"query_pre_attn_scalar": _gemma_scale(fields, 62)},
    "phi3": lambda fields: {
        "sliding_window": fields.size("attention.sliding_window") if "attention.sliding_window" in fields else None
    },
    "stablelm": lambda fields: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in fields.tensors},
}


def _families() -> dict[str, Family]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    found = {}
    for name, row in table["families"].items():
        sets = (table["tensors"][each] if isinstance(each, str) else each for each in row["tensors"])
        tensors = {tensor: module for each in sets for tensor, module in each.items()}
        found[name] = Family(**{**row, "tensors": tensors, "reads": frozenset(row.get("reads", ()))})
    return found


FAMILIES = _families()
