"""Training of Dovetail's head (network.py): from the target's own states it learns to draft as deep as it will serve.

Paper: arXiv:2412.18934, whose released code regresses features (SmoothL1, and a tenth of soft cross-entropy) from
inputs with uniform noise, AdamW 3e-5, over ShareGPT. Differs: no feature is regressed; the head is unrolled S steps
over its own outputs with the loss of drafting (train/feature_heads/objective.py), so that it meets its own errors in
training and needs no noise; half of the text is by default the target's own (``own_words``); the rate is ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.stack import LAYERS, MOST_LAYERS
from foretoken.methods.dovetail.network import CONCAT, FUSIONS, GATE, Dovetail, DovetailConfig
from foretoken.train.feature_heads.course import STEPS, Course, HeadShape, Stage, begun, recipe_for
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Shape(HeadShape):
    """What is trained, beside the target.

    Attributes:
        blocks: m.
        fusion: "gate" or "concat".
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        steps: S.
    """

    blocks: int = LAYERS
    fusion: str = GATE
    steps: int = STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.blocks <= MOST_LAYERS:
            raise ConfigError(f"--blocks {self.blocks}: from 1 to {MOST_LAYERS}")
        if self.fusion not in FUSIONS:
            raise ConfigError(f"--fusion {self.fusion}: '{GATE}' or '{CONCAT}'")


def recipe(target: str, shape: Shape, own_words: float) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    blocks = f"{shape.blocks} blocks ({shape.fusion})"
    return recipe_for("dovetail", f"Dovetail head of {blocks} of {target}", target, own_words)


def course(target: str, shape: Shape, own_words: float) -> Course:
    """What is trained, and how.

    Args:
        own_words: share of the text that the target writes.
    Raises:
        ConfigError: the share is out of range, or the target has fewer tokens than are to be scored.
    """

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> DovetailConfig:
        found: DovetailConfig = Dovetail.config_for(
            target,
            name,
            fingerprint,
            layers=shape.blocks,
            fusion=shape.fusion,
            draft_vocab_size=size,
            mlp_width=shape.mlp_width,
        )
        return found

    def build(config: DovetailConfig, target: FrozenTarget, ids_K: Tensor | None) -> Dovetail:
        return begun(Dovetail(config, ids_K=ids_K), target)

    return Course(
        part=Dovetail,
        recipe=recipe(target, shape, own_words),
        stages=(Stage(own_words=own_words),),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=build,
        kept=shape.kept(target),
    )
