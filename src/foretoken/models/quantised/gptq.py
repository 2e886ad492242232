"""GPTQ checkpoints: 4 or 8 bits, with or without an order of columns (AutoGPTQ, GPTQModel).

qweight   int32 [K bits / 32, O]    eight (four) rows of a column in a word
qzeros    int32 [G, O bits / 32]    zero points, minus one in the first version of the format ("gptq"), as they are
                                    in the second ("gptq_v2")
scales    floating [G, O]
g_idx     int32 [K]                 the group of every input; groups are not neighbours with ``desc_act``

W[o, k] = scales[g_idx[k], o] (qweight[k, o] - zero[g_idx[k], o])
"""

from collections.abc import Mapping
from typing import Any

import torch

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.quantised.formats import SCALES, Layer, group_size, groups, setting
from foretoken.models.quantised.packing import by_group, unpacked, with_zeros

_INT32 = (torch.int32,)


class GPTQ:
    """The format of one checkpoint; see :class:`foretoken.models.quantised.formats.Format`.

    Args:
        config: the checkpoint's ``quantization_config``.
    Raises:
        ModelError: a setting that is not read.
    """

    mark = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = setting(config, "bits", (4, 8))
        self._group = group_size(config, -1)
        self._ordered: bool = setting(config, "desc_act", (True, False), False)
        # AutoGPTQ's first files do not name their format; GPTQModel has two names for it
        key = "format" if "checkpoint_format" not in config else "checkpoint_format"
        version = setting(config, key, ("gptq", "gptq_v2"), "gptq")
        self._offset = 1 if version == "gptq" else 0
        if config.get("dynamic"):
            raise ModelError(
                "its quantization_config has settings of its own for some layers ('dynamic'), which are not read"
            )

    def read(self, layer: Layer) -> QuantisedWeight:
        """See :class:`foretoken.models.quantised.formats.Format`."""
        count = groups(layer, self._group)
        per_word = 32 // self._bits
        if layer.inputs % per_word or layer.outputs % per_word:
            raise ModelError(f"the quantised layer '{layer.name}' is no whole number of 32-bit words")
        words = layer.part("qweight", (layer.inputs // per_word, layer.outputs), _INT32)
        zeros = layer.part("qzeros", (count, layer.outputs // per_word), _INT32)
        scales = layer.part("scales", (count, layer.outputs), SCALES)
        of_column = layer.optional("g_idx", (layer.inputs,), _INT32)
        if of_column is None and self._ordered:
            layer.part("g_idx", (layer.inputs,), _INT32)  # with desc_act the order cannot be guessed
        layer.refuse_the_rest("bias")
        order = None if of_column is None else by_group(of_column, count, f"{layer.name}.g_idx")
        codes_KO = unpacked(words, self._bits, dim=0)
        codes_OK = (codes_KO if order is None else codes_KO[order]).T.contiguous()
        zeros_OG = unpacked(zeros, self._bits, dim=1).short().T + self._offset
        name = f"{layer.name}.qweight"
        return with_zeros(codes_OK, zeros_OG, scales.T, self._bits, order_K=order, name=name)
