"""STree: a target with state-space layers verifies a whole token tree in one forward.

    root ─┬─ a ─ c        attention   keys of the prefix and of a row's ancestors          forward/dense.py
          └─ b            mixer       convolution and recurrence along a row's ancestors   forward/ssm/scan.py
                          state       stays that of the committed prefix; after the verdict it is updated with the
                                      accepted rows' inputs (activation replay)            forward/ssm/state.py

The algorithm on one page is tests/helpers/stree_page.py. Attention layers of a hybrid model are dense, and all other
modules are those of transformers. Every target with state-space layers gets this plan without an option.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.protocols import PlanMaker
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.options.option import Checked, Option

KERNELS = ("walk", "scan")


@dataclass(frozen=True, kw_only=True)
class StreeConfig(Checked):
    """Options of the recurrences."""

    name_prefix = "stree."

    kernel: Annotated[
        str,
        Option(
            "walk: row by row, depth first; a row's sums are those of plain decoding. scan: all rows of a tree or of a "
            "prompt's chunk at once, in another order of summation.",
            choices=KERNELS,
        ),
    ] = "walk"


class TreeScan(DensePlan):
    """A step that computes its recurrences for all rows at once."""

    scanned = True

    def __init__(self, cache: KVCache, batch: PackedBatch) -> None:
        super().__init__(cache, batch)
        self.native = None  # the native decoder computes the walk only


class TreeScanPlans(PlanMaker):
    """Makes the plan of every step for a target with state-space layers.

    Paper:   Wu et al. 2025, "STree: Speculative Tree Decoding for Hybrid State-Space Models", arXiv:2505.14969,
             sections 4.2 (tree scan) and 4.3 (activation replay).
    Exact:   yes. Every row's distribution is that of sequential decoding: with "walk" by the same operations in the
             same order, with "scan" up to rounding. Checked by tests/unit/methods/stree, tests/unit/forward/ssm and
             tests/golden/test_state_space.py.
    Differs: the walk is the default, because on a CPU it costs little more and keeps plain decoding's sums; accepted
             rows are replayed in order, not in closed form (as in "scan"); W - 1 columns of the convolution are
             kept, not W, and of a row's inputs only those before the convolution; batches of many requests, with
             prompts in the same forward; gated delta nets, too, by one triangular solve over the ancestors
             (arXiv:2608.20961). The drafter decides the shape of a tree.
    """

    name = "stree"
    settings_key = "stree"
    Config = StreeConfig

    def __init__(self, config: StreeConfig) -> None:
        self.config = config

    @classmethod
    def suits(cls, target: LanguageModel) -> bool:
        return bool(target.mixers)

    @classmethod
    def arranged(cls, settings: Mapping[str, Any], target: LanguageModel) -> "TreeScanPlans":
        known = [field.name for field in dataclasses.fields(StreeConfig)]
        for key in settings:
            if key not in known:
                raise ConfigError(f"unknown option 'stree.{key}': {nearest(key, known)}")
        if not target.mixers:
            raise ConfigError(
                f"stree.*: model '{target.name}' has no state-space layers: leave it out, any target verifies trees"
            )
        return cls(StreeConfig(**settings))

    def __call__(self, cache: KVCache, batch: PackedBatch) -> DensePlan:
        """Return the plan of one step."""
        return TreeScan(cache, batch) if self.config.kernel == "scan" else DensePlan(cache, batch)
