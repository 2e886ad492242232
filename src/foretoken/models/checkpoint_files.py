"""The files of a checkpoint: config, tokenizer and weights, of a folder, a hub id or a GGUF file, whole or refused.

Missing weights, which the library would fill at random with only a warning, are an error here.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from foretoken.core.errors import ConfigError, ModelError, UnsupportedArchitecture
from foretoken.core.stand_ins import with_all_kernels
from foretoken.forward import attention
from foretoken.models import lora
from foretoken.models.gguf.checkpoint import GGUFCheckpoint
from foretoken.models.gguf.magic import is_gguf
from foretoken.models.quantised import folder as quantised_folder

_NO_FOLDER = "no adapters"  # where the library finds none: they are merged here, so that no two ways apply them
_PATIENCE = 10.0  # seconds to wait for the hub's answer whether it has a model
_OF_CODES = ("weight_scale", "weight_scale_inv", "weight_zero_point", "SCB")  # tensors next to quantised weights
_NOT_READ = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "original/*")  # of a hub id's files


def auto_class(config: Any) -> Any:
    """The library's door to the model of a configuration: causal, else one that reads images next to text, or
    masked.
    """
    for mapping, kind in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
        (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    ):
        if type(config) in mapping:
            return kind
    return AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Where a checkpoint's parts are read from.

    Attributes:
        name: the user's name for it, for messages.
        source: the folder or hub id of config and weights.
        config: as transformers reads it.
        correction: an adapter to merge into the weights; None: there is none.
        trusted: whether the checkpoint's own code may run.
        gguf: the file that holds config and weights, if the source is a GGUF file.
    """

    name: str | Path
    source: str
    config: Any
    correction: lora.Correction | None
    trusted: bool
    gguf: GGUFCheckpoint | None = None

    @classmethod
    def of(cls, name: str | Path, source: str, trusted: bool, revision: str | None = None) -> "CheckpointFiles":
        """Find them, and read the config.

        Args:
            name: the user's name for it.
            source: the folder, file or hub id that it stands for.
            trusted: whether the checkpoint's own code may run.
            revision: of a hub id.
        Raises:
            ConfigError: a revision is given for a source without revisions.
            ModelError: there is no such model, its config cannot be read, or its kind of quantisation is not known.
        """
        if is_gguf(Path(source)):
            if revision is not None:
                raise ConfigError(f"revision={revision!r:.60} goes with a hub id, and '{name}' is a file: leave it out")
            file = GGUFCheckpoint(Path(source))
            return cls(name, source, file.config, None, trusted, file)
        check_there(source)
        if revision is not None:
            source = _snapshot(source, name, revision)
        correction = lora.correction_of(source, name)
        if correction is not None:
            source = correction.base
        with reported(f"model '{name}': its config cannot be read", name):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
        _check_generation_config(source, name)
        quantised_folder.add_settings(config, source, str(name))
        settings = quantised_folder.settings_of(config)
        if settings is not None:
            quantised_folder.format_of(settings, str(name))  # refused before anything is read
            if correction is not None:
                raise ModelError(
                    f"model '{name}' is a LoRA adapter of '{source}', which has quantised weights: it cannot be merged "
                    "into them; give a base model that is not"
                )
        return cls(name, source, config, correction, trusted)

    def tokenizer(self) -> Any:
        """The correction's own tokenizer where it brings one."""
        if self.gguf is not None:
            return self.gguf.tokenizer()
        own = None if self.correction is None else Path(self.correction.source)
        source = str(own) if own is not None and (own / "tokenizer_config.json").is_file() else self.source
        with reported(f"model '{self.name}': its tokenizer cannot be loaded", self.name):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=self.trusted)
            longest = tokenizer.model_max_length
            if isinstance(longest, bool) or not isinstance(longest, (int, float)):
                raise ValueError(f"model_max_length={longest!r:.60} in tokenizer_config.json is no number")
            return tokenizer

    def num_bytes(self, dtype: torch.dtype, bits: int | None = None) -> int:
        """Bytes that the weights take at least, once they are in memory; 0 where they are known only after loading.

        Args:
            dtype: of weights that are not quantised.
            bits: that matrices are rounded to; None: they are not.
        """
        if self.gguf is not None:
            return self.gguf.num_bytes(dtype)
        sizes = [path.stat().st_size for path in Path(self.source).glob("*.safetensors")]
        own = self.config.get_text_config(decoder=True).dtype
        if quantised_folder.settings_of(self.config) is not None or not isinstance(own, torch.dtype):
            return sum(sizes)
        return sum(sizes) * (8 * dtype.itemsize if bits is None else bits) // (8 * own.itemsize)

    def weights(self, dtype: torch.dtype, *, stored: bool = False, **options: Any) -> Any:
        """Load a model of transformers; every weight must be in the checkpoint.

        Args:
            stored: leave quantised matrices of a GGUF file there until they are used.
        """
        name, model_type = self.name, self.config.model_type
        if self.gguf is not None:
            return self.gguf.weights(auto_class(self.config), dtype, str(name), stored=stored, **options)
        settings = quantised_folder.settings_of(self.config)
        if settings is not None:
            return quantised_folder.weights(
                auto_class(self.config), self.source, self.config, settings, dtype, str(name), **options
            )
        attention.admit(model_type)
        try:
            with quiet():
                model, report = with_all_kernels(
                    lambda: auto_class(self.config).from_pretrained(
                        self.source,
                        dtype=dtype,
                        trust_remote_code=self.trusted,
                        output_loading_info=True,
                        ignore_mismatched_sizes=True,  # they are refused below, by name
                        adapter_kwargs={"subfolder": _NO_FOLDER},
                        **options,
                    )
                )
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (attention.NAME,):  # not in the family's own table
                raise UnsupportedArchitecture(
                    f"model '{name}' ({model_type}) is not supported: "
                    "its attention does not go through the library's attention interface"
                ) from error
            # sizes from a config that does not fit fail anywhere in hundreds of families; the remedy is the same
            raise ModelError(
                f"model '{name}': its weights cannot be loaded ({_reason(error)}); "
                "the checkpoint may be incomplete or damaged: fetch or save it again"
            ) from error
        _check_whole(report, name)
        return model if self.correction is None else lora.merge(model, self.correction, name)


