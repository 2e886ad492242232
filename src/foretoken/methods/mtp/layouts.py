"""Names of the next-token-prediction layer in checkpoints.

    DeepSeek-V3, GLM-4-MoE,   model.layers.{L}.enorm, hnorm, eh_proj, shared_head.norm     L = num_hidden_layers
    GLM-4.7-Flash             model.layers.{L}.*                                           a decoder layer
                              model.layers.{L}.shared_head.head, embed_tokens              copies of the target's
    Qwen3-Next, Qwen3.5       mtp.pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm
                              mtp.layers.0.*                                               a layer of full attention

Copies are optional.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EXPERTS = "mlp.experts."


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of one family.

    Attributes:
        prefix: of all of the layer's tensors; "{}" is the target's number of layers.
        inner: prefix of names of the decoder layer, after ``prefix``.
        parts: our names of modules outside the decoder layer -> the family's.
        copies: names of the copies of embedding and head.
    """

    prefix: str
    inner: str
    parts: Mapping[str, str]
    copies: tuple[str, ...] = ()

    def prefix_in(self, num_layers: int) -> str:
        """Return the prefix for a target with this number of layers."""
        return self.prefix.format(num_layers)


EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
_BEHIND = Layout(
    prefix="model.layers.{}.",
    inner="",
    parts={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "norm.weight": "shared_head.norm.weight",
        "eh_proj.weight": "eh_proj.weight",
    },
    copies=(EMBEDDING, HEAD),
)
_BESIDE = Layout(
    prefix="mtp.",
    inner="layers.0.",
    parts={
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "norm.weight": "norm.weight",
        "eh_proj.weight": "fc.weight",
    },
)
LAYOUTS: Mapping[str, Layout] = {  # by the type of the text model
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _BEHIND),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _BESIDE),
}
