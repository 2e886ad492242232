"""Names of the next-token-prediction layer in checkpoints, and its kind, by the type of the text model (layouts.json).

    DeepSeek-V3, GLM-4-MoE, ...   model.layers.{L}.enorm, hnorm, eh_proj, shared_head.norm     L = num_hidden_layers
                                  model.layers.{L}.*                                           a decoder layer
                                  model.layers.{L}.shared_head.head, embed_tokens              copies of the target's
    Qwen3-Next, EXAONE, ...       mtp.pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm
                                  mtp.layers.0.*                                               a decoder layer

Copies are optional.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.core.errors import UnsupportedArchitecture

EXPERTS, NORM = "experts.", "norm.weight"
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The names of one family.

    Attributes:
        prefix: of all of the layer's tensors; "{}" is the target's number of layers.
        inner: prefix of names of the decoder layer, after ``prefix``.
        parts: our names of modules outside the decoder layer -> the family's; without a norm, its output goes through
            the target's final norm.
        fields: fields of the target's config -> their values for this layer, as if it were the first; a config may
            state another kind in the field with "mtp_" before its name.
        renamed: parts of names in the decoder layer -> the library's.
        copies: names of the copies of embedding and head.
        written: ``foretoken train mtp`` writes such layers.
    """

    prefix: str
    inner: str = ""
    parts: Mapping[str, str]
    fields: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    written: bool = False

    def prefix_in(self, num_layers: int) -> str:
        """Return the prefix for a target with this number of layers."""
        return self.prefix.format(num_layers)

    def of_layer(self, config: Any) -> Any:
        """Return a copy of the target's config for a model of which the layer would be the first.

        Raises:
            UnsupportedArchitecture: the config states blocks that are not computed.
        """
        text = copy.copy(config)
        for name, value in self.fields.items():
            stated = getattr(config, f"mtp_{name}", None)
            if stated and len(value) > 1 and stated != value:
                raise UnsupportedArchitecture(f"method 'mtp': mtp_{name}={stated} is not computed, only {value}")
            setattr(text, name, stated[: len(value)] if stated else value)
        return text

    def theirs(self, name: str) -> str:
        """Return the family's name of a tensor that the library's decoder layer calls so."""
        for published, ours in self.renamed.items():
            name = name.replace(ours, published)
        return self.inner + name

    def ours(self, name: str) -> str:
        """Return the library's name of a tensor of the decoder layer that the family calls so."""
        name = name.removeprefix(self.inner)
        for published, ours in self.renamed.items():
            name = name.replace(published, ours)
        return name


LAYOUTS: Mapping[str, Layout] = {
    kind: Layout(**{name: value for name, value in row.items() if name != "types"})
    for row in json.loads(Path(__file__).with_name("layouts.json").read_text(encoding="utf-8"))
    for kind in row["types"]
}
