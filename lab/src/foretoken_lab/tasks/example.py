"""One question with its answer, and which half of a task it belongs to.

Training and evaluation draw from the same generators, so the halves must not meet. Which half an example is in is a
function of its prompt alone: whatever seed drew it, an evaluation never contains a prompt of the training half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.core.errors import ConfigError, nearest

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_SHARE = 10  # one prompt in so many is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question of a task.

    Attributes:
        id: names the example; generated ones are named by a hash of their prompt.
        prompt: the user's message.
        answer: what scoring compares with.
        response: a full answer to train on; it ends with ``answer``. Equal to it where there is nothing to add.
        category: for accuracy by kind.
        alternatives: further answers that are as good as ``answer``.
        depth: position of the needed fact in the prompt, from 0 (start) to 1 (end); None if there is none.
        calls: arguments that distinguish a function from others, one tuple a call; empty if the answer is no function.
    """

    id: str
    prompt: str
    answer: str
    response: str
    category: str
    alternatives: tuple[str, ...] = ()
    depth: float | None = None
    calls: tuple[tuple[Any, ...], ...] = ()


def prompt_hash(prompt: str) -> str:
    """16 hexadecimal digits that name a prompt."""
    return hashlib.blake2b(prompt.encode("utf-8"), digest_size=8).hexdigest()


def split_of(prompt: str) -> Split:
    """The half that a prompt belongs to."""
    return "heldout" if int(prompt_hash(prompt), 16) % HELDOUT_SHARE == 0 else "train"


def only(split: Split, examples: Iterable[Example]) -> Iterator[Example]:
    """The examples of one half.

    Raises:
        ConfigError: unknown split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: {nearest(str(split), SPLITS)}")
    return (example for example in examples if split_of(example.prompt) == split)
