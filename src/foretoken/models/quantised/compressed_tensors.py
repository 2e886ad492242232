"""Checkpoints of compressed-tensors (llm-compressor): whole-number weights of 4 or 8 bits.

    pack-quantized                    weight_packed      int32 [O, K bits / 32], codes plus 2**(bits - 1)
                                      weight_shape       [2]
                                      weight_zero_point  int32 [O bits / 32, G], packed along the outputs
    naive-quantized, int-quantized    weight             int8 [O, K]
                                      weight_zero_point  int8 [O, G]
    both                              weight_scale       floating [O, G]; [O, 1] a channel, [1] for the whole tensor
                                      weight_g_idx       int32 [K], the group of every input ("actorder")

    W[o, k] = weight_scale[o, g] (weight[o, k] - weight_zero_point[o, g])

Activations may be left alone, or rounded row by row to 8 bits, which products here do in any case. What has static
scales, floating codes or a sparsity is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.models.quantised.formats import SCALES, Layer, groups, setting
from foretoken.models.quantised.packing import by_group, unpacked, with_zeros
from foretoken.models.quantised.weight import QuantisedWeight

_PACKED, _PLAIN = ("pack-quantized",), ("naive-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the layers that it is for are quantised.

    Attributes:
        targets: classes of modules, their names, or regular expressions (re:…).
        packed: whether codes lie in 32-bit words.
        group: inputs that share a scale; None: a whole row.
        whole: whether one scale is for all rows.
    """

    targets: tuple[str, ...]
    packed: bool
    bits: int
    symmetric: bool
    group: int | None
    whole: bool


class CompressedTensors:
    """The format of one checkpoint; see :class:`foretoken.models.quantised.formats.Format`.

    Args:
        config: the checkpoint's ``quantization_config``.
    Raises:
        ModelError: a setting that is not read.
    """

    mark = "weight_scale"

    def __init__(self, config: Mapping[str, Any]) -> None:
        setting(config, "quantization_status", ("compressed",), "compressed")
        setting(config, "kv_cache_scheme", (None,))
        setting(config.get("sparsity_config") or {}, "format", ("dense",), "dense")
        if config.get("transform_config"):
            raise ModelError(
                "its quantization_config transforms activations ('transform_config'), which is not computed"
            )
        found = config.get("config_groups")
        if not isinstance(found, dict) or not found:
            raise ModelError("its quantization_config has no 'config_groups'")
        self._schemes = [_scheme(each, config.get("format")) for each in found.values()]

    def read(self, layer: Layer) -> QuantisedWeight:
        """See :class:`foretoken.models.quantised.formats.Format`."""
        scheme = self._scheme_of(layer.name)
        bits, count = scheme.bits, groups(layer, scheme.group)
        codes_OK, name = _packed_codes(layer, bits) if scheme.packed else _plain_codes(layer, bits)
        stored = layer.parts.get("weight_scale")
        if stored is not None and stored.ndim < 2 and scheme.whole:
            scales = layer.part("weight_scale", tuple(stored.shape), SCALES).reshape(-1)[:1].expand(layer.outputs, 1)
        else:
            scales = layer.part("weight_scale", (1 if scheme.whole else layer.outputs, count), SCALES)
            scales = scales.expand(layer.outputs, count)
        zeros = None if scheme.symmetric else _zeros(layer, scheme, count)
        of_column = layer.optional("weight_g_idx", (layer.inputs,), (torch.int32, torch.int64))
        order = None
        if of_column is not None and int(of_column.min()) >= 0:  # -1: in order after all
            order = by_group(of_column, count, f"{layer.name}.weight_g_idx")
        # a symmetric layer may have zero points that are all in the middle
        layer.refuse_the_rest("bias", *(["weight_zero_point"] if scheme.symmetric else []))
        if order is not None:
            codes_OK = codes_OK[:, order]
        return with_zeros(codes_OK, zeros, scales, bits, order_K=order, name=name)

    def _scheme_of(self, name: str) -> _Scheme:
        for exact in (True, False):  # a name goes before a class
            for scheme in self._schemes:
                if any(_is_meant(name, target) if exact else target == "Linear" for target in scheme.targets):
                    return scheme
        raise ModelError(f"the layer '{name}' is quantised, but its quantization_config does not say how")


