"""A Hugging Face folder whose linear layers are quantised, as a model of transformers.

No package of the quantisers is needed: config and tensors say everything. What is not read is refused, by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from foretoken.core.errors import ModelError
from foretoken.models.quantised.assemble import fill, skeleton
from foretoken.models.quantised.awq import AWQ
from foretoken.models.quantised.compressed_tensors import CompressedTensors
from foretoken.models.quantised.formats import Format, Layer
from foretoken.models.quantised.gptq import GPTQ
from foretoken.models.quantised.weight import QuantisedWeight

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
}
_SETTINGS = ("quantization_config", "compression_config")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def settings_of(config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a config of transformers; None: nothing is quantised."""
    found = next((each for key in _SETTINGS if (each := getattr(config, key, None)) is not None), None)
    if found is None or isinstance(found, dict):
        return found
    return dict(found.to_dict())


def format_of(settings: Mapping[str, Any], name: str) -> Format:
    """What reads the layers of a checkpoint.

    Raises:
        ModelError: a method or a setting that is not read; the message says which are.
    """
    method = settings.get("quant_method")
    reader = FORMATS.get(str(method))
    if reader is None:
        raise ModelError(
            f"model '{name}' is quantised with '{method}', which is not read: {', '.join(FORMATS)} with 4 or 8 bits "
            "are, and GGUF files; or take a checkpoint that is not quantised, and --dtype int8 or int4"
        )
    try:
        return reader(settings)
    except ModelError as error:
        raise ModelError(f"model '{name}' ({method}): {error}") from None


def weights(
    auto: Any, source: str, config: Any, settings: Mapping[str, Any], dtype: torch.dtype, name: str, **options: Any
) -> Any:
    """The model, its quantised layers as they are and everything else in one dtype.

    Args:
        auto: the door to the model, ``AutoModelForCausalLM`` or a sister.
        source: a folder or a hub id.
        settings: of :func:`settings_of`.
        options: of ``from_config``.
    Raises:
        ModelError: weights are missing, damaged, do not fit the config, or are of a kind that is not read.
    """
    layout = format_of(settings, name)
    try:
        tensors = _Tensors(source, name)
        config = copy.deepcopy(config)
        for key in _SETTINGS:  # of the files; the model is complete without
            vars(config).pop(key, None)
        model = skeleton(auto, config, dtype, **options)
        return fill(model, _read(model, tensors, layout), name)
    except SafetensorError as error:
        raise ModelError(
            f"model '{name}': its weights cannot be read ({error}); the checkpoint may be incomplete: fetch it again"
        ) from error
    except ModelError as error:
        told = str(error)
        raise ModelError(told if told.startswith("model ") else f"model '{name}': {told}") from None


def _read(model: Any, tensors: _Tensors, layout: Format) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for module, keys in tensors.by_module.items():
        if layout.mark not in keys:
            yield from ((f"{module}.{key}".lstrip("."), tensors.get(f"{module}.{key}".lstrip("."))) for key in keys)
            continue
        linear = linears.get(module)
        if linear is None:
            raise ModelError(
                f"its quantised tensor '{module}.{layout.mark}' has no linear layer of its own in a "
                f"{type(model).__name__} (experts are held in one tensor there), which is not read"
            )
        parts = {key: tensors.get(f"{module}.{key}") for key in keys}
        layer = Layer(module, parts, linear.out_features, linear.in_features)
        yield f"{module}.weight", layout.read(layer)
        if "bias" in parts and linear.bias is not None:
            yield f"{module}.bias", parts["bias"]


class _Tensors:
    """The tensors of a checkpoint by name, each read when it is asked for.

    Attributes:
        by_module: the last names of the tensors, by what stands before.
    """

    def __init__(self, source: str, name: str) -> None:
        single = _file(source, _SINGLE)
        if single is not None:
            paths = [single]
        elif (index := _file(source, _INDEX)) is not None:
            try:
                placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise ModelError(f"model '{name}': its {_INDEX} cannot be read ({error})") from error
            paths = [_file(source, each) or Path(source, each) for each in sorted(set(placed))]
        else:
            raise ModelError(f"model '{name}' has no {_SINGLE}: quantised weights are read from safetensors only")
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise ModelError(f"model '{name}': its file {missing.name} is missing; fetch the checkpoint again")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._place = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118 (no mapping)
        self.by_module: dict[str, list[str]] = {}
        for key in self._place:
            module, _, last = key.rpartition(".")
            self.by_module.setdefault(module, []).append(last)

    def get(self, name: str) -> Tensor:
        return self._place[name].get_tensor(name)


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
