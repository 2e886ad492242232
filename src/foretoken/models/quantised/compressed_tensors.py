"""Checkpoints of compressed-tensors (llm-compressor): whole-number weights of 4 or 8 bits.

    pack-quantized                    weight_packed      int32 [O, K bits / 32], codes plus 2**(bits - 1)
                                      weight_shape       [2]
                                      weight_zero_point  int32 [O bits / 32, G], packed along the outputs
    naive-quantized, int-quantized    weight             int8 [O, K]
                                      weight_zero_point  int8 [O, G]
    both                              weight_scale       floating [O, G]; [O, 1] a channel, [1] for the whole tensor
                                      weight_g_idx       int32 [K], the group of every input ("actorder")

    W[o, k] = weight_scale[o, g] (weight[o, k] - weight_zero_point[o, g])

Activations may be left alone, or rounded row by row to 8 bits, which products here do in any case. Static scales,
floating codes and sparsity are refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.quantised.formats import SCALES, Layer, group_size, groups, section, setting
from foretoken.models.quantised.packing import by_group, unpacked, with_zeros

_PACKED, _PLAIN = ("pack-quantized",), ("naive-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")
_BY_GROUP = ("group", "dynamic", True)
_ORDERS = (None, False, "weight", "static", *_BY_GROUP)
_INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the layers that it is for are quantised.

    Attributes:
        targets: classes of modules, their names, or regular expressions (re:…).
        packed: whether codes lie in 32-bit words.
        group: inputs that share a scale; -1: a whole row.
        whole: whether one scale is for all rows.
        ordered: whether every layer says which group an input belongs to.
    """

    targets: tuple[str, ...]
    packed: bool
    bits: int
    symmetric: bool
    group: int
    whole: bool
    ordered: bool


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
        setting(section(config, "sparsity_config"), "format", ("dense",), "dense")
        if config.get("transform_config"):
            raise ModelError(
                "its quantization_config transforms activations ('transform_config'), which is not computed"
            )
        found = section(config, "config_groups")
        if not found:
            raise ModelError("its quantization_config has no 'config_groups'")
        self._schemes = [_scheme(section(found, each), config.get("format")) for each in found]

    def read(self, layer: Layer) -> QuantisedWeight:
        """See :class:`foretoken.models.quantised.formats.Format`."""
        scheme = self._scheme_of(layer.name)
        bits, count = scheme.bits, groups(layer, scheme.group)
        codes_OK, name = _packed_codes(layer, bits) if scheme.packed else _plain_codes(layer, bits)
        scales = layer.part("weight_scale", _shape_of(layer, "weight_scale", scheme, count), SCALES)
        scales = scales.reshape(-1, count).expand(layer.outputs, count)
        zeros = None if scheme.symmetric else _zeros(layer, scheme, count)
        of_column = layer.optional("weight_g_idx", (layer.inputs,), _INDICES)
        if of_column is None and scheme.ordered:
            layer.part("weight_g_idx", (layer.inputs,), _INDICES)  # the order cannot be guessed
        order = None
        if of_column is not None and not bool((of_column == -1).all()):  # -1: in order after all
            order = by_group(of_column, count, f"{layer.name}.weight_g_idx")
        if scheme.symmetric:
            _check_middle(layer, bits)
        layer.refuse_the_rest("bias")
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
    weights = section(found, "weights")
    setting(weights, "type", ("int",), "int")
    setting(weights, "dynamic", (False,), False)
    strategy = setting(weights, "strategy", _STRATEGIES)
    setting(found, "output_activations", (None,))
    activations = section(found, "input_activations")
    if activations:
        wanted = {"dynamic": True, "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True}
        given = {"type": "int", "symmetric": True, **activations}
        for key, value in wanted.items():
            if given.get(key) != value:
                raise ModelError(
                    f"its quantization_config rounds activations with {key}={given.get(key)!r}: only {value!r} is "
                    "computed, 8 bits for each row as it comes"
                )
    return _Scheme(
        targets=_targets(found),
        packed=layout in _PACKED,
        bits=setting(weights, "num_bits", (4, 8)),
        symmetric=setting(weights, "symmetric", (True, False), True),
        group=group_size(weights) if strategy == "group" else -1,
        whole=strategy == "tensor",
        # by weight, the inputs stand as they did
        ordered=setting(weights, "actorder", _ORDERS) in _BY_GROUP,
    )


def _targets(found: Mapping[str, Any]) -> tuple[str, ...]:
    targets = found.get("targets")
    if targets is None:
        return ("Linear",)
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ModelError(f"its quantization_config says targets={targets!r:.60}, which is no list of texts")
    for each in targets:
        try:
            re.compile(each[3:] if each.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"its quantization_config has the target {each!r:.60}: {error}") from None
    return tuple(targets)


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
    zeros = layer.part("weight_zero_point", _shape_of(layer, "weight_zero_point", scheme, count), (torch.int8,))
    if int(zeros.min()) < -middle or int(zeros.max()) >= middle:
        raise ModelError(f"the tensor '{layer.name}.weight_zero_point' has zero points that are none of {bits} bits")
    return (zeros.short() + middle).reshape(-1, count).expand(layer.outputs, count)


def _shape_of(layer: Layer, key: str, scheme: _Scheme, count: int) -> tuple[int, ...]:
    """Of scales or zero points; one for the whole tensor may be stored as a number, in a list or in a matrix."""
    stored = layer.parts.get(key)
    if scheme.whole and stored is not None and tuple(stored.shape) in ((), (1,)):
        return tuple(stored.shape)
    return (1 if scheme.whole else layer.outputs), count


def _check_middle(layer: Layer, bits: int) -> None:
    """A symmetric layer may have zero points nevertheless, all of them in the middle."""
    zeros = layer.parts.get("weight_zero_point")
    if zeros is None:
        return
    layer.used.add("weight_zero_point")
    if zeros.dtype == torch.int32 and zeros.ndim == 2:
        zeros = unpacked(zeros, bits, dim=0)[: layer.outputs].short() - 2 ** (bits - 1)
    if bool((zeros != 0).any()):
        raise ModelError(
            f"the tensor '{layer.name}.weight_zero_point' is not zero, and its quantization_config says symmetric=True"
        )
