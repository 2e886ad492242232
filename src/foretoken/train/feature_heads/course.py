"""What a method says of a head over a target's hidden states, so that the one run (run.py) can train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork
from foretoken.drafting.feature_heads.state_network import NetworkConfig, TrainableNetwork
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.models.load import load_config
from foretoken.train.feature_heads.objective import HeadObjective, Unrolled
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe
from foretoken.train.sources import mixture
from foretoken.train.trainer import Bounds, Schedule

STEPS = 4
BLOCK = 256  # tokens; what drafting needs is near, and attention is unrolled S times
RATES = Rates(muon=None, adamw=2e-3, warmup=0.03, decay=0.9)


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What is trained, beside the target; a subclass adds what its head is made of.

    Attributes:
        draft_vocab_size: K; None: ``scored``, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        scored: K where nothing else is asked for.
    """

    scored: ClassVar[int] = 2048

    draft_vocab_size: int | None = None
    mlp_width: int | None = None

    def __post_init__(self) -> None:
        if self.mlp_width is not None and self.mlp_width % 32:
            raise ConfigError(f"--mlp-width {self.mlp_width}: a multiple of 32")

    def kept(self, target: str) -> int:
        """Tokens that a target's head is to score, the most frequent ones.

        Raises:
            ConfigError: more are asked for than the target has.
        """
        vocabulary = vocabulary_of(target)
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocabulary:
            raise ConfigError(f"--draft-vocab-size {self.draft_vocab_size}: {target} has {vocabulary} tokens")
        return self.draft_vocab_size or self.scored


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass of the loop over the head.

    Attributes:
        name: for the record, and of its folder.
        share: of the run's bounds.
        own_words: share of its text that the target writes; nothing is written if features are given.
        replies_only: whether only positions of replies count; else all do.
        rates: None: the recipe's.
    """

    name: str = "head"
    share: float = 1.0
    own_words: float = 0.0
    replies_only: bool = True
    rates: Rates | None = None


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a method says of the head that is trained.

    Attributes:
        part: its class.
        recipe: what decides the run beside the shape.
        stages: in their order.
        shape: what else makes it another head.
        steps: S that are unrolled.
        config: (the target's configuration, its name, its fingerprint, tokens that are scored or None) -> what the head
            is.
        build: (config, the frozen target, the tokens that it scores or None) -> the untrained head, float32, drawn from
            torch's generator.
        kept: tokens that it scores, the most frequent ones; None: all of them.
        own_head: whether it has a head of its own.
        objective: its loss, made of lessons, embedding, the rows that score, and S.
        unroll: what it says from every column, as ``unrolled`` of drafting/feature_heads/unroll.py.
        read: (the tokens that the last stage was trained on, block by block; the folder) -> what is kept of them, for
            the record; None: nothing is.
    """

    part: type[TrainableNetwork]
    recipe: Recipe
    stages: tuple[Stage, ...] = field(default_factory=lambda: (Stage(),))
    shape: Mapping[str, Any]
    steps: int
    config: Callable[[Any, str, str, int | None], NetworkConfig]
    build: Callable[[Any, FrozenTarget, Tensor | None], TrainableNetwork]
    kept: int | None = None
    own_head: bool = False
    objective: type[HeadObjective] = Unrolled
    unroll: Unroll = unrolled
    read: Callable[[Iterable[list[int]], Path], dict[str, Any]] | None = None


def recipe_for(method: str, description: str, target: str, own_words: float, rates: Rates = RATES) -> Recipe:
    """What decides a run on text, beside the shape, of every head that learns from blocks of ``BLOCK`` tokens.

    Raises:
        ConfigError: the share is out of range.
    """
    if not 0 <= own_words <= 1:
        raise ConfigError(f"--own-words {own_words}: a share must be from 0 to 1")
    return Recipe(
        name=method,
        description=description,
        config=lambda tokenizer: load_config(target),
        sources=mixture("base"),
        block=BLOCK,
        schedule=Schedule(batch=4, micro_batch=4, rates=rates),
        bounds=Bounds(minutes=30),
        tokenizer=target,
        teacher=target,
        own_words=own_words,
    )


_Head = TypeVar("_Head", bound=LayeredNetwork)


def begun(head: _Head, target: FrozenTarget) -> _Head:
    """The head with its weights drawn, so that the target's feature is handed on nearly as it is."""
    head.draw()
    head.begin_near(target.model)
    return head


def vocabulary_of(target: str) -> int:
    """The target's tokens."""
    found: int = load_config(target).get_text_config(decoder=True).vocab_size
    return found
