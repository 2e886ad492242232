"""Mixtures of the zoo's heads that are not those of a model: ``longspec``, which learns to look far back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.train.mixture import Source
from foretoken_lab.recipes import base
from foretoken_lab.recipes import sources as s


def longspec(root: Path) -> list[Source]:
    """Half of it is long, or its questions need text far back; the other half is that of the zoo's other heads."""
    return [
        s.hidden_keys(0.2, root),
        s.recall(0.1, root),
        s.corpus("qmsum", 0.2, root),
        *(replace(source, share=source.share * 0.5) for source in base.mixture(root)),
    ]
