"""Training of EAGLE's head (network.py): from the target's own states it learns to draft as deep as it will serve.

Papers: EAGLE-3, arXiv:2503.01840, section 3.2: no feature is regressed; the head is unrolled S steps over its own
outputs (train/feature_heads/objective.py). EAGLE-2's network is trained in the same way, which the paper of EAGLE-2
(arXiv:2406.16858) does not: there a feature is regressed.

Differs: see the loss; four steps are unrolled instead of seven; half of the text is by default the target's own
(``own_words``); the rate is ours, the schedule linear, and the gradient is clipped by its norm (1.0). A head of its own
(``own_head``) begins as the target's rows, which are otherwise shared and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ConfigError
from foretoken.methods.eagle.config import EAGLE2, EAGLE3, EagleConfig
from foretoken.methods.eagle.network import Eagle, config_for
from foretoken.train.feature_heads import run as training
from foretoken.train.feature_heads.run import OWN_WORDS, STEPS, Course, Stage
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.mixture import Source
from foretoken.train.recipe import Recipe

DRAFT_VOCABULARY = 2048  # tokens that EAGLE-3 scores


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained, beside the target.

    Attributes:
        algorithm: "eagle3" or "eagle".
        draft_vocab_size: K; None: 2048, or the whole vocabulary where that is smaller.
        mlp_width: None: a quarter of the target's.
        own_head: train a head of its own instead of sharing rows of the target's.
        steps: S.
    """

    algorithm: str = EAGLE3
    draft_vocab_size: int | None = None
    mlp_width: int | None = None
    own_head: bool = False
    steps: int = STEPS

    def __post_init__(self) -> None:
        if self.algorithm not in (EAGLE2, EAGLE3):
            raise ConfigError(f"--algorithm {self.algorithm}: '{EAGLE3}' or '{EAGLE2}'")
        training.check_mlp_width(self.mlp_width)
        if self.algorithm == EAGLE2 and (self.draft_vocab_size is not None or self.own_head):
            raise ConfigError("--algorithm eagle has the target's head: leave out --draft-vocab-size and --own-head")


def recipe(target: str, shape: Shape, own_words: float = OWN_WORDS) -> Recipe:
    """What decides a run on text, beside the shape.

    Raises:
        ConfigError: the share is out of range.
    """
    return training.recipe_for("eagle", f"{shape.algorithm} head of {target}", target, own_words)


def build(config: EagleConfig, shape: Shape, target: FrozenTarget, ids: list[int] | None) -> Eagle:
    """The untrained head, float32, drawn from torch's generator.

    Args:
        ids: the tokens that it scores; None: all.
    """
    head = Eagle(config, ids_K=None if ids is None else torch.tensor(ids), own_head=shape.own_head)
    head.draw()
    if head.lm_head is not None:
        shared = Eagle(config, ids_K=head.ids_K)
        with torch.no_grad():
            head.lm_head.weight.copy_(shared.head_of(target.model))
    head.begin_near(target.model)
    return head


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

    def config(target: Any, name: str, fingerprint: str, size: int | None) -> EagleConfig:
        return config_for(
            target, name, fingerprint, algorithm=shape.algorithm, draft_vocab_size=size, mlp_width=shape.mlp_width
        )

    chosen = Course(
        part=Eagle,
        recipe=recipe(name, shape, share),
        stages=(Stage(own_words=share),),
        shape=asdict(shape),
        steps=shape.steps,
        config=config,
        build=lambda config, target, ids: build(config, shape, target, ids),
        kept=(shape.draft_vocab_size or DRAFT_VOCABULARY) if shape.algorithm == EAGLE3 else None,
        own_head=shape.own_head,
    )
    return training.run(name, chosen, sources, out, features=features, **loop)
