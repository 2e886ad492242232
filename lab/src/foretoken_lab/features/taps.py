"""What to take from a target, and taking it in one forward: hidden states at chosen depths, and logits.

Hooks copy the wanted depths as they pass, so a depth that is not wanted is never kept.

Dimensions: B sequences, T positions, N = B * T rows, D width, V vocabulary, K logits kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, ForetokenError, UnsupportedArchitecture, nearest
from foretoken.forward import anatomy
from foretoken.forward.hidden_states import FINAL, Depth, reads, state_of, watching
from foretoken.models.load import DTYPES
from foretoken_lab.features.store import All

Rows = dict[str, Tensor]


def hidden_name(depth: Depth) -> str:
    """What the hidden states of a depth are called in ``Rows``, and in a shard."""
    return f"hidden.{depth}_ND"


@dataclass(frozen=True)
class Wanted:
    """What to take from the target for every token.

    Attributes:
        layers: depths of the residual stream: 0 is what the first layer reads (embeddings, scaled and with positions
            where the model does so), k what layer k gives, -1 what the last gives; "final" is after the final norm,
            what the head reads.
        top_logits: keep the largest k logits and the logsumexp of all; 0 keeps none, "all" keeps all.
        dtype: to store hidden states in, and logits if all are kept: "bfloat16", "float16" or "float32".
    Raises:
        ConfigError: nothing is wanted, or something that does not exist.
    """

    layers: tuple[Depth, ...] = (FINAL,)
    top_logits: int | All = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.layers and self.top_logits == 0:
            raise ConfigError("nothing to extract: name layers, top_logits, or both")
        for depth in self.layers:
            if depth != FINAL and not isinstance(depth, int):
                raise ConfigError(f"layers (--depths): '{depth}' is no depth: give whole numbers, or '{FINAL}'")
        if self.top_logits not in get_args(All) and not (isinstance(self.top_logits, int) and self.top_logits >= 0):
            raise ConfigError(f"top_logits={self.top_logits} (--top-logits): must be 0 or more, or 'all'")
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype '{self.dtype}': {nearest(self.dtype, DTYPES)}")

    def resolve(self, depth: int, vocabulary: int) -> Wanted:
        """The same for a target of so many layers and tokens: no negative depth, each once, in order.

        Raises:
            ConfigError: the target is not as deep, or has fewer tokens.
        """
        numbers = [each for each in self.layers if isinstance(each, int)]
        for each in numbers:
            if not -depth - 1 <= each <= depth:
                raise ConfigError(
                    f"layers (--depths): depth {each} does not exist: the target has {depth} layers, so depths are 0 "
                    f"(what the first reads) to {depth} (what the last gives), or -1 to {-depth - 1} from the end"
                )
        if isinstance(self.top_logits, int) and self.top_logits > vocabulary:
            raise ConfigError(
                f"top_logits={self.top_logits} (--top-logits): the target has {vocabulary} tokens; say 'all' for all"
            )
        final: tuple[Depth, ...] = (FINAL,) if FINAL in self.layers else ()
        return replace(self, layers=(*sorted({each % (depth + 1) for each in numbers}), *final))


class Taps:
    """The wanted features of one target.

    Args:
        model: a causal language model of transformers in eval mode, on its device; it is run once on two tokens.
        wanted: negative depths are resolved.
    Raises:
        ConfigError: the target is not as deep as wanted, or has fewer tokens.
        UnsupportedArchitecture: its parts cannot be found, or do not hold what their names promise.
    """

    def __init__(self, model: Any, wanted: Wanted) -> None:
        self._model = model
        self._anatomy = anatomy.find(model)
        self._kind = type(model).__name__
        self.depth = len(self._anatomy.layers)
        text = model.config.get_text_config(decoder=True)
        self.vocabulary: int = text.vocab_size
        self.wanted = wanted.resolve(self.depth, self.vocabulary)
        self._dtype = DTYPES[wanted.dtype]
        self.sample = self._probe()
        widths = {values.shape[1] for name, values in self.sample.items() if name.startswith("hidden.")}
        if len(widths) > 1:
            raise UnsupportedArchitecture(
                f"{self._kind}: hidden states and what the head reads differ in width ({widths}); take only one of them"
            )
        self.width: int = widths.pop() if widths else text.hidden_size

    @torch.inference_mode()
    def __call__(self, tokens_BT: Tensor) -> Rows:
        """Run the target over sequences of one length.

        Args:
            tokens_BT: int64; positions count from 0.
        Returns:
            tensors of N rows on the CPU: ``hidden.<depth>_ND``; ``logsumexp_N`` float32 with ``top_ids_NK`` int32 and
            ``top_logits_NK`` in the dtype in which the model computes them, or with ``logits_NV``.
        Raises:
            ForetokenError: a value is not finite.
        """
        rows: Rows = {}
        inputs = {"input_ids": tokens_BT.to(next(self._model.parameters()).device), "use_cache": False}
        with self._tapped(tokens_BT.shape, rows):
            if self.wanted.top_logits == 0:
                self._anatomy.body(**inputs)  # without the head: a large part of a small model
            else:
                rows.update(self._logits(self._model(**inputs).logits.flatten(0, 1)))
        for name, values in rows.items():
            # of all logits some may be -inf: padding of the vocabulary
            if name != "logits_NV" and not values.isfinite().all():
                raise ForetokenError(
                    f"{name}: the target gives values that are not finite in {values.dtype}: store them in bfloat16 or "
                    "float32; if that does not help, the checkpoint is damaged"
                )
        return rows

    def _logits(self, logits_NV: Tensor) -> Rows:
        rows = {"logsumexp_N": logits_NV.float().logsumexp(-1).cpu()}
        if isinstance(self.wanted.top_logits, int):
            top_NK, ids_NK = logits_NV.topk(self.wanted.top_logits, dim=-1)
            return {**rows, "top_ids_NK": ids_NK.to("cpu", torch.int32), "top_logits_NK": top_NK.cpu()}
        return {**rows, "logits_NV": logits_NV.to("cpu", self._dtype)}

    @contextmanager
    def _tapped(self, shape: torch.Size, rows: Rows) -> Iterator[None]:
        """While inside, a forward leaves the wanted hidden states in ``rows``."""

        def keep(depth: Depth, values: Any) -> None:
            values_BTD = state_of(values, tuple(shape), self._kind, depth)
            # a copy even where nothing changes: the next layer may add to it in place
            rows[hidden_name(depth)] = values_BTD.flatten(0, 1).to("cpu", self._dtype, copy=True)

        with watching(self._anatomy, self.wanted.layers, keep):
            yield

    @torch.inference_mode()
    def _probe(self) -> Rows:
        """Refuse a model with unexpected parts here, before the run."""
        read: list[Tensor] = []
        handle = reads(self._anatomy.head, read.append)
        found: Rows = {}
        try:
            with self._tapped(torch.Size((1, 2)), found):
                device = next(self._model.parameters()).device
                self._model(input_ids=torch.tensor([[0, 1]], device=device), use_cache=False)
        finally:
            handle.remove()
        missing = [depth for depth in self.wanted.layers if hidden_name(depth) not in found]
        if missing:
            raise UnsupportedArchitecture(f"{self._kind}: its forward does not pass through depth {missing[0]}")
        if FINAL in self.wanted.layers:
            final_ND = found[hidden_name(FINAL)]
            if not read or not torch.equal(read[0].flatten(0, 1).to("cpu", self._dtype), final_ND):
                raise UnsupportedArchitecture(
                    f"{self._kind}: the head does not read what the final norm gives; take depth {self.depth} instead "
                    f"of '{FINAL}'"
                )
        return self(torch.tensor([[0, 1]]))
