"""How the children of a tree node are drawn, by each kind of distribution. The verifier knows the kind; see
core/draft.py.
"""

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.draft import HubPair, Sampled, Tabulated, TopThenSampled, WithoutReplacement
from foretoken.core.randomness import Streams


def draw_siblings(
    kind: type[Tabulated], q_V: Tensor, count: int, rng: Streams, columns: Columns | None = None
) -> list[int]:
    """Children of one node, in drafting order.

    Args:
        kind: the distribution.
        q_V: float32 [V], sums to 1; [C] with ``columns``.
        count: children that are wanted; there are fewer where q has fewer tokens and none may repeat.
        rng: purpose draft.
        columns: of q; None: column i is token i.
    Returns:
        1 to ``count`` tokens; the number depends on q and ``count`` alone, never on the drawn tokens.
    """
    drawn = _draw(kind, q_V, count, rng, columns)
    return drawn if columns is None else columns.ids_C[drawn].tolist()


def _draw(kind: type[Tabulated], q_V: Tensor, count: int, rng: Streams, columns: Columns | None) -> list[int]:
    """:func:`draw_siblings`, as columns."""
    if kind is Sampled:
        return [rng.categorical("draft", q_V) for _ in range(count)]
    if count > 1:
        count = min(count, int((q_V > 0).sum()))
    if count == 1:
        return [rng.categorical("draft", q_V)]
    if kind is WithoutReplacement:
        return rng.distinct("draft", q_V, count)
    if kind is TopThenSampled:
        top = q_V.topk(count - 1).indices.tolist()
        return [*top, rng.categorical("draft", q_V.index_fill(0, torch.tensor(top, device=q_V.device), 0.0))]
    assert kind is HubPair
    hub = hub_of(q_V, columns)
    first = rng.categorical("draft", q_V)
    if first != hub:
        return [first, hub]
    return [hub, rng.categorical("draft", q_V.index_fill(0, torch.tensor([hub], device=q_V.device), 0.0))]


def hub_of(q_V: Tensor, columns: Columns | None = None) -> int:
    """The column of the most probable token, of equals the smallest id: drafter and verifier must mean the same one."""
    equals = (q_V == q_V.max()).nonzero()[:, 0]
    return int(equals[0] if columns is None else equals[columns.ids_C[equals].argmin()])
