"""Training of the block network (network.py): the target's distribution at every slot (train/feature_heads/blocks.py).

By default the texts are the target's own answers, both greedy and sampled. A trigram model of the same text is stored
with the network (trigram.py).

Letters: K draft vocabulary.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.methods.diffuspec.command import Config
from foretoken.methods.diffuspec.network import BlockNetwork, BlockNetworkConfig
from foretoken.methods.diffuspec.trigram import FILE, Trigram
from foretoken.train.feature_heads.blocks import BlockLoss, slot_by_slot
from foretoken.train.feature_heads.training import HeadTraining, Stage, num_scored, recipe_for, vocabulary_of
from foretoken.train.frozen_target import FrozenTarget

TRIGRAM_LEAST = 2  # minimum number of occurrences of a triple


def training(options: Config) -> HeadTraining:
    """Return the network of the options, and its training.

    Raises:
        ConfigError: the share of own words is out of range, or the target has fewer tokens than the draft vocabulary.
    """
    target = options.target

    def build(config: BlockNetworkConfig, target: FrozenTarget, ids_K: Tensor | None) -> BlockNetwork:
        network = BlockNetwork(config, ids_K=ids_K)
        network.draw()
        network.begin_near(target.model)
        return network

    def keep(blocks: Iterable[list[int]], folder: Path) -> dict[str, Any]:
        Trigram.fit(blocks, vocabulary_of(target), least=TRIGRAM_LEAST).save(folder)
        return {"trigram_bytes": (folder / FILE).stat().st_size, "trigram_least": TRIGRAM_LEAST}

    return HeadTraining(
        target=target,
        part=BlockNetwork,
        recipe=recipe_for("diffuspec", f"block network of {target}", target, options.share),
        stages=(Stage(own_words=options.share),),
        shape=options.shape,
        steps=options.slots,
        config=partial(
            BlockNetwork.config_for,
            norm_heads=True,
            mlp_width=options.mlp_width,
            layers=options.layers,
            slots=options.slots,
        ),
        build=build,
        num_scored=num_scored(options),
        objective=BlockLoss,
        unroll=slot_by_slot,
        keep=keep,
    )
