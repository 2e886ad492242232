"""Probe a new model: does it compute a packed batch over our own cache as its authors intended?

Two tiny forwards through a plan that records the calls and returns zeros. A model that would compute silently wrong
results later is refused here, with the reason:

    every layer calls the attention interface, exactly once,     no attention of its own, no recurrent layer but those
        or its state-space mixer does                                that models/ssm can read
    the mask the library builds for a layer is causal, within    no bidirectional, chunked or prefix mask
        the window that the layer announces
    equal tokens at equal positions have equal queries, keys     no mixing of rows outside attention and mixers,
        and values wherever they stand in the batch, equal           no position but the given one
        inputs of a mixer, and
        equal logits, since attention answers with zeros
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from foretoken.core.errors import ForetokenError, UnsupportedArchitecture
from foretoken.core.protocols import Plan, Scoring
from foretoken.forward import attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.ssm.layout import Mixer, Projected

_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# where masks usually change: near the start, and around powers of two up to half a million positions
_EDGES = sorted({0, 1, 2, 3, 5, 7, 11, 100, 1000, *(2**n + d for n in range(4, 20) for d in (-1, 0, 1))})


class RollCall(Plan):
    """A plan that records which layers call it, with their arguments, and returns zeros.

    Args:
        num_layers: layers that should call.
        max_length: positions that will be served; a mask may differ beyond them.
        twins: two packed rows that hold the same token at the same position.
    """

    def __init__(self, num_layers: int, max_length: int, twins: tuple[int, int] | None = None) -> None:
        self.num_layers = num_layers
        self.max_length = max_length
        self.twins = twins
        self.layers: set[int] = set()
        self.mixing: set[int] = set()
        self.window: int | None = None  # the smallest that was announced
        self.masks: dict[int, tuple[Tensor, _MaskFunction]] = {}  # by identity; the tensor is kept alive with it

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        if not 0 <= layer < self.num_layers:
            raise UnsupportedArchitecture(f"a layer calls itself number {layer} of {self.num_layers}")
        if layer in self.layers:
            raise UnsupportedArchitecture(f"layer {layer} attends more than once in a step")
        self.layers.add(layer)
        if scoring.window is not None:
            self.window = min(scoring.window, self.window or scoring.window)
        self._check_twins(layer, [each.transpose(0, 1) for each in (q_HTD, k_GTD, v_GTD)])
        return q_HTD.new_zeros((q_HTD.shape[1], q_HTD.shape[0], v_GTD.shape[-1]))

    def mix(self, mixer: Mixer, projected: Projected) -> Tensor:
        if mixer.layer in self.mixing:
            raise UnsupportedArchitecture(f"the mixer of layer {mixer.layer} is called more than once in a step")
        self.mixing.add(mixer.layer)
        self._check_twins(mixer.layer, [projected.raw_TC, projected.steps_TH])
        return projected.raw_TC.new_zeros((len(projected.raw_TC), mixer.heads, mixer.head_width), dtype=torch.float32)

    def _check_twins(self, layer: int, inputs: Sequence[Tensor]) -> None:
        if self.twins is not None:
            first, second = self.twins
            if not all(same(rows_TX[first], rows_TX[second]) for rows_TX in inputs):
                raise UnsupportedArchitecture(
                    f"rows of a packed batch mix, or their positions are not the given ones, before layer {layer}"
                )

    def check_mask(self, mask: Tensor, window: int | None) -> None:
        """Refuse a mask that is not causal within ``window``; called where a layer brings one."""
        known = self.masks.get(id(mask))
        if known is None:
            raise UnsupportedArchitecture("it builds an attention mask of its own")
        edges = {*_EDGES, *(() if window is None else (window - 1, window, window + 1, 2 * window))}
        served = sorted(edge for edge in edges | {self.max_length - 1} if edge < self.max_length)
        try:
            causal = _is_causal(known[1], served, window, mask.device)
        except (IndexError, RuntimeError):
            # it looks something up for each token (which image a token belongs to): ask about the tokens there are
            causal = _is_causal(known[1], range(mask.shape[-1]), window, mask.device)
        if not causal:
            what = "is not causal" if window is None else f"is not causal within its window of {window}"
            first = self._first_unseen(known[1], mask.device) if window is None else None
            remedy = "" if first is None else f" beyond {first} positions: serve no more, with max_model_len={first}"
            raise UnsupportedArchitecture(f"its attention mask {what}{remedy}")

    def _first_unseen(self, allowed: _MaskFunction, device: torch.device) -> int | None:
        """The first position that does not see position 0, if a context that ends before it would be causal."""
        zero = torch.zeros((), dtype=torch.int64, device=device)
        q_P1 = torch.arange(self.max_length, device=device)[:, None]
        try:
            unseen = (~allowed(zero, zero, q_P1, zero.expand(1, 1))).flatten().nonzero()
            first = int(unseen[0]) if len(unseen) else 0
            edges = sorted(edge for edge in {*_EDGES, first - 1} if 0 <= edge < first)
            return first if first > 1 and _is_causal(allowed, edges, None, device) else None
        except (IndexError, RuntimeError):  # it looks something up for each token
            return None


def _is_causal(allowed: _MaskFunction, edges: Sequence[int], window: int | None, device: torch.device) -> bool:
    q = torch.tensor(edges, device=device)[:, None]
    k = q.T
    expected = k <= q
    if window is not None:
        expected &= q - k < window
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return torch.equal(allowed(zero, zero, q, k).expand_as(expected), expected)


_watching: ContextVar[RollCall | None] = ContextVar("watching", default=None)


def check(
    forward: Callable[[PackedBatch, RollCall], Tensor],
    num_layers: int,
    max_length: int,
    *,
    mixing: Collection[int] = (),
    silent: Collection[int] = (),
    layers: Collection[int] | None = None,
) -> int | None:
    """Run the two probes.

    Args:
        forward: computes the wanted rows' logits of a batch.
        num_layers: layers of the model.
        max_length: positions that will be served.
        mixing: layers that have a state-space mixer; they may attend next to it.
        silent: layers that keep nothing of their rows.
        layers: those that run; None: all.
    Returns:
        the smallest sliding window of any layer; None if there is none.
    Raises:
        UnsupportedArchitecture: the reason; whatever the model itself raises passes through.
    """
    roll = RollCall(num_layers, max_length)
    batch = PackedBatch()
    batch.add_chunk(0, 0, [0, 1], wanted=1)
    with _watch_masks(roll):
        logits_MV = forward(batch, roll)
    if len(logits_MV) != 1:
        raise UnsupportedArchitecture("it cannot score chosen rows only ('logits_to_keep')")
    run = set(range(num_layers) if layers is None else layers)
    absent = sorted(run - {*roll.layers, *mixing, *silent})
    if absent:
        raise UnsupportedArchitecture(
            f"attention of layer {absent[0]} ({len(absent)} of {num_layers} layers) "
            "does not go through the library's attention interface"
        )
    if idle := sorted(roll.mixing ^ run.intersection(mixing)):
        raise UnsupportedArchitecture(f"the mixers of layers {idle} are not called")
    batch = PackedBatch()
    for slot, tokens in enumerate(([0, 1], [0])):
        batch.add_chunk(slot, 0, tokens, wanted=1)
    batch.wanted = [0, 1, 2]
    logits_MV = forward(batch, RollCall(num_layers, max_length, twins=(0, 2)))
    if not same(logits_MV[0], logits_MV[2]):
        raise UnsupportedArchitecture("rows of a packed batch mix outside attention")
    return roll.window


def refusal(model: Any, check: Callable[[], str | None], why: str) -> str | None:
    """Why a trial of a loaded model fails, whatever it raises; None if it does not. Its counts of layers stay.

    Args:
        model: a language model.
        why: the reason where the library's code raises.
    """
    counted = model.layers_loaded, model.layer_rows
    try:
        return check()
    except ForetokenError as error:
        return str(error)
    except Exception as error:  # hundreds of families raise whatever they like
        return f"{why} ({' '.join(str(error).split())[:200]})"
    finally:
        model.layers_loaded, model.layer_rows = counted


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; NaN counts as equal, because damaged weights are reported where they are used."""
    # rows of one product may round differently, layer upon layer; mixed rows differ by the scale of the values
    tolerance = max(1e-4, 4 * torch.finfo(a.dtype).eps)
    scale = torch.maximum(a.abs().max(), b.abs().max())
    return not bool(((a - b).abs() > tolerance * scale).any())


@contextmanager
def _watch_masks(roll: RollCall) -> Iterator[None]:
    """Let the library build its masks during one forward of this thread, and record the rule of each of them.

    Without a mask function under our name it builds none, and that is how every other forward runs.
    """
    registry = AttentionMaskInterface._global_mapping
    token = _watching.set(roll)
    AttentionMaskInterface.register(attention.NAME, _note_mask)
    try:
        yield
    finally:
        registry.pop(attention.NAME, None)
        _watching.reset(token)


def _note_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: _MaskFunction, device: Any = None, **_: Any
) -> Tensor | None:
    """Stand-in for a mask, with the library's signature; its identity maps to the mask's function."""
    roll = _watching.get()
    if roll is None:  # another thread's forward
        return None
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    roll.masks[id(mask)] = (mask, mask_function)
    return mask
