"""What a fused decoder needs to know of a plan in order to compute it in one piece.

A plan that can be described like this is computed by ``models/fused``, where that fits the model; every other plan is
called layer by layer through ``attend``. Both ways give the same result; what is sparse is described part by part, and
a part that is absent is dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.models.cache import KVCache


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One forward's plan, described.

    Attributes:
        cache: where keys and values are written and read.
    """

    cache: KVCache
