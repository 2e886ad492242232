"""The models that can grow (grown.py), with the facts that shapes do not show: families described by data.

Letters: E experts, I inputs of a matrix, O outputs; c copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_MOST_COPIES = 16

_MIXER = r"(in_proj|out_proj|conv1d)\.(weight|bias)|norm\.weight|dt_bias|A_log|D"
_NORMS = r"\w*(layernorm|layer_norm)\.(weight|bias)"
_ATTENTION = r"self_attn\.([qkvo]_proj|qkv_proj|dense|out_proj)\.(weight|bias)|self_attn\.([qk]_norm\.weight|sinks)"
_MLP = (
    r"(mlp|feed_forward|mlp\.shared_experts?)\.(gate|up|down|gate_up)_proj\.(weight|bias)"
    r"|(mlp\.)?(fc1|fc2|c_fc|c_proj)\.(weight|bias)"
)
_EXPERTS = (
    r"(mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj(_bias)?|mlp\.shared_expert_gate\.weight"
    r"|(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias|e_score_correction_bias)"
    r"|shared_mlp\.(input|output)_linear\.weight"
)
_LATENT = r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|[qk]v?_a_layernorm)\.(weight|bias)"
_HALVES = (1, 1)


@dataclass(frozen=True, slots=True)
class Family:
    """Models that grow alike.

    Attributes:
        body: the module with everything but the head.
        layers: of the body.
        embeddings, final_norm: of the body.
        parts: parameters that a layer may have, a regular expression.
        outputs: the projections through which a layer adds to the stream.
        widened: settings of the configuration that grow by a factor of c, if present.
        mixer: of a layer, where it has one.
        packed: parameters that hold several matrices side by side -> their proportions; (): queries, keys, values.
        inputs_first: whether matrices are [I, O]; of experts only: their names.
        offset: whether the gain of the final norm is 1 + w.
        scaled: whether the embedding is multiplied by the root of the width.
    """

    body: str = "model"
    layers: str = "layers"
    embeddings: tuple[str, ...] = ("embed_tokens",)
    final_norm: str = "norm"
    parts: str = "|".join((_ATTENTION, _MLP, _EXPERTS, _NORMS))
    outputs: tuple[str, ...] = (
        "self_attn.o_proj",
        "mlp.down_proj",
        "mlp.experts.down_proj",
        "mlp.shared_expert.down_proj",
        "mlp.shared_experts.down_proj",
        "block_sparse_moe.experts.down_proj",
        "shared_mlp.output_linear",
    )
    widened: tuple[str, ...] = (
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    mixer: str | None = None
    packed: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "mlp.gate_up_proj": _HALVES,
            "mlp.experts.gate_up_proj": _HALVES,
            "block_sparse_moe.experts.gate_up_proj": _HALVES,
            "shared_mlp.input_linear": _HALVES,
            "self_attn.qkv_proj": (),
        }
    )
    inputs_first: str | None = None
    offset: bool = False
    scaled: bool = False

    def layer_of(self, part: str) -> tuple[int, str] | None:
        """Which layer a parameter is of, and its name there; None: of none."""
        found = re.fullmatch(rf"{re.escape(self.body)}\.{self.layers}\.(\d+)\.(.+)", part)
        return None if found is None else (int(found[1]), found[2])

    def knows(self, part: str) -> bool:
        """Whether the growth of a parameter is defined."""
        layer = self.layer_of(part)
        if layer is not None:
            return re.fullmatch(self.parts, layer[1]) is not None
        return part in ("lm_head.weight", "lm_head.bias") or self.embeds(part) or self.norms_last(part)

    def embeds(self, part: str) -> bool:
        """Whether a parameter is a table that begins the stream."""
        return part in (f"{self.body}.{each}.weight" for each in self.embeddings)

    def norms_last(self, part: str) -> bool:
        """Whether a parameter is of the final norm."""
        return part in (f"{self.body}.{self.final_norm}.{each}" for each in ("weight", "bias"))

    def counts(self) -> tuple[int, ...]:
        """Numbers of copies that no weight is rounded for."""
        return tuple(count for count in range(1, _MOST_COPIES + 1) if not self.scaled or count in (1, 4, 16))

    def input_axis(self, part: str) -> int | None:
        """The axis of a matrix that reads the stream or values computed from it; None: a bias (of experts, [E, O])."""
        if part.endswith("bias"):
            return None
        return -2 if self.inputs_first is not None and re.fullmatch(self.inputs_first, part) else -1


_LLAMA = Family()
_HYBRID = replace(
    _LLAMA,
    final_norm="final_layernorm",
    parts=rf"{_LLAMA.parts}|mamba\.({_MIXER})",
    outputs=(*_LLAMA.outputs, "mamba.out_proj", "feed_forward.down_proj"),
    widened=(*_LLAMA.widened, "mamba_n_heads", "mamba_n_groups", "mamba_d_ssm"),
    mixer="mamba",
)
_GEMMA = replace(_LLAMA, offset=True, scaled=True)
FAMILIES = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "arcee",
            "ernie4_5",
            "smollm3",
            "seed_oss",
            "ministral",
            "cwm",
            "helium",
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("granite", "cohere", "cohere2", "stablelm", "phi3", "glm", "glm4"), _LLAMA),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _LLAMA),  # norms of a layer's outputs: zeros stay zeros
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared"), _LLAMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), replace(_LLAMA, parts=f"{_LLAMA.parts}|{_LATENT}")),
    "gpt_oss": replace(
        _LLAMA, packed={}, inputs_first=r"mlp\.experts\.(gate_up|down)_proj"
    ),  # gates alternate with ups
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    "nemotron": replace(_LLAMA, offset=True),
    "phi": replace(_LLAMA, final_norm="final_layernorm", outputs=("self_attn.dense", "mlp.fc2")),
    "starcoder2": replace(_LLAMA, outputs=("self_attn.o_proj", "mlp.c_proj")),
    "gpt_neox": Family(
        body="gpt_neox",
        embeddings=("embed_in",),
        final_norm="final_layer_norm",
        parts=rf"attention\.(query_key_value|dense)\.(weight|bias)|mlp\.dense_(h_to_4h|4h_to_h)\.(weight|bias)|{_NORMS}",
        outputs=("attention.dense", "mlp.dense_4h_to_h"),
        packed={},  # query, key and value lie head by head
    ),
    "gpt2": Family(
        body="transformer",
        layers="h",
        embeddings=("wte", "wpe"),
        final_norm="ln_f",
        parts=r"ln_[12]\.(weight|bias)|attn\.(c_attn|c_proj)\.(weight|bias)|mlp\.(c_fc|c_proj)\.(weight|bias)",
        outputs=("attn.c_proj", "mlp.c_proj"),
        widened=("n_embd", "n_head", "n_inner"),
        packed={"attn.c_attn": (1, 1, 1)},
        inputs_first=r".*\.(c_attn|c_fc|c_proj)\.weight",
    ),
    "opt": replace(
        _LLAMA,
        body="model.decoder",
        embeddings=("embed_tokens", "embed_positions"),
        final_norm="final_layer_norm",
        outputs=("self_attn.out_proj", "fc2"),
        widened=("hidden_size", "word_embed_proj_dim", "ffn_dim", "num_attention_heads"),
    ),
    **dict.fromkeys(("bamba", "falcon_h1"), _HYBRID),
    "granitemoehybrid": replace(_HYBRID, final_norm="norm"),
    "mamba2": Family(
        body="backbone",
        embeddings=("embeddings",),
        final_norm="norm_f",
        parts=rf"norm\.weight|mixer\.({_MIXER})",
        outputs=("mixer.out_proj",),
        widened=("hidden_size", "num_heads", "n_groups"),
        mixer="mixer",
    ),
}
REASONS = {  # why not
    "gemma3": "its language model is one part of several",
    "gemma3n_text": "its streams are mixed by numbers that are clipped and normed across them",
    "gemma4_text": "every layer adds an embedding of its own that is scaled by the root of another width",
    "gpt_bigcode": "all its heads share one head of keys and values, and their number cannot grow",
    "olmo": "its final norm has no gain to carry shares",
    "zamba2": "its layers share attention blocks in turns, and a layer more would shift the turns",
}
