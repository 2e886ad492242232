"""Training of Dovetail's network on the target's own states, unrolled as deep as in serving.

Paper: arXiv:2412.18934. Its released code regresses features (SmoothL1, and a tenth of soft cross-entropy) from
inputs with uniform noise, AdamW 3e-5, over ShareGPT. Differs: no feature regression; the network is unrolled S steps
over its own outputs with the loss of drafting (train/feature_heads/objective.py), so training includes the network's
own errors and needs no noise; by default the target generates half of the text (``own_words``); the rate is ours.
"""

from functools import partial

from foretoken.methods.dovetail.command import Config
from foretoken.methods.dovetail.network import Dovetail
from foretoken.train.feature_heads.training import BLOCK, HeadTraining, Stage, num_scored, recipe_for, untrained


def training(options: Config) -> HeadTraining:
    """Return the network of the options, and its training.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than the draft vocabulary.
    """
    target, blocks, fusion = options.target, options.blocks, options.fusion
    description = f"Dovetail head of {blocks} blocks ({fusion}) of {target}"
    return HeadTraining(
        target=target,
        part=Dovetail,
        recipe=recipe_for("dovetail", description, target, options.share),
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.steps,
        config=partial(Dovetail.config_for, layers=blocks, fusion=fusion, mlp_width=options.mlp_width, window=BLOCK),
        build=partial(untrained, Dovetail),
        num_scored=num_scored(options),
    )