def _is_meant(name: str, target: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name


def _scheme(found: Mapping[str, Any], default: str | None) -> _Scheme:
    layout = setting({"format": found.get("format") or default}, "format", (*_PACKED, *_PLAIN))
    weights = found.get("weights") or {}
    setting(weights, "type", ("int",), "int")
    setting(weights, "dynamic", (False,), False)
    strategy = setting(weights, "strategy", _STRATEGIES)
    setting(found, "output_activations", (None,))
    activations = found.get("input_activations")
    if activations is not None:
        wanted = {"dynamic": True, "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True}
        given = {"type": "int", "symmetric": True, **activations}
        for key, value in wanted.items():
            if given.get(key) != value:
                raise ModelError(
                    f"its quantization_config rounds activations with {key}={given.get(key)!r}: only {value!r} is "
                    "computed, 8 bits for each row as it comes"
                )
    return _Scheme(
        targets=tuple(found.get("targets") or ("Linear",)),
        packed=layout in _PACKED,
        bits=setting(weights, "num_bits", (4, 8)),
        symmetric=bool(weights.get("symmetric", True)),
        group=weights.get("group_size") if strategy == "group" else None,
        whole=strategy == "tensor",
    )


def _packed_codes(layer: Layer, bits: int) -> tuple[Tensor, str]:
    per_word = 32 // bits
    words = layer.part("weight_packed", (layer.outputs, -(-layer.inputs // per_word)), (torch.int32,))
    shape = layer.optional("weight_shape", (2,), (torch.int32, torch.int64))
    if shape is not None and shape.tolist() != [layer.outputs, layer.inputs]:
        raise ModelError(
            f"the tensor '{layer.name}.weight_shape' says {shape.tolist()} for {[layer.outputs, layer.inputs]}"
        )
    return unpacked(words, bits, dim=1)[:, : layer.inputs], f"{layer.name}.weight_packed"


def _plain_codes(layer: Layer, bits: int) -> tuple[Tensor, str]:
    """As uint8, counted from the smallest code."""
    codes, name = layer.part("weight", (layer.outputs, layer.inputs), (torch.int8,)), f"{layer.name}.weight"
    least = -(2 ** (bits - 1))
    low, high = torch.aminmax(codes)
    if int(low) < least or int(high) >= -least:
        raise ModelError(f"the tensor '{name}' has codes from {int(low)} to {int(high)}, which are none of {bits} bits")
    return (codes.short() - least).to(torch.uint8), name


def _zeros(layer: Layer, scheme: _Scheme, count: int) -> Tensor:
    """Counted like the codes, int16 [O, G]."""
    bits, rows = scheme.bits, 1 if scheme.whole else layer.outputs
    middle = 2 ** (bits - 1)
    per_word = 32 // bits
    if scheme.packed and not scheme.whole:
        words = layer.part("weight_zero_point", (-(-rows // per_word), count), (torch.int32,))
        return unpacked(words, bits, dim=0)[:rows].short()
    stored = layer.parts.get("weight_zero_point")
    shape = tuple(stored.shape) if stored is not None and stored.ndim < 2 and scheme.whole else (rows, count)
    zeros = layer.part("weight_zero_point", shape, (torch.int8,))
    if int(zeros.min()) < -middle or int(zeros.max()) >= middle:
        raise ModelError(f"the tensor '{layer.name}.weight_zero_point' has zero points that are none of {bits} bits")
    return (zeros.short() + middle).reshape(-1, count if zeros.ndim == 2 else 1).expand(layer.outputs, count)
