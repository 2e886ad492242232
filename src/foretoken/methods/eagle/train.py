"""Training of EAGLE's head (network.py): from the target's own states it learns to draft as deep as it will serve.

Papers: EAGLE-3, arXiv:2503.01840, section 3.2: no feature is regressed; the head is unrolled S steps over its own
outputs (train/feature_heads/objective.py). EAGLE-2's network is trained in the same way, which the paper of EAGLE-2
(arXiv:2406.16858) does not: there a feature is regressed.

Differs: see the loss; four steps are unrolled instead of seven; half of the text is by default the target's own
(``own_words``); matrices are trained by Muon, the schedule is linear, and the gradient is clipped by its norm (1.0). A
head of its own (``own_head``) begins as the target's rows, which are otherwise shared and stay as they are. The
residual begins with the normed feature: states within a target are large, and what a layer adds to them counts for
little until its weights have grown to that size (zoo_v3_epycturin2c_202611/eagle.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.methods.eagle.checkpoint import Eagle, config_for
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, EagleConfig
from foretoken.train.feature_heads.course import STEPS, Course, HeadShape, Stage, begun, recipe_for
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.optimiser import Rates
from foretoken.train.recipe import Recipe

# Muon learns more from the same tokens than AdamW, in a tenth more time (zoo_v3_epycgenoa2c_202611/eagle.md).
RATES = Rates(muon=5e-3, adamw=3e-3, warmup=0.03, decay=0.9)


@dataclass(frozen=True, kw_only=True)
class Shape(HeadShape):
    """What is trained, beside the target.

    Attributes:
        algorithm: "eagle3" or "eagle".
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        own_head: train a head of its own instead of sharing rows of the target's.
        plain_residual: let the residual of EAGLE-3 begin with the feature as it is, as the paper has it.
        steps: S.
    """

    algorithm: str = EAGLE3
    own_head: bool = False
    plain_residual: bool = False
    steps: int = STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm not in (EAGLE2, EAGLE3):
            raise ConfigError(f"--algorithm {self.algorithm}: '{EAGLE3}' or '{EAGLE2}'")
        if self.algorithm == EAGLE2 and (self.draft_vocab_size is not None or self.own_head):
            raise ConfigError("--algorithm eagle has the target's head: leave out --draft-vocab-size and --own-head")
        if self.algorithm == EAGLE2 and self.plain_residual:
            raise ConfigError("--algorithm eagle begins with a mix of feature and token: leave out --plain-residual")


def recipe(target: str, shape: Shape, own_words: float) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return recipe_for("eagle", f"{shape.algorithm} head of {target}", target, own_words, RATES)


def course(target: str, shape: Shape, own_words: float) -> Course:
    """What is trained, and how.

    Args:
        own_words: share of the text that the target writes.
    Raises:
        ConfigError: the share is out of range, or the target has fewer tokens than are to be scored.
    """

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> EagleConfig:
        return config_for(
            target,
            name,
            fingerprint,
            algorithm=shape.algorithm,
            draft_vocab_size=size,
            mlp_width=shape.mlp_width,
            norm_before_residual=shape.algorithm == EAGLE3 and not shape.plain_residual,
        )

    return Course(
        part=Eagle,
        recipe=recipe(target, shape, own_words),
        stages=(Stage(own_words=own_words),),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=lambda config, target, ids_K: build(config, shape, target, ids_K),
        kept=shape.kept(target) if shape.algorithm == EAGLE3 else None,
        own_head=shape.own_head,
    )


def build(config: EagleConfig, shape: Shape, target: FrozenTarget, ids_K: Tensor | None) -> Eagle:
    """The untrained head; a head of its own begins as the target's rows."""
    head = begun(Eagle(config, ids_K=ids_K, own_head=shape.own_head), target)
    if head.lm_head is not None:
        shared = Eagle(config, ids_K=ids_K)
        with torch.no_grad():
            head.lm_head.weight.copy_(shared.lm_head_of(target.model))
    return head
