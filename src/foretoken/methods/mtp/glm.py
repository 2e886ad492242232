"""A dense model in the layout of GLM-4-MoE: the same function, in a checkpoint that can contain a prediction layer.

    Llama, Qwen2, Qwen3        GLM-4-MoE
    every layer                dense, as are all before first_k_dense_replace = L; layer L, after them, has experts
    rotary over whole heads    partial_rotary_factor = 1
    q_norm, k_norm (Qwen3)     use_qk_norm; biases of q, k and v (Qwen2): attention_bias
    a head that is the         a separate lm_head
    embedding

Names of the tensors are the same. The experts of layer L are few and small, like the target's layers.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.methods.mtp.shards import SINGLE
from foretoken.models.load import load_as_is

FAMILIES = ("llama", "qwen2", "qwen3")
EXPERTS, CHOSEN = 4, 2
KEPT = (  # fields of the config that are the same in both
    *("vocab_size", "hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "dtype"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def relaid(model: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return configuration and weights of the same function as a GLM-4-MoE; the weights are not copied.

    Args:
        model: of transformers.
        name: of the model, for messages.
    Raises:
        UnsupportedArchitecture: the model is not one of ``FAMILIES``, or has a part that GLM-4-MoE lacks.
    """
    from transformers import Glm4MoeConfig

    theirs = model.config
    if theirs.model_type not in FAMILIES:
        raise UnsupportedArchitecture(
            f"method 'mtp': a '{theirs.model_type}' cannot be laid out as a checkpoint with a prediction layer, only "
            f"{', '.join(FAMILIES)}"
        )
    weights = dict(model.state_dict())
    for part, feature in (("o_proj.bias", "a bias after attention"), ("mlp.gate_proj.bias", "an MLP with biases")):
        if any(each.endswith(part) for each in weights):
            raise UnsupportedArchitecture(f"method 'mtp': '{name}' has {feature}, which GLM-4-MoE lacks")
    if any(each == "sliding_attention" for each in getattr(theirs, "layer_types", None) or ()):
        raise UnsupportedArchitecture(f"method 'mtp': '{name}' has sliding windows, which GLM-4-MoE lacks")
    width = theirs.intermediate_size // EXPERTS // 32 * 32
    config = Glm4MoeConfig(
        **{name: getattr(theirs, name) for name in KEPT},
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        rope_parameters={**theirs.rope_parameters, "partial_rotary_factor": 1.0},
        attention_bias=any(each.endswith("q_proj.bias") for each in weights),
        use_qk_norm=any(each.endswith("q_norm.weight") for each in weights),
        first_k_dense_replace=theirs.num_hidden_layers,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_shared_experts=1,
        moe_intermediate_size=max(32, width),
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
        architectures=["Glm4MoeForCausalLM"],
    )
    weights.setdefault("lm_head.weight", model.get_output_embeddings().weight)
    return config, weights


def write_relaid(name: str, folder: Path) -> None:
    """Write a folder with such a checkpoint, in the model's own dtype: config, weights, tokenizer.

    Args:
        name: of the model: zoo name, folder or hub id.
        folder: to create.
    Raises:
        ForetokenError: the model cannot be loaded or converted.
    """
    from safetensors.torch import save_file

    found = load_as_is(name, device="cpu")
    config, weights = relaid(found.model, name)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    copies = {part: weight.detach().clone().contiguous() for part, weight in weights.items()}  # unties tied weights
    save_file(copies, folder / SINGLE, {"format": "pt"})
    found.model.generation_config.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)
