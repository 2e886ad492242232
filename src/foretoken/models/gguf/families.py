"""The architectures that are read: what their tensors are called, how values are stored, and which fields they have.

llama.cpp stores some weights otherwise than the library has them:

* Llama and Granite have the rows of queries and keys re-ordered, since it rotates neighbouring pairs (0, 1), (2, 3), …
  of a head where the library rotates (0, D/2), (1, D/2 + 1), …; whole rows move, so that this is undone exactly for
  blocks, too.
* Gemma and Nemotron compute 1 + w in a norm, and the file has that sum.

Phi-3 and GLM-4 have one matrix for the gate and the other factor of an MLP, in the library's own order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.models.gguf.fields import Fields

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP
_GEMMA_2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_RMS_EPSILON = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is stored.

    Attributes:
        model_type: of the library.
        tensors: a layer's tensors, and the library's modules.
        options: values of the config beyond the sizes that all have.
        interleaved: whether rows of queries and keys are re-ordered.
        offset_norms: whether norms are stored as 1 + w.
        epsilon: the field of the norms' epsilon, and the config's name for it.
        reads: fields that change the computation and are in ``options``; others are refused.
        partial_rotary: whether the rotary embedding may cover a part of a head.
        experts: the module of a layer that holds routed experts; None: there are none.
        parameters: a layer's tensors, with their ending, that are parameters without one.
        clamped_experts: whether the experts are GPT-OSS's.
    """

    model_type: str
    tensors: Mapping[str, str]
    options: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    interleaved: bool = False
    offset_norms: bool = False
    epsilon: tuple[str, str] = _RMS_EPSILON
    reads: frozenset[str] = frozenset()
    partial_rotary: bool = False
    experts: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    clamped_experts: bool = False

    @property
    def channels(self) -> str:
        """The field with the width of an MLP, of one expert where there are some."""
        return "feed_forward_length" if self.experts is None else "expert_feed_forward_length"


def _window(fields: Fields) -> dict[str, int]:
    return {"sliding_window": fields.size("attention.sliding_window")}


def _local_experts(fields: Fields) -> dict[str, int]:
    return {"num_local_experts": fields.size("expert_count"), "num_experts_per_tok": fields.size("expert_used_count")}


def _biases(fields: Fields) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in fields.tensors, "mlp_bias": "blk.0.ffn_up.bias" in fields.tensors}


def _gemma_scale(fields: Fields, layers_of_27b: int) -> int:
    """Return the square of the divisor of scores: a head's width, but not in the models of 27 B; no field has it."""
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    if fields.size("block_count") == layers_of_27b:
        return width // heads
    return fields.size("attention.key_length", absent=max(1, width // heads))


def _gemma_2(fields: Fields) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(fields, 46),
        **_window(fields),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", absent=50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", absent=30.0),
    }


def _gemma_3(fields: Fields) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _gemma_scale(fields, 62), **_window(fields)}


def _phi_3(fields: Fields) -> dict[str, Any]:
    return _window(fields) if "attention.sliding_window" in fields else {"sliding_window": None}


def _granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
        **_biases(fields),
    }


def _stablelm(fields: Fields) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in fields.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in fields.tensors,
    }


def _qwen_experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen_2_experts(fields: Fields) -> dict[str, Any]:
    return {
        **_qwen_experts(fields),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": fields.size("expert_shared_feed_forward_length"),
        "qkv_bias": "blk.0.attn_q.bias" in fields.tensors,
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    return _local_experts(fields) | _window(fields)


def _minimax(fields: Fields) -> dict[str, Any]:
    return _local_experts(fields) | {"rotary_dim": fields.size("rope.dimension_count")}


_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"

FAMILIES = {
    "llama": Family("llama", _LLAMA, _biases, interleaved=True),
    "qwen2": Family("qwen2", _LLAMA),
    "qwen3": Family("qwen3", _LLAMA | _HEAD_NORMS),
    "qwen2moe": Family(
        "qwen2_moe",
        _ATTENTION
        | {
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        _qwen_2_experts,
        experts="mlp.experts",
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        _ATTENTION | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        # llama.cpp always divides the chosen experts' weights by their sum
        lambda fields: {**_qwen_experts(fields), "norm_topk_prob": True},
        experts="mlp.experts",
    ),
    "gpt-oss": Family(
        "gpt_oss",
        _ATTENTION | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        _gpt_oss,
        reads=frozenset({"attention.sliding_window"}),
        experts="mlp.experts",
        parameters={"attn_sinks.weight": "self_attn.sinks"},
        clamped_experts=True,
    ),
    "minimax-m2": Family(
        "minimax_m2",
        _ATTENTION | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        _minimax,
        partial_rotary=True,
        experts="mlp.experts",
        parameters={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "gemma": Family("gemma", _LLAMA, offset_norms=True),
    "gemma2": Family(
        "gemma2",
        _GEMMA_2,
        _gemma_2,
        offset_norms=True,
        reads=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Family(
        "gemma3_text",
        _GEMMA_2 | _HEAD_NORMS,
        _gemma_3,
        offset_norms=True,
        reads=frozenset({"attention.sliding_window", "rope.freq_base_swa"}),
    ),
    "phi3": Family(
        "phi3",
        _ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        _phi_3,
        reads=frozenset({"attention.sliding_window"}),
        partial_rotary=True,
    ),
    "granite": Family(
        "granite",
        _LLAMA,
        _granite,
        interleaved=True,
        reads=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "starcoder2": Family(
        "starcoder2",
        _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        lambda fields: {"use_bias": "blk.0.attn_q.bias" in fields.tensors, "sliding_window": None},
        epsilon=(_LAYER_NORM_EPSILON, "norm_epsilon"),
    ),
    "stablelm": Family(
        "stablelm", _LLAMA, _stablelm, epsilon=(_LAYER_NORM_EPSILON, "layer_norm_eps"), partial_rotary=True
    ),
    "nemotron": Family(
        "nemotron",
        _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        _biases,
        offset_norms=True,
        epsilon=(_LAYER_NORM_EPSILON, "norm_eps"),
        partial_rotary=True,
    ),
    "glm4": Family(
        "glm4",
        _ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        lambda fields: {"attention_bias": "blk.0.attn_q.bias" in fields.tensors},
        partial_rotary=True,
    ),
}
