"""AWQ checkpoints of 4 bits, version "gemm" (AutoAWQ).

qweight   int32 [K, O / 8]    eight columns in a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits
qzeros    int32 [G, O / 8]    likewise
scales    floating [G, O]

W[o, k] = scales[g, o] (qweight[k, o] - qzeros[g, o])        g = k // group_size
"""

from collections.abc import Mapping
from typing import Any

import torch

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.quantised.formats import SCALES, Layer, group_size, groups, setting
from foretoken.models.quantised.packing import unpacked, with_zeros

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of columns 0 to 7 within a word


class AWQ:
    """The format of one checkpoint; see :class:`foretoken.models.quantised.formats.Format`.

    Args:
        config: the checkpoint's ``quantization_config``.
    Raises:
        ModelError: a setting that is not read.
    """

    mark = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._group = group_size(config, 128)
        setting(config, "bits", (4,))
        version = config.get("version", "gemm")
        setting({"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",))
        setting(config, "zero_point", (True,), True)

    def read(self, layer: Layer) -> QuantisedWeight:
        """See :class:`foretoken.models.quantised.formats.Format`."""
        count = groups(layer, self._group)
        if layer.outputs % _PER_WORD:
            raise ModelError(f"the quantised layer '{layer.name}' is no whole number of 32-bit words")
        words = layer.part("qweight", (layer.inputs, layer.outputs // _PER_WORD), (torch.int32,))
        zeros = layer.part("qzeros", (count, layer.outputs // _PER_WORD), (torch.int32,))
        scales = layer.part("scales", (count, layer.outputs), SCALES)
        layer.refuse_the_rest("bias")
        codes_OK = unpacked(words.T.contiguous(), 4, dim=0, order=_PLACES)
        zeros_OG = unpacked(zeros.T.contiguous(), 4, dim=0, order=_PLACES)
        return with_zeros(codes_OK, zeros_OG, scales.T, 4, order_K=None, name=f"{layer.name}.qweight")
