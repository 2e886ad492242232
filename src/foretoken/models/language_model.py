"""A Hugging Face causal language model that computes packed batches over our own cache.

The library's model definition stays as it is; its attention calls our plan (forward/attention.py) and, on CPU, its
linear layers are packed (models/prepack.py).
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.errors import ConfigError, ForetokenError, ModelError, UnsupportedArchitecture
from foretoken.core.pages import give_back_free_memory
from foretoken.core.phases import PHASES
from foretoken.core.protocols import Plan
from foretoken.core.threads import one_thread
from foretoken.forward import anatomy, attention
from foretoken.forward.adapter import Adapter, corrected
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.feed_forward import swapped
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.plain import why_not_its_weights
from foretoken.forward.span import Span, passed_by, within
from foretoken.forward.ssm import adopt
from foretoken.forward.ssm.state import cache_for
from foretoken.forward.stored_weight import hold
from foretoken.models.adoption import native_trial, probe, trial
from foretoken.models.adoption.fit import fits_by_name, misfit
from foretoken.models.adoption.sample import Sample
from foretoken.models.checkpoint_config import check_layers, end_ids_of, max_length_of
from foretoken.models.prepack import can_prepack, prepack
from foretoken.models.processor import bfloat16_speed
from foretoken.models.quantised.rounding import precision_of
from foretoken.models.work import num_parameters, sizes, weight_bytes
from foretoken.native import decoder
from foretoken.native.apart import pack_quantised
from foretoken.native.call import Ranked
from foretoken.native.kept_tiles import KeptTiles
from foretoken.native.layout import Head
from foretoken.native.team import torch_on_one_thread

_SMALL = 1 << 26  # parameters: a trial forward of all layers, on one thread, takes hundredths of a second
_SLOW = 0.5  # of float32's speed: then twice the memory to read is the lesser evil

log = logging.getLogger(__name__)


class SomeOfHead(Protocol):
    """Some rows of a model's head, which a forward scores in place of all; models/head_rows.py has them.

    Attributes:
        columns: the tokens that its columns stand for.
        packed: for the native decoder; None where the model has none.
    """

    columns: Columns

    @property
    def packed(self) -> Head | None: ...

    def __len__(self) -> int: ...

    def score(self, normed_MD: Tensor) -> Tensor:
        """Logits float32 [M, C] of states after the final norm; for models without a native decoder."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Results of a forward, for its M wanted rows.

    Attributes:
        logits_MV: float32 or the model's dtype; [M, C] with ``columns``.
        best: the most probable token of each row.
        peaks: its logit; NaN if any logit of the row is.
        top_ids: the k most probable tokens of each row, most probable first, M * k of them; empty if not requested.
        top_shares: their probabilities at temperature 1; NaN if any logit of the row is.
        hidden: the span's taps by depth, [rows, D]: float32 from the native decoder, else the model's dtype.
        columns: of the logits, where some rows of the head were scored; None: column i is token i.
    """

    logits_MV: Tensor
    best: Sequence[int]
    peaks: Sequence[float]
    top_ids: Sequence[int] = ()
    top_shares: Sequence[float] = ()
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    columns: Columns | None = None

    @classmethod
    def of(
        cls,
        logits_MV: Tensor,
        *,
        top: int = 0,
        hidden: Mapping[int, Tensor] | None = None,
        columns: Columns | None = None,
    ) -> "Output":
        """Look the best tokens up."""
        hidden = hidden or {}
        if not len(logits_MV):
            return cls(logits_MV, (), (), hidden=hidden, columns=columns)
        # max, not argmax: the value costs nothing and is NaN if any logit of the row is
        peaks, best = logits_MV.max(dim=-1)
        if columns is not None:
            best = columns.ids_C[best]
        if not top:
            return cls(logits_MV, best.tolist(), peaks.tolist(), hidden=hidden, columns=columns)
        q_MV = torch.softmax(logits_MV.float(), dim=-1)
        shares, ids = q_MV.topk(top, dim=-1)
        if columns is not None:
            ids = columns.ids_C[ids]
        ranked = ids.flatten().tolist(), shares.flatten().tolist()
        return cls(logits_MV, best.tolist(), peaks.tolist(), *ranked, hidden, columns)

    @classmethod
    def ranked(cls, found: Ranked, columns: Columns | None = None) -> "Output":
        """The native forward's results, with tokens in place of columns."""
        if columns is None:
            return cls(found.logits_MV, found.best, found.peaks, found.top_ids, found.top_shares, found.hidden)
        best, ids = columns.tokens_of(found.best), columns.tokens_of(found.top_ids)
        return cls(found.logits_MV, best, found.peaks, ids, found.top_shares, found.hidden, columns)


