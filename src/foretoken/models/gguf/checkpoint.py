"""A GGUF file as a checkpoint: config, tokenizer, and a model of transformers with the file's own weights."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.core.threads import one_thread
from foretoken.forward.quantised_experts import QuantisedExperts
from foretoken.forward.quantised_weight import QuantisedWeight
from foretoken.models.gguf.architecture import architecture_of
from foretoken.models.gguf.blocks import PLAIN, check_places, dense, packed_bytes, quantised
from foretoken.models.gguf.experts import is_stacked, stacked_experts
from foretoken.models.gguf.pieces import SplitFile, pieces_of
from foretoken.models.gguf.tokenizer import tokenizer_of
from foretoken.models.quantised.assemble import fill, skeleton


class GGUFCheckpoint:
    """One file's parts.

    Args:
        path: of the file, or of the first of its pieces.
    Raises:
        ModelError: it is damaged, or of an architecture or a kind that is not read; see the modules next to this one.
    """

    def __init__(self, path: Path) -> None:
        pieces = pieces_of(path)
        for piece in pieces:
            check_places(piece)
        self._file = SplitFile(pieces) if len(pieces) > 1 else pieces[0]
        self._architecture = architecture_of(self._file)

    @cached_property
    def config(self) -> Any:
        """Of transformers. Its dtype is that of the stored matrices, or float32 where blocks stand next to the rest."""
        config = self._architecture.config
        kinds = {entry.kind for entry in self._file.entries.values() if len(entry.shape) > 1}
        config.dtype = torch.float32
        if kinds <= set(PLAIN):
            stored = {PLAIN[kind] for kind in kinds}
            config.dtype = next((each for each in (torch.bfloat16, torch.float16) if each in stored), torch.float32)
        config._name_or_path = str(self._file.path)
        return config

    def tokenizer(self) -> Any:
        """See models/gguf/tokenizer.py.

        Raises:
            ModelError: there is none that is read, or it is of another size than the embedding.
        """
        found = tokenizer_of(self._file)
        tokens, rows = len(self._file.fields["tokenizer.ggml.tokens"]), self.config.vocab_size
        if tokens != rows:
            raise ModelError(
                f"model '{self._file.path}': its field 'tokenizer.ggml.tokens' has {tokens} tokens, and its embedding "
                f"{rows} rows"
            )
        return found

    def weights(self, auto: Any, dtype: torch.dtype, name: str, *, stored: bool = False, **options: Any) -> Any:
        """The model, its quantised layers as they are and everything else in one dtype.

        Args:
            stored: leave quantised layers of all kinds in the file until they are used, each time; see
                :class:`StoredWeight`. Otherwise those that native products read as they are.
        """
        try:
            with one_thread():  # a look at each tensor's scales: torch's threads would spin after each
                return fill(skeleton(auto, self.config, dtype, **options), self._tensors(stored=stored), name)
        except ModelError as error:
            message = str(error)
            raise type(error)(message if message.startswith("model ") else f"model '{name}': {message}") from None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that the weights take in memory."""
        entries = dict(self._file.entries)
        table = entries["token_embd.weight"]
        total = sum(packed_bytes(each, dtype) for each in entries.values())
        if table.kind not in PLAIN and dtype == torch.float32:
            return total  # its blocks stay in the file, or are packed as the head
        dense_bytes = table.count * dtype.itemsize
        return total + dense_bytes - (0 if self.config.tie_word_embeddings else packed_bytes(table, dtype))

    def _tensors(self, *, stored: bool) -> Iterator[tuple[str, Tensor | QuantisedWeight | QuantisedExperts]]:
        tied = self.config.tie_word_embeddings
        experts = self._architecture.experts
        if experts is not None:
            layers, clamped = self.config.num_hidden_layers, self._architecture.clamped_experts
            yield from stacked_experts(self._file, experts, layers, None if clamped else self.config.hidden_act)
        for name, entry in self._file.entries.items():
            if experts is not None and is_stacked(name):
                continue
            place = self._architecture.place(name)
            if place is None:
                continue
            if entry.kind in PLAIN or len(entry.shape) == 1:
                yield place, self._architecture.converted(name, dense(self._file, entry))
                self._file.leave(entry)
                continue
            value = self._architecture.converted(name, quantised(self._file, entry))
            if not stored and isinstance(value, QuantisedWeight):
                value = value.for_modules()
            self._file.leave(entry)
            yield place, value
            if tied and name == "token_embd.weight":
                yield "lm_head.weight", value
