"""Training of Dovetail's head (network.py): from the target's own states it learns to draft as deep as it will serve.

Paper: arXiv:2412.18934, whose released code regresses features (SmoothL1, and a tenth of soft cross-entropy) from
inputs with uniform noise, AdamW 3e-5, over ShareGPT. Differs: no feature is regressed; the head is unrolled S steps
over its own outputs with the loss of drafting (train/feature_heads/objective.py), so that it meets its own errors in
training and needs no noise; half of the text is by default the target's own (``own_words``); the rate is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ConfigError
from foretoken.drafting.feature_heads.stack import LAYERS, MOST_LAYERS
from foretoken.methods.dovetail.network import CONCAT, FUSIONS, GATE, Dovetail, DovetailConfig
from foretoken.train.feature_heads import run as training
from foretoken.train.feature_heads.run import OWN_WORDS, STEPS, Course, Stage
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.recipe import Recipe

DRAFT_VOCABULARY = 2048


@dataclass(frozen=True, kw_only=True)
class Shape:
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
    draft_vocab_size: int | None = None
    mlp_width: int | None = None
    steps: int = STEPS

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= MOST_LAYERS:
            raise ConfigError(f"--blocks {self.blocks}: from 1 to {MOST_LAYERS}")
        if self.fusion not in FUSIONS:
            raise ConfigError(f"--fusion {self.fusion}: '{GATE}' or '{CONCAT}'")
        training.check_mlp_width(self.mlp_width)


def recipe(target: str, shape: Shape, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    blocks = f"{shape.blocks} blocks ({shape.fusion})"
    return training.recipe_for("dovetail", f"Dovetail head of {blocks} of {target}", target, own_words)


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
        own_words: share of the text that the target writes; nothing is written if features are given.
        loop: see ``train/feature_heads/run.py``, as the other arguments.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: target, data, disk or loss stop the run; what was reached is kept.
    """
    share = 0.0 if features else own_words
    training.check_draft_vocabulary(name, shape.draft_vocab_size)

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

    def build(config: DovetailConfig, target: FrozenTarget, ids: list[int] | None) -> Dovetail:
        head = Dovetail(config, ids_K=None if ids is None else torch.tensor(ids))
        head.draw()
        head.begin_near(target.model)
        return head

    chosen = Course(
        part=Dovetail,
        recipe=recipe(name, shape, share),
        stages=(Stage(own_words=share),),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=build,
        kept=shape.draft_vocab_size or DRAFT_VOCABULARY,
    )
    return training.run(name, chosen, sources, out, features=features, **loop)
