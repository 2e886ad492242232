"""Pack a model for the native decoder and compare its results with those of the library.

Two batches are read before and after packing: chains and a tree, with cached rows after them, at positions from the
first to the last that the model serves. A model that looks like a Llama, but scales, caps or routes somewhere
inside, differs here; it gets its own modules back. Windows may be longer than the trial: those that the layers declare
must equal ours.

Distributions are compared, not logits: a shift that all logits of a row have in common, which softmax does not see, may
be many times their spread. How far rounding alone moves them depends on the model, so it is measured: the library's
modules read the same once more, shaken. So a deep model of wide random weights, in which a last bit grows to half of
the spread, is taken, too.

Where rows choose experts, a close call goes another way as soon as something is rounded otherwise, and such a row's
logits are others altogether. So a model of experts in bfloat16 or in fewer bits is judged by its median rows.

Letters: M wanted rows, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.protocols import Plan, Scoring
from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.forward.span import Span
from foretoken.forward.ssm.layout import Mixer, Projected
from foretoken.forward.ssm.state import Mixing, cache_for
from foretoken.models.adoption import fit, trial
from foretoken.models.adoption.sample import Sample
from foretoken.models.quantised.rounding import precision_of
from foretoken.native.decoder import NativeDecoder
from foretoken.native.packing import TiledLinear

# of a row's logits, the standard deviation of their difference over their own: both sides round; in bfloat16, by how
# much depends on the model
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
# activations of 8 bits make a step of a last bit, which grows on from layer to layer: 0.03 to 0.07 measured on zoo:base
_QUANTISED = 0.15
# through a few layers of a sample they have not grown: 0.01 from shaking SmolLM2's, where attention scores that are 1.5
# times too large, or residuals of 0.9, make 0.07
_QUANTISED_SAMPLE = 0.02
# relative perturbation of products: one last bit of bfloat16, or 64 of float32, because one would hardly change a code
# of an activation, and chance would decide which
_SHAKEN = {torch.float32: 64 * torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
_SHAKES = 3  # of a sample, the largest of so many differences: they are few sums, and cost little
_ROUNDINGS = 3.0  # between us and the library, against those: up to 1.7 on random models, but for scores in thousands
_UNRELATED = 1.2  # logits that have nothing in common are 1.4 of their spread apart
_FARTHEST = 2**18  # positions that are tried: of a billion, which a config may promise, rotary tables take 100 GB
_CHAIN, _PARENTS = 17, (-1, 0, 0, 2, 1)

log = logging.getLogger(__name__)


def adopt(
    model: Any,
    max_length: int,
    general: Callable[[PackedBatch, Plan], Tensor],
    mixers: Sequence[Mixer] = (),
    sample: Sample | None = None,
) -> NativeDecoder | None:
    """The native twin of a model, its linear layers packed; None where the general path has to do.

    A family that could have been fused but is not says so in a warning; so does any with state-space layers, which the
    general path computes many times more slowly.

    Args:
        model: a causal LM of transformers.
        max_length: positions that a row may have.
        general: logits [M, V] of a batch through the library's modules, which attend by a plan.
        mixers: its state-space layers.
        sample: the layers and columns that ``general`` computes; None: all.
    """
    reason = fit.misfit(model, mixers)
    if reason is not None:
        if mixers or fit.fits_by_name(model):
            log.warning("the native CPU decoder is not used for this model, the slower general path is: %s", reason)
        return None
    dtype, config = next(model.parameters()).dtype, model.config
    span = Span(0, config.num_hidden_layers) if sample is None else sample.span
    columns = slice(None) if sample is None else sample.columns_C
    reach = min(max_length, _FARTHEST)

    def tried(forward: Callable[[PackedBatch, KVCache], Tensor]) -> Tensor:
        layers = range(span.first, span.last)
        cache = cache_for(mixers, config.num_hidden_layers, 2, reach, dtype, torch.device("cpu"), layers)
        return read(forward, cache, reach, config.vocab_size)

    precision = precision_of(model)
    routed = (dtype != torch.float32 or precision is not None) and fit.has_experts(model)
    announced: dict[int, int | None] = {}
    expected = tried(lambda batch, cache: general(batch, PlainAttention(cache, batch, windows=announced)))
    shaken = []
    for seed in range(1 if sample is None else _SHAKES):
        with nullcontext() if sample is None else sample.running(), _shaken(model, _SHAKEN[dtype], seed):
            rounded = tried(lambda batch, cache: general(batch, PlainAttention(cache, batch, rounded=True)))
        shaken.append(difference(rounded, expected, routed=routed))
    least = TOLERANCE[dtype]
    if precision is not None:
        least = _QUANTISED if sample is None else _QUANTISED_SAMPLE
    allowed = max(least, min(_ROUNDINGS * max(shaken), _UNRELATED))
    if sample is not None:
        sample.free_native_layers()  # before all layers are packed
    adoption = fit.Adoption(model, max_length, mixers)
    twin = adoption.decoder
    found = tried(lambda batch, cache: twin.forward(batch, NativePlan(cache), span, top=0).logits_MV[:, columns])
    worst = difference(found, expected, routed=routed)
    odd = next((layer for layer, window in announced.items() if twin.windows[layer] != (window or 0)), None)
    unlike = None if sample is None else _unlike(twin, sample)
    if worst <= allowed and odd is None and unlike is None:
        twin.forget_positions()  # the trial went to the last one: of a million, tables take gigabytes
        return twin
    adoption.undo()
    if odd is not None:
        log.warning(
            "the native CPU decoder is not used, the slower general path is: layer %d attends to a window of %s, "
            "not of %d",
            odd,
            announced[odd],
            twin.windows[odd],
        )
        return None
    if worst <= allowed:
        log.warning("the native CPU decoder is not used, the slower general path is: %s", unlike)
        return None
    log.warning(
        "the native CPU decoder computes other logits than the model's own modules (by %.3g of their spread, "
        "where rounding explains %.3g), so the slower general path is used%s",
        worst,
        allowed,
        "" if dtype == torch.float32 else "; with --dtype float32 (dtype='float32') it may be another matter",
    )
    return None


def _unlike(twin: NativeDecoder, sample: Sample) -> str | None:
    """How a layer's native description differs from that of the layer that was tried in its place; None: not at all."""
    for layer, tried in sample.stand_ins():
        ours, theirs = twin.facts(layer), twin.facts(tried)
        name = next((each for each in ours if ours[each] != theirs[each]), None)
        if name is not None:
            return f"layer {layer} has {name}={ours[name]} there, and layer {tried}, of the same kind, {theirs[name]}"
    return None


