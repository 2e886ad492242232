"""Training of EAGLE's network on the target's own states, unrolled as deep as in serving.

Papers: EAGLE-3, arXiv:2503.01840, section 3.2: no feature regression; the network is unrolled S steps over its
own outputs (train/feature_heads/objective.py). EAGLE-2's network is trained in the same way, while the paper of EAGLE-2
(arXiv:2406.16858) regresses a feature.

Differs: see the loss; four steps are unrolled instead of seven; by default the target generates half of the text
(``own_words``); Muon trains the matrices, the schedule is linear, and the gradient is clipped by its norm (1.0). A
separate LM head (``own_head``) is initialised from the target's rows; without it these rows are shared and frozen. The
residual starts from the normed feature: states within a target are large, and the layer's addition to them is
negligible until its weights have grown to that size (zoo_v3_epycturin2c_202611/eagle.md).
"""

from functools import partial

from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.command import Config
from foretoken.methods.eagle.config import EAGLE3
from foretoken.train.feature_heads.objective import Thinned
from foretoken.train.feature_heads.training import BLOCK, HeadTraining, Stage, num_scored, recipe_for, untrained
from foretoken.train.optimiser import Rates

# Muon learns more from the same tokens than AdamW, in a tenth more time (zoo_v3_epycgenoa2c_202611/eagle.md).
RATES = Rates(muon=5e-3, adamw=3e-3, warmup=0.03, decay=0.9)


def training(options: Config) -> HeadTraining:
    """Return the network of the options, and its training.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than the draft vocabulary.
    """
    eagle3, target = options.algorithm == EAGLE3, options.target

    config = partial(
        Eagle.config_for,
        algorithm=options.algorithm,
        mlp_width=options.mlp_width,
        norm_before_residual=eagle3 and not options.plain_residual,
        windows=(BLOCK,),
        taps=options.taps,
    )
    return HeadTraining(
        target=target,
        part=Eagle,
        recipe=recipe_for("eagle", f"{options.algorithm} head of {target}", target, options.share, RATES),
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.steps,
        config=config,
        build=partial(untrained, Eagle, own_head=options.own_head),
        num_scored=num_scored(options) if eagle3 else None,
        own_rows=options.own_head,
        objective=Thinned,
    )
