"""Training of Scylla's head: text of all kinds first, then replies, half of them the target's own words.

    stage       share of the run    text                                positions    rate
    pretrain    3/4                 the mixture                         all          2e-3
    sft         1/4                 the mixture and the target's words  replies      1e-3

Paper: arXiv:2505.07858 (10 B tokens of Common Crawl, C4 and GitHub, then ShareGPT; "losses as EAGLE-2's"). Differs:
the text; the loss is that of drafting itself, unrolled (train/feature_heads/objective.py), and no feature is regressed;
each stage warms up and falls to zero linearly; rates are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.stack import LAYERS, MOST_LAYERS
from foretoken.methods.scylla.network import Scylla, ScyllaConfig
from foretoken.train.feature_heads import run as training
from foretoken.train.feature_heads.run import OWN_WORDS, RATES, STEPS, Course, Stage
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.recipe import Recipe

DRAFT_VOCABULARY = 2048
PRETRAIN = 0.75  # share of the run


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained, beside the target.

    Attributes:
        layers: D.
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        steps: S.
        pretrain: share of the run that is the first stage; 0 or 1: there is one stage only.
    """

    layers: int = LAYERS
    draft_vocab_size: int | None = None
    mlp_width: int | None = None
    steps: int = STEPS
    pretrain: float = PRETRAIN

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ConfigError(f"--layers {self.layers}: from 1 to {MOST_LAYERS}")
        training.check_mlp_width(self.mlp_width)
        if not 0 <= self.pretrain <= 1:
            raise ConfigError(f"--pretrain {self.pretrain}: a share must be from 0 to 1")


def recipe(target: str, shape: Shape, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return training.recipe_for("scylla", f"Scylla head of {shape.layers} layers of {target}", target, own_words)


def stages(shape: Shape, own_words: float) -> tuple[Stage, ...]:
    """Those whose share is not 0."""
    both = (
        Stage(name="pretrain", share=shape.pretrain, own_words=0.0, replies_only=False),
        Stage(name="sft", share=1 - shape.pretrain, own_words=own_words, rates=replace(RATES, adamw=RATES.adamw / 2)),
    )
    return tuple(each for each in both if each.share)


def run(
    name: str,
    shape: Shape,
    sources: Sequence[Source],
    out: Path,
    *,
    own_words: float = OWN_WORDS,
    features: Path | None = None,
    **loop: Any,
) -> dict[str, Any]:
    """Train a head; goes on where an interrupted run stopped.

    Args:
        own_words: share of the second stage's text that the target writes; nothing is written if features are given.
        loop: see ``train/feature_heads/run.py``, as the other arguments.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    training.check_draft_vocabulary(name, shape.draft_vocab_size)

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> ScyllaConfig:
        return Scylla.config_for(
            target, name, fingerprint, layers=shape.layers, draft_vocab_size=size, mlp_width=shape.mlp_width
        )

    def build(config: ScyllaConfig, target: FrozenTarget, ids: list[int] | None) -> Scylla:
        head = Scylla(config, ids_K=None if ids is None else torch.tensor(ids))
        head.draw()
        head.begin_near(target.model)
        return head

    chosen = Course(
        part=Scylla,
        recipe=recipe(name, shape, 0.0 if features else own_words),
        stages=stages(shape, own_words),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=build,
        kept=shape.draft_vocab_size or DRAFT_VOCABULARY,
    )
    return training.run(name, chosen, sources, out, features=features, **loop)
