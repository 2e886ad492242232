"""The training halves of the generated tasks: examples without end, given a seed; no evaluation asks any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from foretoken_lab.tasks import arithmetic, forms, keys, profiles
from foretoken_lab.tasks.example import Example

TASKS: dict[str, Callable[[int], Iterator[Example]]] = {
    "arithmetic": lambda seed: arithmetic.examples("train", seed),
    "profiles": lambda seed: profiles.examples("train", seed),
    "keys": lambda seed: keys.examples("train", seed, length=700),
    "json": lambda seed: forms.json_examples("train", seed),
    "code": lambda seed: forms.code_examples("train", seed),
}
