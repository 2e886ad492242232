"""Architectures of GGUF files that transformers itself maps: its config, its names and its conversions are used.

The other architectures (families.json) are those that its older reader decodes whole, or not at all.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.gguf.container import GGUFFile
from foretoken.models.gguf.experts import is_stacked
from foretoken.models.gguf.fields import Fields, refuse_uncomputed

try:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf import get_gguf_config
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.integrations.gguf.gguf_conversion_mapping import (
        GGUF_ARCHS,
        ConcatenateRows,
        PermuteInputFeatures,
        PermuteRows,
    )

    MAPPED = frozenset(GGUF_ARCHS) & frozenset(GGUF_CONFIG_ARCHS)
except ImportError:  # of versions before 5.23
    MAPPED = frozenset()

_UNCOMPUTED = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")


class MappedArchitecture:
    """An architecture of :data:`MAPPED`; see :class:`Architecture`, which has the same attributes."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, fields = file, Fields(file)
        self._check_sizes(fields)
        refuse_uncomputed(file, frozenset({"expert_count"}), also=_UNCOMPUTED)
        described = {name: len(value) if _is_text(value) else value for name, value in file.fields.items()}
        try:
            self.config: Any = AutoConfig.for_model(**get_gguf_config(described, tuple(file.entries)))
            mapping = GGUF_ARCHS[fields.architecture](self.config)
        except KeyError as error:
            raise ModelError(f"model '{file.path}': its field {error} is missing") from None
        except Exception as error:  # fields of other types and sizes fail anywhere
            reason = " ".join(f"{error}".split())[:200]
            raise ModelError(f"model '{file.path}': its fields make no config: {reason}") from None
        self.config.eos_token_id = fields.ends()
        self.experts = "mlp.experts" if any(map(is_stacked, file.entries)) else None
        self.clamped_experts = False
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def place(self, name: str) -> str | None:
        """See :meth:`Architecture.place`; a block that predicts the token after the next is left out."""
        renamed: str = rename_source_key(name, self._renamings, self._converters)[0]
        return None if renamed.startswith("mtp.") else renamed

    def converted(self, name: str, stored: Tensor | QuantisedWeight) -> Tensor | QuantisedWeight:
        """See :meth:`Architecture.converted`."""
        place, pattern = rename_source_key(name, self._renamings, self._converters)
        for converter in self._converters:
            if pattern in converter.source_patterns:
                for operation in converter.operations:
                    stored = _applied(operation, stored, place, self._file)
        return stored

    def _check_sizes(self, fields: Fields) -> None:
        """Before the library makes as many layers as a damaged field says."""
        fields.embedding()
        elements = sum(entry.count for entry in self._file.entries.values())
        if fields.size("block_count") > len(self._file.entries) or fields.size("embedding_length") > elements:
            raise ModelError(f"model '{self._file.path}': its sizes are those of a larger model than its tensors")


def _applied(operation: Any, stored: Tensor | QuantisedWeight, place: str, file: GGUFFile) -> Tensor | QuantisedWeight:
    """Apply one of the library's operations to a tensor; blocks stay blocks."""
    if isinstance(operation, ConcatenateRows):
        raise ModelError(f"model '{file.path}': its tensor '{place}' is no stack of experts")
    if isinstance(stored, Tensor):
        return operation.convert({place: stored}, [place], [place])[place]
    if isinstance(operation, PermuteRows):
        first = torch.arange(operation.offset)
        return stored.rows(torch.cat([first, operation.offset + operation.permutation]))
    if isinstance(operation, PermuteInputFeatures):
        read = stored.decoded()
        order_K = operation.input_permutation
        return QuantisedWeight(read.codes_OK, read.scale_OG, read.minimum_OG, read.bits, order_K, read.name)
    return _applied(operation, stored.dense(), place, file)


def _is_text(value: Any) -> bool:
    """Whether it is a list of texts, of which the library wants the length."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)