class Mispacked(ModelError):
    """Packed weights give other results than the model; it has to be loaded again, to run unpacked."""


class LanguageModel:
    """One checkpoint, ready to compute.

    Args:
        model: a causal LM of transformers, loaded with our attention implementation, in eval mode on its device.
        tokenizer: its tokenizer.
        name: the user's name for it, for messages.
        max_length: longest sequence to serve; None takes the model's limit.
        trusted: whether code that comes with a checkpoint may run; a draft's, too, that is loaded for this target.
        packed: lay the weights out for the CPU, where they are; False leaves every layer as it is.
        kv_cache_dtype: "auto": keys and values are kept in the model's dtype, next to quantised weights in bfloat16;
            "float32"; "bfloat16"; "int8": in codes of 8 bits.
        kept: packed weights of this model in the cache folder; None: there are none, and none are written.
    Raises:
        Mispacked: the packed weights give other logits than the layers did; the model is no longer of use.
        UnsupportedArchitecture: a layer does not call the attention interface, or attends in a way we do not know.
        ConfigError: ``max_length`` exceeds the model's positions, or the model cannot have its keys in codes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        max_length: int | None = None,
        packed: bool = True,
        trusted: bool = False,
        kv_cache_dtype: str = "auto",
        kept: KeptTiles | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.trusted = trusted
        self.source = str(getattr(model.config, "_name_or_path", "") or name)  # folder or hub id
        self.config = model.config
        text = model.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        self.width: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self.kv_sources = anatomy.kv_sources(text)
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.precision: str = precision_of(model) or str(self.dtype).removeprefix("torch.")  # of its weights
        self.num_parameters, self.weight_bytes = num_parameters(model), weight_bytes(model)  # before they are packed
        self.max_length = max_length_of(text, name, max_length)
        self.end_ids = end_ids_of(model, tokenizer, name, self.vocab_size)
        attention.redirect(model)
        self.mixers = adopt.mixers(model, name)  # state-space layers; empty where there are none
        self._silent = check_layers(text, name, type(model).__name__, {mixer.layer for mixer in self.mixers})
        self.sizes = sizes(model)  # before they are packed
        # of all forwards: layers loaded, rows times layers (drafting with the model itself must not repeat any), and
        # rows that went through the head
        self.layers_loaded = self.layer_rows = 0
        self.scored_rows = 0.0  # where some rows of the head were scored, their share
        self._whole = Span(0, self.num_layers)
        self.adapters: dict[tuple[str, str], Adapter] = {}  # those that were loaded, by name and folder
        self.native_decoder: decoder.NativeDecoder | None = None
        self.kv_cache_dtype = kv_cache_dtype
        narrow = kv_cache_dtype not in ("auto", str(self.dtype).removeprefix("torch."))
        if kv_cache_dtype == "float32" and narrow:
            raise ConfigError(
                f"kv_cache_dtype='float32': model '{name}' computes keys and values in {self.dtype}; leave it out, or "
                "choose dtype='float32'"
            )
        small = self.num_parameters <= _SMALL
        self._sample = None if small else _sample(model)  # None: probes run all layers
        if self._sample is None:  # every forward of a trial would make stored weights again
            hold(model)
        # trial forwards, but for those of all layers of a large model, are many small operations of torch
        with one_thread() if small else nullcontext() if self._sample is None else torch_on_one_thread():
            self.window = self._probe()  # the smallest sliding window of any layer; None: there is none
            if narrow:
                self._check_codes("it has state-space layers" if self.mixers else misfit(model))
            if packed:
                self._pack(kept)
        self._sample = None
        if narrow and self.native_decoder is None:
            self._check_codes("it computes other logits there than its own modules")

    @property
    def flops(self) -> float:
        """Of all forwards so far, counted; see models/work.py."""
        return self.sizes.flops(self.layer_rows, self.scored_rows)

    def reading_flops(self, num_tokens: int) -> float:
        """Of reading so many tokens of a prompt, the same count."""
        return self.sizes.flops(self.num_layers * num_tokens, 0)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are not text: those that end a generation, and the tokenizer's additions to its vocabulary.

        The latter marks roles, tools or thoughts; a few tokenizers keep runs of spaces there, too.
        """
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return self.end_ids | frozenset(self.tokenizer.all_special_ids) | frozenset(added)

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of keys and values in a cache, uint8 for codes; None: as they are computed.

        Next to quantised weights they are bfloat16: attention reads half the bytes, and the error is small next to that
        of rounded activations.
        """
        if self.kv_cache_dtype == "int8":
            return torch.uint8
        narrow = (
            self.precision.startswith("int") if self.kv_cache_dtype == "auto" else self.kv_cache_dtype == "bfloat16"
        )
        return torch.bfloat16 if narrow and self.native_decoder is not None else None

    def new_cache(self, max_slots: int) -> KVCache:
        """An empty cache for this model."""
        if not self.mixers:
            return KVCache(self.num_layers, max_slots, self.max_length, kv_dtype=self.kv_dtype, sources=self.kv_sources)
        return cache_for(self.mixers, self.num_layers, max_slots, self.max_length, self.dtype, self.device)

    def forward(
        self, batch: PackedBatch, plan: Plan, *, top: int = 0, span: Span | None = None, head: SomeOfHead | None = None
    ) -> Output:
        """Compute the wanted rows' logits; keys and values go where the plan puts them.

        Args:
            batch: packed rows; must not be empty.
            plan: made for this batch and the cache of its slots.
            top: also rank so many tokens of each row (a greedy drafter's candidates); at most the vocabulary.
            span: run these layers only, or keep hidden states; drafting/early_exit.py checks that a model can.
            head: score these rows of the head in place of all.
        """
        layers = self.num_layers if span is None else span.last - span.first
        self.layers_loaded += layers
        self.layer_rows += layers * len(batch)
        self.scored_rows += len(batch.wanted) * (1.0 if head is None else len(head) / self.vocab_size)
        columns = None if head is None else head.columns
        if self.native_decoder is not None and plan.native is not None:
            packed = None if head is None else head.packed
            ranked = self.native_decoder.forward(batch, plan.native, span or self._whole, top=top, head=packed)
            return Output.ranked(ranked, columns)
        skipped = () if head is None else (anatomy.find(self.model).head,)
        with (
            torch.inference_mode(),
            attention.following(plan),
            swapped(plan.swaps),
            passed_by(skipped),
            corrected(self.model, batch),
        ):
            wanted = batch.wanted_rows(self.device)
            inputs: dict[str, Any] = {
                "input_ids": batch.ids_1T(self.device),
                "position_ids": batch.positions_1T(self.device),
                "use_cache": False,
                "logits_to_keep": 0 if wanted is None else wanted,
            }
            if span is None:
                logits_MV = self.model(**inputs).logits[0]
                if head is not None:
                    logits_MV = head.score(logits_MV)
                return Output.of(logits_MV, top=top, columns=columns)
            if span.entering_TD is not None:  # perhaps the native decoder's, which are float32
                span = replace(span, entering_TD=span.entering_TD.to(self.dtype))
            with within(anatomy.find(self.model), span) as hidden:
                logits_MV = self.model(**inputs).logits[0]
            if head is not None:
                logits_MV = head.score(logits_MV)
            return Output.of(logits_MV, top=top, hidden=hidden, columns=columns)

    def score(
        self, hidden_MD: Tensor, *, top: int = 0, final_norm: bool = True, head: SomeOfHead | None = None
    ) -> Output:
        """Logits of hidden states: the head of every depth, with whatever the model does to logits after it.

        Args:
            hidden_MD: [M, D] as a forward gave them.
            final_norm: False if they have been normed already.
            head: score these rows of the head in place of all.
        """
        batch = PackedBatch.of_text([0] * len(hidden_MD))
        span = Span(self.num_layers, self.num_layers, hidden_MD, final_norm=final_norm)
        return self.forward(batch, _NO_ATTENTION, top=top, span=span, head=head)

    def _pack(self, kept: KeptTiles | None) -> None:
        """Lay the weights out for the CPU: all of them for the native decoder, else each plain layer for itself."""
        if self.device.type != "cpu":
            return
        give_back_free_memory()  # of reading the tokenizer and of the probes: packing takes the most
        with nullcontext() if kept is None else kept.used():
            self.native_decoder = native_trial.adopt(
                self.model, self.max_length, self._logits, self.mixers, self._sample
            )
        if self.native_decoder is not None:
            if kept is not None:
                kept.write()
            return
        odd = why_not_its_weights(self.model, [mixer.module for mixer in self.mixers])
        if odd is not None and not fits_by_name(self.model):
            log.warning("model '%s' is computed layer by layer, which is slower: %s", self.name, odd)
        speed = bfloat16_speed() if self.dtype == torch.bfloat16 else 1.0
        if speed < _SLOW:
            log.warning(
                "model '%s' runs on the general path in bfloat16, which this processor multiplies %.0f times more "
                "slowly than float32: give --dtype float32 (dtype='float32')",
                self.name,
                1.0 / speed,
            )
        if self.dtype in (torch.float32, torch.bfloat16):
            pack_quantised(self.model)
        hold(self.model)  # without a compiler nothing was packed
        if can_prepack(self.dtype, self.device):
            expected_MV = trial.read(self._logits, self.max_length)
            prepack(self.model)
            self._compare("packed weights", trial.read(self._logits, self.max_length), expected_MV)

    def _check_codes(self, odd: str | None) -> None:
        """Refuse rounded keys and values where the native decoder does not compute the model."""
        if odd is not None:
            raise ConfigError(
                f"kv_cache_dtype='{self.kv_cache_dtype}' is for models that the native CPU decoder computes, and not "
                f"model '{self.name}': {odd}; leave it out"
            )

    def _logits(self, batch: PackedBatch, plan: Plan) -> Tensor:
        with self._sampled():
            return self.forward(batch, plan).logits_MV

    def _sampled(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sample is None else self._sample.running()

    def _compare(self, what: str, found_MV: Tensor, expected_MV: Tensor) -> None:
        difference = trial.difference(found_MV, expected_MV, self.dtype)
        if difference is not None:
            raise Mispacked(f"{what} and the model's own layers do not agree: {difference}")

    def _probe(self) -> int | None:
        """Refuse a model that computes packed batches wrongly, before a run; return the smallest window of a layer."""
        kind = type(self.model).__name__
        PHASES.info("checking %s", self.name)
        if self._sample is not None:
            try:
                window = self._check(self._sample.span)
            except Exception as error:  # perhaps a layer needs one that was left out: probe all
                log.debug("model '%s': a sample of its layers cannot be probed: %s", self.name, error)
                self._sample = None
            else:
                if not self._sample.index_counts:
                    return window
                self._sample = None
            hold(self.model)
        try:
            return self._check(self._whole)
        except ForetokenError as error:
            raise UnsupportedArchitecture(
                f"model '{self.name}' ({kind}) is not supported: {error}{_counting(self.model)}"
            ) from error
        except Exception as error:
            # hundreds of families raise whatever they like when they are given a batch they did not expect
            raise UnsupportedArchitecture(
                f"model '{self.name}' ({kind}) cannot be run as a packed batch: {str(error).strip()[:300]}"
            ) from error

    def _check(self, span: Span) -> int | None:
        """Run the probes; return the smallest window of the layers that they ran."""
        mixing, run = {mixer.layer for mixer in self.mixers}, range(span.first, span.last)
        window = probe.check(
            self._logits, self.num_layers, self.max_length, mixing=mixing, silent=self._silent, layers=run
        )
        with self._sampled():
            trial.check_positions(self.model, self.max_length, self.device)
        return window


def _sample(model: Any) -> Sample | None:
    """Layers to try in place of all; None: there is no telling which."""
    try:
        with torch_on_one_thread():
            return Sample(model)
    except Exception as error:  # hundreds of families have parts that are not where others have them
        log.debug("all layers are tried: %s", error)
        return None


def _counting(model: Any) -> str:
    """The explanation for a model with a forward that takes no positions; empty if it takes them."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return ""
    return (
        "; its forward takes no 'position_ids': it counts positions by itself, as the decoders of encoder-decoder "
        "models do, and the positions of several requests or of a tree cannot be given"
    )


class _NoAttention(Plan):
    """The plan of a forward that runs no layer."""

    native = NativePlan(KVCache(0, 1, 1))

    def attend(self, *args: Any, **options: Any) -> Tensor:
        raise RuntimeError("attention was called in a forward without layers")


_NO_ATTENTION = _NoAttention()