def check_there(source: str) -> None:
    """Ask the hub once for an id that is not on this machine; the library would try again for a minute.

    Raises:
        ModelError: there is no such model, or no hub.
    """
    nowhere = f"model '{source}': its config cannot be read: it is neither a folder nor on this machine"
    try:
        if Path(source).is_dir() or isinstance(try_to_load_from_cache(source, "config.json"), str):
            return
    except (HFValidationError, ValueError):
        raise ModelError(f"{nowhere}, and is no hub id: check the name") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{nowhere}, and HF_HUB_OFFLINE forbids to fetch it: check the name")
    try:
        HfApi().model_info(source, timeout=_PATIENCE)
    except HfHubHTTPError as error:
        known = "the hub has no such model, or shows it to those with access only"
        why = known if isinstance(error, RepositoryNotFoundError) else _reason(error)
        raise ModelError(f"{nowhere}, and {why}: check the name, or HF_TOKEN") from None
    except Exception as error:  # of whichever library the hub's client talks through
        why = "is no hub id" if isinstance(error, HFValidationError) else "the hub cannot be reached"
        raise ModelError(f"{nowhere}, and {why}: check the name, or fetch it where there is a network") from None


def _check_generation_config(source: str, name: str | Path) -> None:
    """Refuse a file that cannot be read: the library takes it for none, and text then ends and looks otherwise."""
    with reported(f"model '{name}': its {GENERATION_CONFIG_NAME} cannot be read", name):
        path = cached_file(source, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
        if path is None:
            if os.path.lexists(os.path.join(source, GENERATION_CONFIG_NAME)):
                raise ValueError("it is no file, or leads to none")
            return
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is no JSON object")
        _check_settings(settings)


def _check_settings(settings: dict[str, Any]) -> None:
    """Name the setting that the library cannot take; loading would report a failure in the library's code instead."""
    try:
        GenerationConfig.from_dict(dict(settings))
    except Exception as error:  # a value of a wrong type fails anywhere in it
        for key, value in settings.items():
            try:
                GenerationConfig.from_dict({key: value})
            except Exception:
                raise ValueError(f"{key}={value!r:.60} is no value for it") from error
        raise


def _snapshot(source: str, name: str | Path, revision: str) -> str:
    """The folder with a hub id's files as they were at a revision."""
    if Path(source).is_dir():
        raise ConfigError(f"revision={revision!r:.60} goes with a hub id, and '{name}' is a folder: leave it out")
    with reported(f"model '{name}': revision {revision!r:.60} cannot be had", name):
        return str(snapshot_download(source, revision=revision, ignore_patterns=list(_NOT_READ)))


def _check_whole(report: Any, name: str | Path) -> None:
    scales = sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[2] in _OF_CODES)
    if scales:
        raise ModelError(
            f"model '{name}': its tensor '{scales[0]}' ({len(scales)} such in all) belongs to a quantised layer, and "
            "its config.json has no quantization_config: fetch the checkpoint again"
        )
    mismatched = sorted(report["mismatched_keys"], key=str)
    if mismatched:
        key, found, expected = mismatched[0]
        raise ModelError(
            f"model '{name}': weights do not fit its config ('{key}', {len(mismatched)} in all: "
            f"{list(found)} in the checkpoint, {list(expected)} in the model)"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model '{name}': weights are missing from the checkpoint ('{missing[0]}', {len(missing)} in all); "
            "it would answer at random"
        )


@contextmanager
def reported(problem: str, name: str | Path) -> Iterator[None]:
    """Turn whatever the library raises for a file that it cannot use into one line with the remedy."""
    try:
        with quiet():
            yield
    except Exception as error:
        # a damaged file fails wherever the library first stumbles over it; the remedy is the same
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise ModelError(
                f"model '{name}' brings Python code of its own, which is not run unasked: read it, then give "
                "trust_remote_code=True (--trust-remote-code on the command line)"
            ) from error
        raise ModelError(f"{problem}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The library's error message, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's progress bars and advice off the terminal while it loads or saves; errors still raise."""
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
