"""Training of Scylla's network: text of all kinds first, then replies, half of them the target's own words.

    stage       share of the run    text                                positions    rate
    pretrain    3/4                 the mixture                         all          RATES
    sft         1/4                 the mixture and the target's words  replies      half of them

Paper: arXiv:2505.07858 (10 B tokens of Common Crawl, C4 and GitHub, then ShareGPT; "losses as EAGLE-2's"). Differs:
the text; the loss is that of drafting itself, unrolled (train/feature_heads/objective.py), and no feature is regressed;
matrices are trained by Muon; each stage warms up and falls to zero linearly; rates are ours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from foretoken.methods.scylla.command import Config
from foretoken.methods.scylla.network import Scylla, ScyllaConfig
from foretoken.train.feature_heads.training import HeadTraining, Stage, num_scored, recipe_for, untrained
from foretoken.train.optimiser import Rates

RATES = Rates(muon=5e-3, adamw=3e-3, warmup=0.03, decay=0.9)


def stages(options: Config) -> tuple[Stage, ...]:
    """The stages with a share above 0."""
    both = (
        Stage(name="pretrain", share=options.pretrain, own_words=0.0, replies_only=False),
        Stage(name="sft", share=1 - options.pretrain, own_words=options.share, rates=RATES.scaled(0.5)),
    )
    return tuple(each for each in both if each.share)


def training(options: Config) -> HeadTraining:
    """The network that the options describe, and how it is trained.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than are to be scored.
    """
    target, layers = options.target, options.layers

    def config(text: Any, name: str, fingerprint: str) -> ScyllaConfig:
        found: ScyllaConfig = Scylla.config_for(text, name, fingerprint, layers=layers, mlp_width=options.mlp_width)
        return found

    description = f"Scylla head of {layers} layers of {target}"
    return HeadTraining(
        target=target,
        part=Scylla,
        recipe=recipe_for("scylla", description, target, options.share, RATES),
        stages=stages(options),
        shape=options.shape,
        steps=options.steps,
        config=config,
        build=partial(untrained, Scylla),
        num_scored=num_scored(options),
    )
