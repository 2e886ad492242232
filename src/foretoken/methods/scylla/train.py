"""Training of Scylla's head: text of all kinds first, then replies, half of them the target's own words.

    stage       share of the run    text                                positions    rate
    pretrain    3/4                 the mixture                         all          RATES
    sft         1/4                 the mixture and the target's words  replies      half of them

Paper: arXiv:2505.07858 (10 B tokens of Common Crawl, C4 and GitHub, then ShareGPT; "losses as EAGLE-2's"). Differs:
the text; the loss is that of drafting itself, unrolled (train/feature_heads/objective.py), and no feature is regressed;
matrices are trained by Muon; each stage warms up and falls to zero linearly; rates are ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.stack import LAYERS, MOST_LAYERS
from foretoken.methods.scylla.network import Scylla, ScyllaConfig
from foretoken.train.feature_heads.course import STEPS, Course, HeadShape, Stage, begun, recipe_for
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe

PRETRAIN = 0.75  # share of the run
RATES = Rates(muon=5e-3, adamw=3e-3, warmup=0.03, decay=0.9)


@dataclass(frozen=True, kw_only=True)
class Shape(HeadShape):
    """What is trained, beside the target.

    Attributes:
        layers: D.
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        steps: S.
        pretrain: share of the run that is the first stage; 0 or 1: there is one stage only.
    """

    layers: int = LAYERS
    steps: int = STEPS
    pretrain: float = PRETRAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ConfigError(f"--layers {self.layers}: from 1 to {MOST_LAYERS}")
        if not 0 <= self.pretrain <= 1:
            raise ConfigError(f"--pretrain {self.pretrain}: a share must be from 0 to 1")


def recipe(target: str, shape: Shape, own_words: float) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return recipe_for("scylla", f"Scylla head of {shape.layers} layers of {target}", target, own_words, RATES)


def stages(shape: Shape, own_words: float) -> tuple[Stage, ...]:
    """Those whose share is not 0."""
    both = (
        Stage(name="pretrain", share=shape.pretrain, own_words=0.0, replies_only=False),
        Stage(name="sft", share=1 - shape.pretrain, own_words=own_words, rates=RATES.scaled(0.5)),
    )
    return tuple(each for each in both if each.share)


def course(target: str, shape: Shape, own_words: float) -> Course:
    """What is trained, and how.

    Args:
        own_words: share of the second stage's text that the target writes.
    Raises:
        ConfigError: the share is out of range, or the target has fewer tokens than are to be scored.
    """

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> ScyllaConfig:
        return Scylla.config_for(
            target, name, fingerprint, layers=shape.layers, draft_vocab_size=size, mlp_width=shape.mlp_width
        )

    def build(config: ScyllaConfig, target: FrozenTarget, ids_K: Tensor | None) -> Scylla:
        return begun(Scylla(config, ids_K=ids_K), target)

    return Course(
        part=Scylla,
        recipe=recipe(target, shape, own_words),
        stages=stages(shape, own_words),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=build,
        kept=shape.kept(target),
    )
