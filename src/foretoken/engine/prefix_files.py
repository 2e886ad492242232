"""Prefixes on disk: keys and values of prompts that have left memory, for later prompts and for other processes.

A file is a safetensors file: ``tokens``, and ``k`` and ``v`` of each layer, [G, L, D]. Its name begins with hashes of
the model and of the cache salt and the adapter; its metadata has the model's and the hash of its content. A file is
written under another name and then renamed, so it is whole or not there.

Letters: G key/value heads, L rows, D head width.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.files import check_name, home_expanded, make_way, private_file
from foretoken.engine.prefixes import common_prefix
from foretoken.engine.request import CacheKey
from foretoken.forward.cache import KVCache
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.native import build, variants

log = logging.getLogger(__name__)

_FORM = "1"
_ENDING = ".prefix"
_LEAST = 64  # tokens that are worth a file


class PrefixFiles:
    """The stored prefixes of one model, in a folder that several models and processes may use at once.

    Args:
        folder: made if it is not there.
        max_bytes: of all files in it; those that were used longest ago leave first.
        model: says all that keys and values depend on; others' files are not read.
    Raises:
        ConfigError: there can be no such folder.
    """

    def __init__(self, folder: str | Path, max_bytes: int, model: str) -> None:
        check_name(str(folder), "prefix_cache_dir=")
        self._folder = home_expanded(folder)
        self._max_bytes = max_bytes
        self._model = _hash(f"{_FORM} {model}")
        self._tokens: dict[str, list[int]] = {}  # by name, of files that were looked into
        self._failed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir={self._folder}: no folder can be made there ({error})") from None

    def longest(self, tokens: Sequence[int], key: CacheKey, limit: int) -> tuple[int, str]:
        """How many first tokens a file has, at most ``limit``, and its name; 0: none has any."""
        known = self._known(self._begin(key))
        return max(((common_prefix(each, tokens, limit), name) for name, each in known.items()), default=(0, ""))

    def load(self, name: str, cache: KVCache, slot: int, count: int) -> bool:
        """Put the first rows of a file into an empty slot; False if the file is damaged: then it is removed."""
        path = self._folder / name
        try:
            with safe_open(path, "pt") as file:
                facts, stored = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if facts.get("model") != self._model or facts.get("content") != _content(stored):
                raise ValueError("its content has changed")
            os.utime(path)
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("the stored prefix %s is not used, and removed: %s", path, error)
            self._remove(name)
            return False
        cache.reserve(slot, count)
        with torch.inference_mode():
            for layer in range(cache.num_layers):
                if f"k{layer}" in stored:
                    rows = stored[f"k{layer}"], stored[f"v{layer}"]
                    for buffer, own in zip(cache.buffers(layer, *rows), rows, strict=True):
                        buffer[slot, :, :count] = own[:, :count]
        cache.commit(slot, range(count))
        return True

    def store(self, tokens: Sequence[int], key: CacheKey, cache: KVCache, slot: int) -> None:
        """Write a slot's rows, unless a file has them; a disk that takes no more is one line in the log."""
        begin, own = self._begin(key), list(tokens)
        known = self._known(begin)
        if len(own) < _LEAST or any(each[: len(own)] == own for each in known.values()):
            return
        stored = {"tokens": torch.tensor(own, dtype=torch.int32)}
        for layer, pair in enumerate(zip(cache.keys, cache.values, strict=True)):
            for side, buffer in zip("kv", pair, strict=True):
                if buffer is not None:
                    stored[f"{side}{layer}"] = buffer[slot, :, : len(own)].cpu().contiguous()
        content = save(stored, {"model": self._model, "content": _content(stored)})
        if len(content) > self._max_bytes:
            return
        name = f"{begin}{_hash(str(own))[:16]}{_ENDING}"
        try:
            make_way(self._folder, f"*{_ENDING}", len(content), self._max_bytes)
            with private_file(self._folder / name) as file:
                file.write(content)
        except OSError as error:
            if not self._failed:
                log.warning("prefixes are not written to %s: %s", self._folder, error.strerror or error)
            self._failed = True
            return
        self._tokens[name], self._failed = own, False
        for other, each in known.items():
            if own[: len(each)] == each:
                self._remove(other)

    def _begin(self, key: CacheKey) -> str:
        salt, adapter = key
        return f"{self._model[:16]}-{_hash(f'{None if adapter is None else adapter.digest} {salt!r}')[:32]}-"

    def _known(self, begin: str) -> dict[str, list[int]]:
        """The tokens of each file with this beginning of its name."""
        found = {}
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(begin) and name.endswith(_ENDING):
                    if name not in self._tokens:
                        try:
                            with safe_open(self._folder / name, "pt") as file:
                                self._tokens[name] = file.get_tensor("tokens").tolist()
                        except (OSError, SafetensorError) as error:
                            log.warning("the stored prefix %s is removed: %s", self._folder / name, error)
                            self._remove(name)
                            continue
                    found[name] = self._tokens[name]
        return found

    def _remove(self, name: str) -> None:
        self._tokens.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()


def files_of(target: LanguageModel, folder: str | Path, max_bytes: int) -> PrefixFiles:
    """The stored prefixes of a loaded model.

    Raises:
        ConfigError: there can be no such folder, or the model's weights have no fingerprint.
    """
    try:
        weights = fingerprint_of(target.source)
    except (ModelError, OSError) as error:
        raise ConfigError(f"prefix_cache_dir={folder}: prefixes of this model cannot be stored: {error}") from None
    native = target.native_decoder is not None
    computed = [build.origin(), variants.key([variants.processor()])] if native else [torch.__version__, target.device]
    dtypes = f"{target.dtype} {target.precision} {target.kv_cache_dtype}"
    return PrefixFiles(folder, max_bytes, f"{version('foretoken')} {weights} {dtypes} {computed}")


def _content(stored: Mapping[str, Tensor]) -> str:
    """The hash of the tensors, which are checked before they are used."""
    digest = hashlib.blake2b()
    for name in sorted(stored):
        digest.update(f"{name} {stored[name].dtype} {list(stored[name].shape)}".encode())
        digest.update(stored[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