@contextmanager
def _shaken(model: Any, by: float, seed: int = 0) -> Iterator[None]:
    """While inside, every element that a linear layer gives is off by a random share of itself, up to ``by``."""
    generator = torch.Generator().manual_seed(seed)

    def shake(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        shares = torch.rand(y.shape, generator=generator).mul_(2 * by).add_(1 - by)
        return (y.float() * shares).to(y.dtype)

    linears = [each for each in model.modules() if isinstance(each, (nn.Linear, QuantisedLinear, TiledLinear))]
    with ExitStack() as hooks:
        for each in linears:
            hooks.enter_context(each.register_forward_hook(shake))
        yield


def read(forward: Callable[[PackedBatch, KVCache], Tensor], cache: KVCache, max_length: int, vocab: int) -> Tensor:
    """Logits of two small batches, far apart in positions where the model has so many."""
    tokens = [(7 + 31 * each) % vocab for each in range(_CHAIN + 12)]
    far, near = cache.acquire(), cache.acquire()
    length = min(_CHAIN, max(1, max_length - 12))
    step = max(1, (max_length - 12) // (2 * length))  # half of the way in the first batch
    batch = PackedBatch()
    batch.add_chunk(far, 0, tokens[:length], wanted=1)
    batch.add_chunk(near, 0, tokens[3 : 3 + length // 2 + 1], wanted=1)
    batch.positions[:length] = range(0, step * length, step)
    _reserve(cache, batch)
    first_MV = forward(batch, cache).float()
    for segment in batch.segments:
        cache.commit(segment.slot, range(segment.num_rows))
    num_chain = max(1, min(4, max_length - length))
    batch = PackedBatch()
    batch.add_chunk(far, length, tokens[-num_chain:], wanted=num_chain)
    if max_length >= length // 2 + 2 + len(_PARENTS):
        batch.add_tree(near, cache.lengths[near], tokens[0], TokenTree(tokens[1 : 1 + len(_PARENTS)], _PARENTS))
    batch.positions[:num_chain] = range(max_length - num_chain, max_length)
    _reserve(cache, batch)
    return torch.cat([first_MV, forward(batch, cache).float()])


def difference(ours_MV: Tensor, theirs_MV: Tensor, *, routed: bool = False) -> float:
    """The worst row's, relative to its spread, without the shift that its logits have in common.

    Rows of a damaged model, not finite on both sides, do not count.

    Args:
        routed: the median row's of the tree, or of the others, whichever is worse.
    """
    both = ours_MV.isfinite().all(dim=1) | theirs_MV.isfinite().all(dim=1)
    if not both.any():
        return 0.0
    scale_M = theirs_MV.std(dim=1, correction=0).clamp_min(1e-6)
    error_M = ((ours_MV - theirs_MV).std(dim=1, correction=0) / scale_M).nan_to_num(nan=torch.inf)
    if not routed:
        return float(error_M[both].max())
    tree = 1 + len(_PARENTS)
    parts = (error_M[part][both[part]] for part in (slice(-tree), slice(-tree, None)))
    return max(float(part.median()) for part in parts if len(part))


class PlainAttention(Plan):
    """Attention written out, as a plan: slow, and independent of every other one.

    Args:
        cache: where keys and values are written and read.
        batch: the rows.
        rounded: round attention weights and the outputs of recurrences to the model's dtype, as faster kernels do.
        windows: each layer's is noted here.
    """

    native = None

    def __init__(
        self, cache: KVCache, batch: PackedBatch, *, rounded: bool = False, windows: dict[int, int | None] | None = None
    ) -> None:
        self._rounded = rounded
        self._windows = {} if windows is None else windows
        self._cache = cache
        self._batch = batch
        self._segments = batch.segments
        self._mixing: Mixing | None = None

    def mix(self, mixer: Mixer, projected: Projected) -> Tensor:
        if self._mixing is None:
            self._mixing = Mixing(self._cache, self._batch)
        y_THP = self._mixing(mixer, projected)
        return y_THP.to(projected.raw_TC.dtype).to(y_THP.dtype) if self._rounded else y_THP

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        """See forward/dense.py."""
        self._windows[layer] = scoring.window
        keys_SGCD, values_SGCD = self._cache.buffers(layer, k_GTD, v_GTD)
        outputs = []
        for segment in self._segments:
            rows = slice(segment.start, segment.start + segment.num_rows)
            first = segment.prefix + segment.tail
            k_GLD, v_GLD = (each[segment.slot, :, : first + segment.num_rows] for each in (keys_SGCD, values_SGCD))
            k_GLD[:, first:], v_GLD[:, first:] = k_GTD[:, rows], v_GTD[:, rows]
            outputs.append(trial.attended(segment, q_HTD[:, rows], k_GLD, v_GLD, scoring, rounded=self._rounded))
        return torch.cat(outputs)


def _reserve(cache: KVCache, batch: PackedBatch) -> None:
    for segment in batch.segments:
        cache.reserve(segment.slot, segment.num_rows)
