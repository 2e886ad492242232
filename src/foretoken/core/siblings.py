"""How the children of a tree node are drawn, by each kind of law. The verifier is told the kind; see core/draft.py."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.draft import HubPair, Sampled, Tabulated, TopThenSampled, WithoutReplacement
from foretoken.core.randomness import Streams


def draw_siblings(kind: type[Tabulated], q_V: Tensor, count: int, rng: Streams) -> list[int]:
    """Children of one node, in drafting order.

    Args:
        kind: the law.
        q_V: float32 [V], sums to 1.
        count: children that are wanted; there are fewer where q has fewer tokens and none may repeat.
        rng: purpose draft.
    Returns:
        1 to ``count`` tokens; the number depends on q and ``count`` alone, never on what was drawn.
    """
    if kind is Sampled:
        return [rng.categorical("draft", q_V) for _ in range(count)]
    if count > 1:
        count = min(count, int((q_V > 0).sum()))
    if count == 1:
        return [rng.categorical("draft", q_V)]
    if kind is WithoutReplacement:
        return torch.multinomial(q_V, count, generator=rng.generator("draft")).tolist()
    if kind is TopThenSampled:
        top = q_V.topk(count - 1).indices.tolist()
        return [*top, rng.categorical("draft", q_V.index_fill(0, torch.tensor(top, device=q_V.device), 0.0))]
    assert kind is HubPair
    hub = hub_of(q_V)
    first = rng.categorical("draft", q_V)
    if first != hub:
        return [first, hub]
    return [hub, rng.categorical("draft", q_V.index_fill(0, torch.tensor([hub], device=q_V.device), 0.0))]


def hub_of(q_V: Tensor) -> int:
    """The most probable token, the first of equals: drafter and verifier must mean the same one."""
    return int((q_V == q_V.max()).nonzero()[0])
