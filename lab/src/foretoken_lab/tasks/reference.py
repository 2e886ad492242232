"""The reference that rounding is measured against: a model as its weights define it, in the library's own forward.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight
from foretoken.models.checkpoint_files import auto_class
from foretoken.models.load import DTYPES, load_network, place_of

_WORKSPACE = 3  # tensors [T, V] in float32 that the forward holds at most


class Reference:
    """A model as its weights define it: the library's forward in a floating dtype, quantised weights dequantised."""

    def __init__(self, network: Any) -> None:
        self._network = network

    @classmethod
    def load(cls, name: str, dtype: str, *, device: str = "cpu", **files: Any) -> Reference:
        """Read a checkpoint of any kind that the engine reads.

        Args:
            name: as ``--model``.
            dtype: float32, bfloat16 or float16.
            device: as of ``load``.
            files: ``revision`` and ``trust_remote_code`` of ``load_network``.
        Raises:
            ConfigError, ModelError: as ``load``.
        """
        network = dequantised(load_network(name, dtype=dtype, **files))
        return cls(network.to(DTYPES[dtype]).to(place_of(device)))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of a window, [T, V] on the CPU."""
        ids_1T = torch.tensor([list(ids)], device=next(self._network.parameters()).device)
        logits_TV: Tensor = self._network(ids_1T, use_cache=False).logits[0]
        return logits_TV.cpu()


def dequantised(network: Any) -> Any:
    """The same model, its quantised layers replaced by plain ones with the weights that the codes stand for."""
    for path, module in list(network.named_modules()):
        if isinstance(module, QuantisedExperts):
            module.pack(_dense)
        elif isinstance(module, QuantisedLinear):
            network.set_submodule(path, _dense(module.quantised, module.bias))
    return network


def _dense(weight: QuantisedWeight, bias: Tensor | None = None) -> nn.Linear:
    outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=bias is not None)
    linear.weight = nn.Parameter(weight.dense(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.float(), requires_grad=False)
    return linear


def bytes_of_reference(config: Any, dtype: str, window: int, *, trust_remote_code: bool = False) -> int:
    """What a reference takes in memory, estimated from its configuration.

    Args:
        config: of transformers.
        dtype: of the reference.
        window: tokens that it reads together.
    """
    with torch.device("meta"):
        network = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    weights = sum(each.numel() for each in network.parameters()) * DTYPES[dtype].itemsize
    return weights + _WORKSPACE * 4 * window * int(config.get_text_config(decoder=True).vocab_size)


def check_memory(reference: str, needed: int) -> None:
    """Refuse a reference that does not fit.

    Args:
        reference: as typed, for the message.
        needed: bytes, of :func:`bytes_of_reference`.
    Raises:
        ConfigError: less is free.
    """
    free = _free_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"--against {reference}: the reference takes about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB "
            "are free: end other programs, or measure a smaller model"
        )


def check_disk(num_tokens: int, vocab_size: int) -> None:
    """Refuse logits [T, V] that do not fit in the folder of temporary files.

    Raises:
        ConfigError: less is free.
    """
    needed, folder = 4 * num_tokens * vocab_size, tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"the logits of {num_tokens:,} tokens take {needed / 1e9:.1f} GB in {folder} and {free / 1e9:.1f} GB are "
            "free: give fewer --text-tokens, or set TMPDIR to another folder"
        )


def _free_memory() -> int | None:
    """Bytes that can be used without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
