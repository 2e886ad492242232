"""Loading a checkpoint: one function, every way it can fail said clearly.

A name is a bundled model (``zoo:base``), a local folder, or a hub id. What ``transformers`` would only warn about
(weights that are missing and hence random) is an error here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
)

from foretoken import zoo
from foretoken.core.errors import ConfigError, ModelError, UnsupportedArchitecture, nearest
from foretoken.models import attention
from foretoken.models.fingerprint import fingerprint, folder_of
from foretoken.models.language_model import LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name: str | Path, *, dtype: str = "auto", device: str = "auto", max_length: int | None = None
) -> LanguageModel:
    """Load a causal language model and its tokenizer for inference.

    Args:
        name: ``zoo:NAME``, a local folder, or a hub id.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (cuda if there is one), "cpu", "cuda" or "cuda:N".
        max_length: longest sequence to serve; None takes the model's own limit.
    Raises:
        ConfigError: unknown dtype or device, or a length beyond the model's.
        ModelError: the folder is missing, incomplete or damaged, or the model cannot run here.
        UnsupportedArchitecture: attention does not go through the library's attention interface.
    """
    place = place_of(device)
    source = source_of(name)
    config = _config(source, name)
    _check_purpose(config, name)
    kind = _dtype(dtype, config)
    model = _weights(source, name, config, kind, attn_implementation=attention.NAME)
    tokenizer = _tokenizer(source, name)
    return LanguageModel(model.to(place).eval(), tokenizer, name=str(name), max_length=max_length)


@dataclass(frozen=True)
class Checkpoint:
    """A model as the library computes it, for learning from.

    Attributes:
        name: what the user called it.
        source: the folder or hub id that it was loaded from.
        model: of transformers, in eval mode.
        tokenizer: its own.
    """

    name: str
    source: str
    model: Any
    tokenizer: Any

    @cached_property
    def folder(self) -> Path:
        """Where its files are; for a hub id, in the hub's cache."""
        return folder_of(self.source)

    @cached_property
    def fingerprint(self) -> str:
        """What tells it from other checkpoints."""
        return fingerprint(self.folder)


def load_as_is(name: str | Path, *, device: str = "auto") -> Checkpoint:
    """A model as the library computes it, any architecture of it, in the checkpoint's dtype, and its tokenizer.

    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    place = place_of(device)
    model = load_network(name).to(place)
    return Checkpoint(str(name), source_of(name), model, load_tokenizer(name))


def load_network(name: str | Path, *, dtype: str = "auto") -> Any:
    """The model of transformers alone, causal or masked, in eval mode on the CPU.

    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    source = source_of(name)
    config = _config(source, name)
    return _weights(source, name, config, _dtype(dtype, config), kind=auto_class(config)).eval()


def load_tokenizer(name: str | Path) -> Any:
    """A checkpoint's tokenizer, or one that lies in a folder of its own.

    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    folder = Path(name).expanduser()
    return _tokenizer(str(folder) if folder.is_dir() else source_of(name), name)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes the model of a configuration: causal where there is one, else masked."""
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMaskedLM if masked and not causal else AutoModelForCausalLM


def load_config(name: str | Path) -> Any:
    """A checkpoint's configuration, without its weights.

    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    return _config(source_of(name), name)


def place_of(device: str) -> torch.device:
    """The device of this name; see :func:`load`."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device='{device}' is not a device: use auto, cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device='{device}' is not supported: use auto, cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device='{device}': torch sees {torch.cuda.device_count()} CUDA devices; use device='cpu'")
    return place


def _dtype(dtype: str, config: Any) -> torch.dtype:
    if dtype == "auto":
        found = getattr(config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}': {nearest(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def source_of(name: str | Path) -> str:
    """The path or hub id that transformers is given."""
    text = str(name)
    if text.startswith("zoo:"):
        return str(zoo.path(text.removeprefix("zoo:")))
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model '{text}' is a folder without config.json: point to a saved Hugging Face checkpoint"
            )
        return str(folder)
    if folder.exists():
        raise ModelError(f"model '{text}' is a file: point to the folder of a saved Hugging Face checkpoint")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(f"model '{text}' does not exist")
    return text


def _config(source: str, name: str | Path) -> Any:
    try:
        with _quiet():
            return AutoConfig.from_pretrained(source)
    except Exception as error:
        # a damaged config fails wherever the library first stumbles over it; the remedy is the same
        raise ModelError(f"model '{name}': its config cannot be read: {_reason(error)}") from error


def _check_purpose(config: Any, name: str | Path) -> None:
    """Refuse what is no causal language model before any weight is read."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(
            f"model '{name}' ({kind}) is an encoder-decoder: only causal models are supported"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise UnsupportedArchitecture(f"model '{name}' ({kind}) is not a causal language model of transformers")
    built = list(getattr(config, "architectures", None) or ())
    if built and all(each.endswith(("Classification", "QuestionAnswering", "MaskedLM")) for each in built):
        raise UnsupportedArchitecture(f"model '{name}' ({built[0]}) was not made to generate: it has no language head")


def _weights(
    source: str, name: str | Path, config: Any, dtype: torch.dtype, *, kind: Any = AutoModelForCausalLM, **options: Any
) -> Any:
    try:
        with _quiet():
            model, report = kind.from_pretrained(
                source,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):  # not in the family's own table
            raise UnsupportedArchitecture(
                f"model '{name}' ({config.model_type}) is not supported: "
                "its attention does not go through the library's attention interface"
            ) from error
        # sizes from a config that does not fit fail anywhere in hundreds of families; the remedy is the same
        raise ModelError(
            f"model '{name}': its weights cannot be loaded ({_reason(error)}); "
            "the checkpoint may be incomplete or damaged: fetch or save it again"
        ) from error
    odd = sorted(report["mismatched_keys"], key=str)
    if odd:
        key, found, expected = odd[0]
        raise ModelError(
            f"model '{name}': weights do not fit its config ('{key}', {len(odd)} in all: "
            f"{list(found)} in the checkpoint, {list(expected)} in the model)"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model '{name}': weights are missing from the checkpoint ('{missing[0]}', {len(missing)} in all); "
            "it would answer at random"
        )
    return model


def _tokenizer(source: str, name: str | Path) -> Any:
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        # tokenizers raises bare Exception for damaged files; whatever it is, the remedy is the same
        raise ModelError(f"model '{name}': its tokenizer cannot be loaded: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What the library says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars and advice off the terminal while loading; errors still raise."""
    log = logging.getLogger("transformers")
    level = log.level
    bars = transformers.utils.logging.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
