"""Load a checkpoint: one function, with a clear message for every failure.

A name is a bundled model (``zoo:base``), one that another distribution makes on demand (made.py), a
local folder, a GGUF file, or a hub id. Weights may be quantised (models/quantised/, models/gguf/). Reading the files is
checkpoint_files.py.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoTokenizer

from foretoken import zoo
from foretoken.core.errors import ConfigError, ModelError, UnsupportedArchitecture
from foretoken.core.files import check_name, home_expanded
from foretoken.core.pages import give_back_free_memory
from foretoken.core.phases import PHASES
from foretoken.core.threads import usable_cores
from foretoken.forward import attention
from foretoken.models import lora
from foretoken.models.checkpoint_files import CheckpointFiles, reported
from foretoken.models.fingerprint import fingerprint, folder_of, state_of_weights
from foretoken.models.gguf.magic import is_gguf
from foretoken.models.language_model import LanguageModel, Mispacked
from foretoken.models.linear_layers import use_linear_layers
from foretoken.models.made import folder_of_made
from foretoken.models.memory import check_fits
from foretoken.models.quantised import folder as quantised_folder
from foretoken.models.quantised.rounding import SCHEMES, round_weights
from foretoken.models.text_part import text_part
from foretoken.native import variants
from foretoken.native.kept_tiles import KeptTiles, kept_tiles
from foretoken.options.model import ModelOptions
from foretoken.options.option import named

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_LAYERS = 2_000


def use_threads(count: int | None) -> None:
    """Let torch compute on so many CPU threads, in the whole process, as far as there are cores; None: its choice."""
    if count is not None:
        cores = usable_cores()
        if count > cores:
            log.warning("threads=%d: this process may use %d cores, and computes on so many threads", count, cores)
        torch.set_num_threads(min(count, cores))


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    kv_cache_dtype: str = "auto",
) -> LanguageModel:
    """Load a causal language model and its tokenizer for inference.

    Args:
        name: ``zoo:NAME``, a local folder, a GGUF file, a hub id, or the name of a model that is made (made.py).
        dtype: "auto" (the checkpoint's own; of float16 on a CPU bfloat16, with a warning), "float32", "bfloat16" or
            "float16", also as torch's dtype; "int8" or "int4" rounds the weights of linear layers
            (models/quantised/rounding.py), on a CPU.
        device: "auto" (cuda if there is one), "cpu", "cuda" or "cuda:N".
        max_length: longest sequence to serve; None takes the model's own limit.
        revision: of a hub id: a branch, a tag or a commit.
        trust_remote_code: run Python code that comes with the checkpoint, without a prompt.
        kv_cache_dtype: of keys and values: "auto" (the model's), or, natively, "bfloat16" or "int8" (codes).
    Raises:
        ConfigError: unknown dtype or device, a length beyond the model's, a revision of a source without any, or a
            model that cannot have its keys in codes.
        ModelError: the folder is missing, incomplete or damaged, or the model cannot run here.
        UnsupportedArchitecture: attention does not go through the library's attention interface.
    """
    place = place_of(device)
    for option, value in (("kv_cache_dtype", kv_cache_dtype), ("max_model_len", max_length)):
        named(ModelOptions, option).check(value)
    if isinstance(dtype, str) and dtype in SCHEMES and place.type != "cpu":
        raise ConfigError(
            f"dtype='{dtype}' is computed on CPUs only, and device='{device}' is a GPU here: "
            "use device='cpu', or dtype='bfloat16'"
        )
    files = _files(name, trust_remote_code, revision)
    check_purpose(files.config, name)
    kind = _dtype(dtype, files.config)
    if dtype == "auto" and kind == torch.float16 and place.type == "cpu":
        kind = torch.bfloat16
        log.warning(
            "model '%s' is stored in float16 and computed in bfloat16, which rounds its weights to 8 bits and is "
            "faster; --dtype float32 (dtype='float32') rounds nothing and takes twice the memory",
            name,
        )
    if place.type == "cpu":
        check_fits(str(name), files.num_bytes(kind, SCHEMES[dtype].bits if dtype in SCHEMES else None))
    tokenizer = files.tokenizer()

    def build(*, packed: bool) -> LanguageModel:
        PHASES.info("loading %s", name)
        kept = _kept(files, dtype, kind) if packed and dtype in SCHEMES else None
        model = text_part(files.weights(kind, stored=True, attn_implementation=attention.NAME).to(place).eval())
        use_linear_layers(model)
        if dtype in SCHEMES:
            round_weights(model, dtype, str(name), stored=True)
        made = LanguageModel(
            model,
            tokenizer,
            name=str(name),
            max_length=max_length,
            packed=packed,
            trusted=trust_remote_code,
            kv_cache_dtype=kv_cache_dtype,
            kept=kept,
        )
        give_back_free_memory()
        return made

    try:
        return build(packed=True)
    except Mispacked as error:
        log.warning("model '%s' runs unpacked, which is slower: %s", name, error)
    return build(packed=False)


def bytes_of_weights(
    name: str | Path, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> int:
    """Bytes that a checkpoint's weights take at least, once they are loaded; 0 for a hub id that was never fetched.

    Args:
        dtype, revision, trust_remote_code: as for :func:`load`.
    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    files = _files(name, trust_remote_code, revision)
    if files.gguf is None:
        files = replace(files, source=str(folder_of(files.source)))
    return files.num_bytes(_dtype(dtype, files.config), SCHEMES[dtype].bits if dtype in SCHEMES else None)


def _kept(files: CheckpointFiles, dtype: str, kind: torch.dtype) -> KeptTiles | None:
    """The packed weights of a folder that is rounded."""
    if files.correction is not None:
        return None
    with suppress(ModelError):  # weights that lie elsewhere
        build = variants.key([variants.processor()])
        return kept_tiles("\n".join([dtype, str(kind), state_of_weights(files.source), build]))
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A model as the library computes it, for learning from.

    Attributes:
        name: the user's name for it.
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
        """Fingerprint of the weights, see fingerprint.py."""
        return fingerprint(self.folder)


def load_as_is(name: str | Path, *, device: str = "auto", trust_remote_code: bool = False) -> Checkpoint:
    """A model as the library computes it, any architecture of it, in the checkpoint's dtype, and its tokenizer.

    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    place = place_of(device)
    files = _files(name, trust_remote_code)
    kind = _dtype("auto", files.config)
    if place.type == "cpu":
        check_fits(str(name), files.num_bytes(kind, None))
    model = files.weights(kind).to(place).eval()
    return Checkpoint(str(name), source_of(name), model, files.tokenizer())


def load_network(
    name: str | Path, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The model of transformers alone, causal or masked, in eval mode on the CPU.

    Args:
        dtype, revision, trust_remote_code: as for :func:`load`.
    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    files = _files(name, trust_remote_code, revision)
    return files.weights(_dtype(dtype, files.config)).eval()


def load_tokenizer(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A checkpoint's tokenizer, or one that lies in a folder of its own.

    Args:
        revision, trust_remote_code: as for :func:`load`.
    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    folder = home_expanded(name)
    alone = folder.is_dir() and any(folder.glob("tokenizer*"))
    if not alone or (folder / "config.json").is_file() or (folder / lora.CONFIG).is_file():
        return _files(name, trust_remote_code, revision).tokenizer()
    with reported(f"model '{name}': its tokenizer cannot be loaded", name):
        return AutoTokenizer.from_pretrained(str(folder))


def load_config(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A checkpoint's configuration, without its weights.

    Args:
        revision, trust_remote_code: as for :func:`load`.
    Raises:
        ConfigError, ModelError: as :func:`load`.
    """
    return _files(name, trust_remote_code, revision).config


def place_of(device: str) -> torch.device:
    """The device of this name; see :func:`load`."""
    if not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device={device!r:.60} is not a device: use auto, cpu, cuda or cuda:N")
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


def _dtype(dtype: Any, config: Any) -> torch.dtype:
    """The dtype of unquantised weights; next to quantised ones, float16 becomes bfloat16."""
    dtype = named(ModelOptions, "dtype").check(dtype)
    if dtype in SCHEMES:
        own = _dtype("auto", config)
        return own if own == torch.float32 else torch.bfloat16
    if dtype == "auto":
        for part in (config, config.get_text_config(decoder=True)):  # a wrapper may leave it to its parts
            found = getattr(part, "dtype", None)
            if isinstance(found, torch.dtype):
                # next to quantised weights little is left; float32 holds it exactly, and processors are slow in float16
                quantised = found == torch.float16 and quantised_folder.settings_of(config) is not None
                return torch.float32 if quantised else found
        return torch.float32
    return DTYPES[dtype]


def source_of(name: str | Path) -> str:
    """The path or hub id that transformers is given."""
    text = str(name)
    if not isinstance(name, (str, Path)) or not text.strip():
        raise ConfigError(f"model={name!r:.60} is no name: give a folder, a hub id or zoo:base")
    check_name(text, "model=")
    if text.startswith("zoo:"):
        return str(zoo.path(text.removeprefix("zoo:")))
    if (made := folder_of_made(text)) is not None:
        return str(made)
    folder = home_expanded(text)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", lora.CONFIG)):
            held = sorted(path for path in folder.glob("*.gguf") if is_gguf(path))
            remedy = "point to a saved Hugging Face checkpoint"
            if held:
                remedy = f"point to the GGUF file in it, {held[0]}"
                remedy += f", or to one of {len(held) - 1} others" if held[1:] else ""
            raise ModelError(f"model '{text}' is a folder without config.json: {remedy}")
        return str(folder)
    if folder.exists():
        if is_gguf(folder):
            return str(folder)
        raise ModelError(
            f"model '{text}' is a file: point to the folder of a saved Hugging Face checkpoint, or to a GGUF file"
        )
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".gguf"):
        raise ModelError(f"model '{text}' does not exist")
    return text


def _files(name: str | Path, trusted: bool, revision: str | None = None) -> CheckpointFiles:
    return CheckpointFiles.of(name, source_of(name), trusted, revision)


def check_purpose(config: Any, name: str | Path) -> None:
    """Refuse any model but a causal language model, before any weight is read."""
    kind = config.model_type
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # making so many modules takes minutes, and gigabytes
        raise ModelError(
            f"model '{name}': its config says num_hidden_layers={layers}, and at most {_MOST_LAYERS} are served here: "
            "the config is damaged, fetch or save the checkpoint again"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(
            f"model '{name}' ({kind}) is an encoder-decoder: only causal models are supported"
        )
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not known and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise UnsupportedArchitecture(f"model '{name}' ({kind}) is not a causal language model of transformers")
    built = getattr(config, "architectures", None) or []
    if not isinstance(built, list) or not all(isinstance(each, str) for each in built):
        raise ModelError(f"model '{name}': its config says architectures={built!r:.60}, which is no list of names")
    if built and all(each.endswith(("Classification", "QuestionAnswering", "MaskedLM")) for each in built):
        raise UnsupportedArchitecture(f"model '{name}' ({built[0]}) was not made to generate: it has no language head")
