"""A Hugging Face folder with quantised linear layers, as a model of transformers.

No package of the quantisers is needed: config and tensors are sufficient. Unsupported tensors are refused, by name.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.quantised.assemble import fill, skeleton
from foretoken.models.quantised.awq import AWQ
from foretoken.models.quantised.compressed_tensors import CompressedTensors
from foretoken.models.quantised.formats import Format, Layer
from foretoken.models.quantised.gptq import GPTQ
from foretoken.native.mapped import leave

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
}
_SETTINGS = ("quantization_config", "compression_config")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BESIDE = "quantize_config.json"  # of AutoGPTQ and GPTQModel
_OLD_BUFFER = r"rotary_emb\.inv_freq"  # of every layer, in files of older versions of the library


def settings_of(config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a config of transformers; None: nothing is quantised."""
    found = next((each for key in _SETTINGS if (each := getattr(config, key, None)) is not None), None)
    if found is None or isinstance(found, dict):
        return found
    return dict(found.to_dict())


def add_settings(config: Any, source: str, name: str) -> None:
    """Read the quantisation settings in a file next to the config, if the config has none.

    Raises:
        ModelError: that file is damaged.
    """
    path = Path(source, _BESIDE)
    if settings_of(config) is not None or not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"model '{name}': its {_BESIDE} cannot be read: {error}") from None
    config.quantization_config = {"quant_method": "gptq", **found}


def format_of(settings: Mapping[str, Any], name: str) -> Format:
    """The reader for the layers of a checkpoint.

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
        tensors = _Tensors(source, name, settings)
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
        message = str(error)
        raise ModelError(message if message.startswith("model ") else f"model '{name}': {message}") from None


def _read(model: Any, tensors: "_Tensors", layout: Format) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    passing = re.compile("|".join([_OLD_BUFFER, *(model._keys_to_ignore_on_load_unexpected or ())]))
    for module, keys in tensors.by_module.items():
        if layout.mark not in keys:
            names = [f"{module}.{key}".lstrip(".") for key in keys]
            for each in names:
                if passing.search(each) is None:
                    value = tensors.get(each)
                    yield each, value
                    leave(value)
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
        # some programs store a bias of zeros for every layer; another one has no place in the model
        bias = parts.get("bias")
        if bias is not None and (f"{module}.bias" in own or bool(bias.any())):
            yield f"{module}.bias", bias
        for part in parts.values():
            leave(part)


class _Tensors:
    """The tensors of a checkpoint by name, each read on access.

    Attributes:
        by_module: the last parts of the tensors' names, by the parts before.
    """

    def __init__(self, source: str, name: str, settings: Mapping[str, Any]) -> None:
        # AutoGPTQ gives its files a name of their own
        own = f"gptq_model-{settings.get('bits')}bit-{settings.get('group_size')}g.safetensors"
        single = _file(source, _SINGLE)
        if single is not None:
            paths = [single]
        elif (index := _file(source, _INDEX)) is not None:
            try:
                placed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                if any(not isinstance(each, str) or Path(each).name != each for each in placed):
                    raise ValueError("its 'weight_map' names something else than files next to it")
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ModelError(f"model '{name}': its {_INDEX} cannot be read ({error})") from error
            paths = [_file(source, each) or Path(source, each) for each in placed]
        elif (found := _file(source, own)) is not None:
            paths = [found]
        else:
            raise ModelError(f"model '{name}' has no {_SINGLE}: quantised weights are read from safetensors only")
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise ModelError(f"model '{name}': its file {missing.name} is missing; fetch the checkpoint again")
        self._files = [_opened(path, name) for path in paths]
        self._place: dict[str, Any] = {}
        for file in self._files:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                if key in self._place:
                    raise ModelError(f"model '{name}': its tensor '{key}' is in two of its files")
                self._place[key] = file
        self.by_module: dict[str, list[str]] = {}
        for key in self._place:
            module, _, last = key.rpartition(".")
            self.by_module.setdefault(module, []).append(last)

    def get(self, name: str) -> Tensor:
        return self._place[name].get_tensor(name)


def _opened(path: Path, name: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"model '{name}': its {path.name} cannot be read ({error}); the checkpoint may be incomplete: fetch it "
            "again"
        ) from error


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
