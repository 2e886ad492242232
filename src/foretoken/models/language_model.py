"""A Hugging Face causal language model that computes packed batches over our own cache.

The library's model definition stays as it is; its attention calls our plan (models/attention.py) and, on CPU, its
linear layers are packed (models/prepack.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, ForetokenError, UnsupportedArchitecture
from foretoken.core.protocols import Plan
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.prepack import can_prepack, prepack


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward returns.

    Attributes:
        logits_MV: one row per wanted row of the batch, in the model's dtype.
    """

    logits_MV: Tensor


class LanguageModel:
    """One checkpoint, ready to compute.

    Args:
        model: a causal LM of transformers, loaded with our attention implementation, in eval mode on its device.
        tokenizer: its tokenizer.
        name: what the user called it, for messages.
        max_length: longest sequence to serve; None takes the model's limit.
    Raises:
        UnsupportedArchitecture: a layer does not call the attention interface, or attends in a way we do not know.
        ConfigError: ``max_length`` exceeds the model's positions.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, max_length: int | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config
        text = model.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        self.vocab_size: int = text.vocab_size
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.max_length = _max_length(text, name, max_length)
        self.end_ids = _end_ids(model)
        _check_layers(text, name, type(model).__name__)
        self._probe()
        if can_prepack(self.dtype, self.device):
            prepack(model)

    def new_cache(self, max_slots: int) -> KVCache:
        """An empty cache for this model."""
        return KVCache(self.num_layers, max_slots, self.max_length)

    def forward(self, batch: PackedBatch, plan: Plan) -> Output:
        """Compute the wanted rows' logits; keys and values go where the plan puts them.

        Args:
            batch: packed rows; must not be empty.
            plan: made for this batch and the cache of its slots.
        """
        with torch.inference_mode():
            wanted = batch.wanted_rows(self.device)
            result = self.model(
                input_ids=batch.ids_1T(self.device),
                position_ids=batch.positions_1T(self.device),
                use_cache=False,
                plan=plan,
                logits_to_keep=0 if wanted is None else wanted,
            )
            return Output(result.logits[0])

    def _probe(self) -> None:
        """Run two tokens through a plan that only takes roll, so that a misfit is refused here and not mid-run."""
        roll = _RollCall()
        batch = PackedBatch()
        batch.add_chunk(0, 0, [0, 1 % self.vocab_size], wanted=1)
        kind = type(self.model).__name__
        try:
            self.forward(batch, roll)
        except ForetokenError as error:
            raise UnsupportedArchitecture(f"model '{self.name}' ({kind}) is not supported: {error}") from error
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            raise UnsupportedArchitecture(
                f"model '{self.name}' ({kind}) cannot be run as a packed batch: {str(error).strip()[:300]}"
            ) from error
        silent = sorted(set(range(self.num_layers)) - roll.layers)
        if silent:
            raise UnsupportedArchitecture(
                f"model '{self.name}' ({kind}) is not supported: attention of layer {silent[0]} "
                f"({len(silent)} of {self.num_layers} layers) does not go through the library's attention interface"
            )


class _RollCall:
    """A plan that notes which layers call, and answers with zeros."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        self.layers.add(layer)
        return q_HTD.new_zeros((q_HTD.shape[1], q_HTD.shape[0], v_GTD.shape[-1]))


# Layer types (config.layer_types) whose masks reach us as keywords. Others shape their mask in a way we cannot see.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def _check_layers(text: Any, name: str, kind: str) -> None:
    for layer, what in enumerate(getattr(text, "layer_types", None) or ()):
        if what not in _KNOWN_LAYERS:
            raise UnsupportedArchitecture(f"model '{name}' ({kind}) is not supported: layer {layer} is of type '{what}'")


def _max_length(text: Any, name: str, asked: int | None) -> int:
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if asked is None:
        return int(limit or 4096)
    if asked < 2:
        raise ConfigError(f"max_model_len={asked} is too short: a prompt and one token need at least 2")
    if limit and asked > limit:
        raise ConfigError(f"max_model_len={asked} exceeds the {limit} positions of model '{name}'")
    return asked


def _end_ids(model: Any) -> frozenset[int]:
    """Tokens that end a generation, from the generation config, else from the model config."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def check_same_vocabulary(target: LanguageModel, draft: LanguageModel) -> str | None:
    """Why the draft's tokens cannot be the target's tokens; None if they can.

    Equal ids must mean equal text. Embedding tables may be padded to different sizes (as within the Qwen family), so
    it is the tokenizers that are compared.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return None
    differing = next((text for text, index in ours.items() if theirs.get(text) != index), None)
    detail = f"{len(ours)} and {len(theirs)} entries"
    if differing is not None:
        detail += f"; '{differing}' is {ours[differing]} and {theirs.get(differing, 'absent')}"
    return detail


