"""What a method declares of a draft network, so that the one run (run.py) can train it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.state_network import NetworkConfig, StateNetwork, TrainableNetwork
from foretoken.drafting.feature_heads.unroll import Unroll, unrolled
from foretoken.models.load import load_config
from foretoken.train.feature_heads.command import NetworkOptions
from foretoken.train.feature_heads.objective import HeadObjective, Unrolled
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe, part_recipe
from foretoken.train.sources import mixture
from foretoken.train.trainer import Bounds, Schedule

BLOCK = 256  # tokens; drafting needs near context. Served heads see as far, since they never learned to look further
RATES = Rates(muon=None, adamw=2e-3, warmup=0.03, decay=0.9)
BOUNDS = Bounds(minutes=30)
SOURCES = mixture("base")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass of the training loop over the network.

    Attributes:
        name: for the record, and of its folder.
        share: of the run's bounds.
        own_words: share of its text that the target writes; none is written if features are given.
        replies_only: whether only positions of replies count; else all do.
        rates: None: the recipe's.
    """

    name: str = "head"
    share: float = 1.0
    own_words: float = 0.0
    replies_only: bool = True
    rates: Rates | None = None


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """One draft network, and how it is trained.

    Attributes:
        target: the model that is read: zoo name, folder or hub id.
        part: the network's class.
        recipe: everything else that decides the run.
        stages: in their order.
        shape: the options that make it another network, for the record.
        steps: S that are unrolled.
        config: (the target's configuration, its name, its fingerprint) -> the network's config, scoring all tokens.
        build: (config, the frozen target, the tokens that it scores or None) -> the untrained network, float32, drawn
            from torch's generator.
        num_scored: tokens that it scores, the most frequent ones; None: all of them; see batches.py for BY_COVERAGE.
        own_rows: whether it has an LM head of its own.
        objective: its loss, made of batches, embedding, the rows that score, and S.
        unroll: its output at every column, as ``unrolled`` of drafting/feature_heads/unroll.py.
        keep: (the tokens that the last stage was trained on, block by block; the folder) -> what else is stored of
            them, for the record; None: nothing is.
        original: the model that ``target`` is another layout of: stored features are of it.
    """

    target: str
    part: type[TrainableNetwork]
    recipe: Recipe
    stages: tuple[Stage, ...]
    shape: Mapping[str, Any]
    steps: int
    config: Callable[[Any, str, str], NetworkConfig]
    build: Callable[[Any, FrozenTarget, Tensor | None], TrainableNetwork]
    num_scored: int | None = None
    own_rows: bool = False
    objective: type[HeadObjective] = Unrolled
    unroll: Unroll = unrolled
    keep: Callable[[Iterable[list[int]], Path], dict[str, Any]] | None = None
    original: Path | None = None


def recipe_for(method: str, description: str, target: str, own_words: float, rates: Rates = RATES) -> Recipe:
    """The recipe of every draft network that learns from blocks of ``BLOCK`` tokens of text.

    Raises:
        ConfigError: the share is out of range.
    """
    schedule = Schedule(batch=4, micro_batch=4, rates=rates)
    return part_recipe(
        method, description, target, own_words, sources=SOURCES, block=BLOCK, schedule=schedule, bounds=BOUNDS
    )


def untrained(
    part: type[StateNetwork], config: Any, target: FrozenTarget, ids_K: Tensor | None, *, own_head: bool = False
) -> StateNetwork:
    """An untrained network that hands the target's state on nearly as it is; its own LM head begins as the target's."""
    network = part(config, ids_K=ids_K, own_head=own_head)
    network.draw()
    network.begin_near(target.model)
    if network.lm_head is not None:
        with torch.no_grad():
            rows_KW = StateNetwork.lm_head_of(part(config, ids_K=ids_K), target.model)
            network.lm_head.weight.copy_(rows_KW)
    return network


def num_scored(options: NetworkOptions) -> int:
    """Tokens that a network is to score, the most frequent ones, or BY_COVERAGE of batches.py.

    Raises:
        ConfigError: the target has fewer.
    """
    vocabulary, given = vocabulary_of(options.target), options.draft_vocab_size
    if given is not None and given > vocabulary:
        raise ConfigError(f"--draft-vocab-size {given}: {options.target} has {vocabulary} tokens")
    return given or options.num_scored


def vocabulary_of(target: str) -> int:
    """The target's number of tokens."""
    return load_config(target).get_text_config(decoder=True).vocab_size
