"""Passages and questions made of a few words, so that every few tokens something else is nearest."""

from __future__ import annotations

import random

from foretoken_lab.rag.passages import Passage

_WORDS = [
    "river",
    "mountain",
    "coal",
    "copper",
    "fishing",
    "harbour",
    "rainfall",
    "desert",
    "island",
    "railway",
    "president",
    "parliament",
    "export",
    "import",
    "population",
    "language",
    "religion",
    "border",
    "coast",
    "forest",
    "cattle",
    "cotton",
    "banana",
    "coffee",
    "petroleum",
    "gold",
    "winter",
    "summer",
]
QUESTIONS = ("What is the main export of the island?", "Describe the coast and the harbour.")


def passages(count: int = 40, seed: int = 0) -> list[Passage]:
    """Sentences of random words, all different."""
    rng = random.Random(seed)
    return [
        Passage(str(number), f"Country {number}: " + " ".join(rng.choice(_WORDS) for _ in range(rng.randint(6, 24))))
        for number in range(count)
    ]
