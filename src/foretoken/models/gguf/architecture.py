"""What a GGUF file's fields say about its model: the library's config, and of each tensor name, order and value."""

import math
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from foretoken.core.errors import ModelError, UnsupportedArchitecture
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.gguf.container import GGUFFile
from foretoken.models.gguf.families import FAMILIES
from foretoken.models.gguf.fields import Fields, refuse_uncomputed
from foretoken.models.gguf.library import MAPPED, MappedArchitecture

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROTARY_FACTORS = "rope_freqs.weight"  # read into the config
# Llama 3's: which wavelengths are stretched is not in the file, but the factors that come of it are
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Architecture:
    """The architecture that a file's fields define.

    Attributes:
        config: of transformers; without a dtype.
        experts: the module of a layer that holds its routed experts; None: the architecture has none.
        clamped_experts: whether those are GPT-OSS's; see experts.py.
    Raises:
        UnsupportedArchitecture: a model that is not read, or a setting of it.
        ModelError: fields are missing, or say nothing sensible.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._fields = Fields(file)
        self._name = self._fields.architecture
        family = FAMILIES.get(self._name)
        if family is None:
            raise UnsupportedArchitecture(
                f"model '{file.path}' is a GGUF file of architecture {self._name!r:.60}, which is not read: "
                f"{', '.join([*FAMILIES, *sorted(MAPPED)])} are; take the model as a folder of transformers"
            )
        self._family, self.experts, self.clamped_experts = family, family.experts, family.clamped_experts
        refuse_uncomputed(file, family.reads if family.experts is None else {"expert_count", *family.reads})
        self.config = self._config()

    def place(self, name: str) -> str | None:
        """The library's name of a tensor; None for one that is no parameter."""
        if name == ROTARY_FACTORS:
            return None
        outer, _, leaf = name.partition(".")
        if outer in _OUTER and leaf in ("weight", "bias"):
            return f"{_OUTER[outer]}.{leaf}"
        found = _BLOCK.fullmatch(name)
        if found is not None and (alone := self._family.parameters.get(f"{found[2]}.{found[3]}")) is not None:
            return f"model.layers.{found[1]}.{alone}"
        if found is None or found[2] not in self._family.tensors:
            raise UnsupportedArchitecture(
                f"model '{self._file.path}': its tensor {name!r:.80} has no place in a model of type "
                f"'{self.config.model_type}'"
            )
        return f"model.layers.{found[1]}.{self._family.tensors[found[2]]}.{found[3]}"

    def converted(self, name: str, stored: Tensor | QuantisedWeight) -> Tensor | QuantisedWeight:
        """The library's value of a tensor: a norm may be stored as 1 + w, a row as a vector, rows in another order."""
        if isinstance(stored, Tensor):
            if name.endswith(".ffn_gate_inp_shexp.weight"):
                return stored.view(1, -1)
            if self._family.offset_norms and name.endswith("norm.weight"):
                return stored - 1
        found = _BLOCK.fullmatch(name)
        if not self._family.interleaved or found is None or found[2] not in ("attn_q", "attn_k"):
            return stored
        heads = self.config.num_attention_heads if found[2] == "attn_q" else self.config.num_key_value_heads
        width = self._head_dim
        if stored.shape[0] != heads * width:  # not of the model, which is refused where it is put in
            return stored
        order = halves_first(heads, width)
        return stored[order] if isinstance(stored, Tensor) else stored.rows(order)

    def _config(self) -> Any:
        file, fields = self._file, self._fields
        heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
        head_dim = fields.size("attention.key_length", absent=max(1, width // heads))
        if head_dim != fields.size("attention.value_length", absent=head_dim) or head_dim % 2:
            raise UnsupportedArchitecture(f"model '{file.path}': its heads have keys and values of different widths")
        rotated = fields.size("rope.dimension_count", absent=head_dim)
        if rotated > head_dim or (rotated != head_dim and not self._family.partial_rotary):
            raise UnsupportedArchitecture(f"model '{file.path}': its rotary embedding covers a part of a head only")
        embedding = fields.embedding()
        if isinstance(file.fields.get(f"{self._name}.attention.head_count_kv"), list):
            raise UnsupportedArchitecture(f"model '{file.path}': its layers have different numbers of heads")
        kv_heads = fields.size("attention.head_count_kv", absent=heads)
        if heads % kv_heads:
            raise ModelError(
                f"model '{file.path}': its field '{self._name}.attention.head_count_kv' is {kv_heads}, which does not "
                f"divide its {heads} heads"
            )
        layers, channels = fields.size("block_count"), fields.size(self._family.channels)
        elements = sum(entry.count for entry in file.entries.values())
        if layers > len(file.entries) or width * max(channels, heads * head_dim) > elements:
            raise ModelError(f"model '{file.path}': its sizes are those of a larger model than its tensors")
        self._head_dim = head_dim
        field, name = self._family.epsilon
        try:
            return AutoConfig.for_model(
                self._family.model_type,
                vocab_size=embedding.shape[0],
                hidden_size=width,
                intermediate_size=channels,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                max_position_embeddings=fields.size("context_length"),
                rope_parameters=self._rotary(head_dim, rotated),
                tie_word_embeddings="output.weight" not in file.entries,
                bos_token_id=fields.token("bos"),
                eos_token_id=fields.ends(),
                pad_token_id=fields.token("padding"),
                **{name: fields.number(field, 0.0, 1.0)},
                **self._family.options(fields),
            )
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise ModelError(
                f"model '{file.path}': its fields make no config: {' '.join(str(error).split())}"
            ) from None

    def _rotary(self, head_dim: int, rotated: int) -> dict[str, Any]:
        scaled = scaled_rotary(self._file, self._fields, rotated)
        if self._family.partial_rotary:
            scaled["partial_rotary_factor"] = rotated / head_dim
        if self._name == "gemma3":  # layers with a window have a base of their own, and no scaling
            base = self._fields.number("rope.freq_base_swa", 1.0, absent=10000.0)
            return {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
        return scaled


def halves_first(heads: int, width: int) -> Tensor:
    """Return the places of rows as the library rotates them, in a file that has neighbouring pairs of each head."""
    return torch.arange(heads * width).view(heads, width // 2, 2).transpose(1, 2).flatten()


def scaled_rotary(file: GGUFFile, fields: Fields, rotated: int) -> dict[str, Any]:
    """Return the library's rotary parameters.

    Args:
        rotated: elements of a head.
    Raises:
        UnsupportedArchitecture: they are scaled in a way that is not computed.
    """
    theta, name = fields.number("rope.freq_base", 1.0, absent=10000.0), fields.architecture
    kind, factor = _scaling(fields)
    if ROTARY_FACTORS in file.entries:
        if kind != "none":
            raise UnsupportedArchitecture(
                f"model '{file.path}': its rotary embedding is scaled twice, by '{ROTARY_FACTORS}' and by "
                f"{kind!r:.40}, which is not computed"
            )
        return {"rope_theta": theta, **_llama3(file, theta, rotated)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedArchitecture(
            f"model '{file.path}': its rotary embedding is scaled by {kind!r:.40}: none, linear, yarn and "
            "Llama 3's are read"
        )
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": fields.field(factor, float)}
    if name == "gpt-oss":
        scaled["truncate"] = False
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
    return scaled


def _scaling(fields: Fields) -> tuple[str, str]:
    """How the rotary embedding is scaled, and the field with the factor; a factor without a type is linear."""
    names = ("rope.scaling.factor", "rope.scale_linear")  # the old one where the new one is absent
    written = [name for name in names if name in fields]
    kind = fields.field("rope.scaling.type", str, absent="linear" if written else "none")
    return kind, (written or names)[0]


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, where the file's factors are those that come of it."""
    from foretoken.models.gguf.blocks import dense

    factors = dense(file, file.entries[ROTARY_FACTORS]).double()
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    largest, context = float(factors.max()), _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    between = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - between) / largest + between)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-5):
        raise UnsupportedArchitecture(
            f"model '{file.path}': its tensor '{ROTARY_FACTORS}' differs from Llama 3's scaling of rotary "
            "embeddings, the only scaling that is supported"
        )
    return {"rope_type": "llama3", "factor": largest, **_LLAMA3}


def architecture_of(file: GGUFFile) -> Architecture | MappedArchitecture:
    """The architecture that a file's fields define.

    Raises:
        UnsupportedArchitecture, ModelError: see :class:`Architecture`.
    """
    mapped = file.fields.get("general.architecture") in MAPPED
    return MappedArchitecture(file) if mapped else Architecture(file)
