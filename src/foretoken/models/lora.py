"""LoRA folders: a checkpoint that is a correction of another one, merged into it when it is loaded.

Merged, the layers are plain again and every fast path is open; in bfloat16 the sum is rounded once more than with the
correction next to the layer. ``peft`` reads and merges; without it such a folder is refused, because the base
model alone generates other text.
"""

import importlib.util
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from foretoken.core.errors import ModelError

CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Correction:
    """A LoRA folder or hub id, and its base model.

    Attributes:
        source: the folder or hub id.
        base: the folder or hub id of the base model.
    """

    source: str
    base: str


def correction_of(source: str, name: str | Path) -> Correction | None:
    """The correction that a source is; None if it is a model by itself.

    Args:
        source: a folder or a hub id.
        name: the user's name for it, for messages.
    Raises:
        ModelError: its config cannot be read or names no base model, or ``peft`` is not installed.
    """
    try:
        place = find_adapter_config_file(source)
    except (OSError, ValueError):  # a hub that cannot be reached, or no valid id: loading the config says it better
        return None
    if place is None:
        return None
    try:
        base = json.loads(Path(place).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model '{name}': its {CONFIG} cannot be read ({type(error).__name__}: {error})") from error
    if (Path(source) / "config.json").is_file():  # the folder holds the base model, too
        base = source
    if not isinstance(base, str) or not base:
        raise ModelError(f"model '{name}': its {CONFIG} names no base model ('base_model_name_or_path': {base!r})")
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f"model '{name}' is a LoRA adapter of '{base}', and loading it needs peft: "
            "pip install 'foretoken[lora]', or give a folder with the merged weights"
        )
    return Correction(source, base)


def merge(model: Any, correction: Correction, name: str | Path) -> Any:
    """The base model with the correction added to its weights.

    Raises:
        ModelError: the correction does not fit the model, lacks weights, or is of a kind that cannot be merged.
    """
    import peft

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            adapted = peft.PeftModel.from_pretrained(model, correction.source)
            kind = adapted.active_peft_config
            if kind.is_prompt_learning:
                raise ValueError(f"a {kind.peft_type.value} adapter cannot be merged")
            _unshare(adapted)
            merged = adapted.merge_and_unload()
    except Exception as error:  # whatever peft, or the model inside of it, does not like about the files
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model '{name}': it cannot be merged into '{correction.base}': {reason}") from error
    missing = [str(each.message) for each in said if "missing adapter keys" in str(each.message)]
    if missing:
        raise ModelError(f"model '{name}': weights are missing from the adapter: {missing[0][:300]}")
    merged.config._name_or_path = correction.source
    return merged


def _unshare(adapted: Any) -> None:
    """Give every corrected layer weights of its own: the merge into a head tied to its embedding, or into a layer used
    twice, would also correct the other one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    places = Counter(id(weight) for _, weight in adapted.named_parameters(remove_duplicate=False))
    for module in adapted.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        for name, weight in list(base.named_parameters(recurse=False)):
            if places[id(weight)] > 1:
                setattr(base, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
