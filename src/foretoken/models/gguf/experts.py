"""Routed experts of a GGUF file: one tensor holds a projection of all experts of a layer, one expert after the other.

    ffn_gate_exps [E, F, D], ffn_up_exps [E, F, D]  ─►  gate_up_proj [E, 2 F, D]
    ffn_down_exps [E, D, F]                         ─►  down_proj    [E, D, F]

Blocks stay blocks: gate and up may be of two kinds, and are then kept in one that can be each of them exactly.

GPT-OSS has biases, too, and takes ``glu(gate) * up`` of clamped values; its unquantised parameters lie transposed, rows
of gate and up in turn.

Letters: E experts, F channels of one, D width.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_experts import ClampedGate, QuantisedExperts, in_turn
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.gguf.blocks import PLAIN, dense, quantised
from foretoken.models.gguf.container import Entry, GGUFFile
from foretoken.native.quantised import can_join, joined

_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(?:weight|bias)")


def is_stacked(name: str) -> bool:
    """Whether a tensor holds a projection of several experts."""
    return _STACKED.fullmatch(name) is not None


def stacked_experts(
    file: GGUFFile, module: str, num_layers: int, activation: str | None
) -> Iterator[tuple[str, Tensor | QuantisedExperts]]:
    """The experts of every layer that has some.

    Args:
        module: of a layer, that holds them.
        num_layers: of the model; a file may have one that predicts the token after the next.
        activation: of the gate, by the library's name; None: the experts are GPT-OSS's.
    Yields:
        A module's name and its experts in blocks, or a parameter's name and its value.
    Raises:
        ModelError: a layer lacks a projection, or they do not fit each other.
    """
    layers = sorted({int(found[1]) for name in file.entries if (found := _STACKED.fullmatch(name))})
    for layer in (each for each in layers if each < num_layers):
        gate, up, down = (_entry(file, f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        if gate.shape != up.shape or down.shape != (gate.shape[0], gate.shape[2], gate.shape[1]):
            raise ModelError(
                f"model '{file.path}': the experts of layer {layer} have the shapes {list(gate.shape)}, "
                f"{list(up.shape)} and {list(down.shape)}, which do not fit each other"
            )
        place = f"model.layers.{layer}.{module}"
        biases = None
        if activation is None:
            gate_EF, up_EF, down_ED = (
                dense(file, _entry(file, f"blk.{layer}.ffn_{part}_exps.bias", 2)) for part in ("gate", "up", "down")
            )
            biases = torch.cat([gate_EF, up_EF], dim=1), down_ED
        if activation is None and all(entry.kind in PLAIN for entry in (gate, up, down)):
            gate_up_ED2F, down_EFD = in_turn(torch.cat([dense(file, gate), dense(file, up)], dim=1), dense(file, down))
            yield f"{place}.gate_up_proj", gate_up_ED2F
            yield f"{place}.gate_up_proj_bias", torch.stack([gate_EF, up_EF], dim=-1).flatten(1)
            yield f"{place}.down_proj", down_EFD
            yield f"{place}.down_proj_bias", down_ED
            continue
        if all(entry.kind in PLAIN for entry in (gate, up, down)):
            yield f"{place}.gate_up_proj", torch.cat([dense(file, gate), dense(file, up)], dim=1)
            yield f"{place}.down_proj", dense(file, down)
            continue
        gates, ups, downs = (_by_expert(file, entry) for entry in (gate, up, down))
        if not can_join([gates[0], ups[0]]):
            raise ModelError(
                f"model '{file.path}': '{gate.name}' and '{up.name}' are of kinds that no common one can hold exactly: "
                "quantise them alike"
            )
        gate_ups = (joined([one, other]) for one, other in zip(gates, ups, strict=True))
        combine = ClampedGate() if activation is None else ACT2FN[activation]
        yield place, QuantisedExperts(list(zip(gate_ups, downs, strict=True)), combine, biases).eval()


def _entry(file: GGUFFile, name: str, dimensions: int = 3) -> Entry:
    entry = file.entries.get(name)
    if entry is None:
        raise ModelError(f"model '{file.path}': weights are missing from the checkpoint ('{name}')")
    if len(entry.shape) != dimensions:
        raise ModelError(
            f"model '{file.path}': its tensor '{name}' has the shape {list(entry.shape)}: {dimensions} sizes are needed"
        )
    return entry


def _by_expert(file: GGUFFile, entry: Entry) -> list[QuantisedWeight]:
    """One weight for each expert, all in one tensor's memory."""
    experts, outputs, inputs = entry.shape
    stack = quantised(file, replace(entry, shape=(experts * outputs, inputs)))
    return stack.split([outputs] * experts)
