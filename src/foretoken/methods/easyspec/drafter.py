"""Drafting with a second checkpoint that runs its layers in groups, several attentions at a time.

propose   accepted tokens and root   all layers in order: exact rows, committed             (bonus calibration)
          each further level         groups of layers (models/fuzzy.py): fuzzy rows in the tail
next      the tail is dropped, including accepted rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.core.draft import Coupled, PointMass, Sampled
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.needs import Declared, Variant
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting.draft_runner import State
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.fuzzy import Groups, check, fuzzy, groups_of
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Option


def _sizes(name: str, value: Any) -> tuple[int, ...] | None:
    """Check the sizes of groups of layers."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(type(each) is int and each >= 1 for each in value):
        raise ConfigError(f"{name}={value!r:.60} must be sizes of groups of layers, for example [1, 3, 3, 1]")
    return tuple(value)


class EasySpecDrafter(ModelDrafter):
    """Drafts with a model; fuzzy groups of layers compute its drafted levels.

    Paper:   EasySpec, arXiv:2502.02493: fuzzy speculation (Algorithm 2), bonus calibration, grouping of section 3.1.1.
    Exact:   a draft carries the fuzzy distribution of its samples; nothing is recomputed. Lossless under any lossless
             verifier of that draft kind, as `draft_model`. The fuzzy rows depend on the start of each draft, so with a
             seed only `match` keeps the text of plain decoding.
    Differs: one device computes the groups one after the other, so this is the method's arithmetic without its speed;
             lab/benchmarks/easyspec.py estimates the speed on several devices. Calibration reads accepted tokens and
             root in the pass that reads them anyway. Trees and their distribution are `draft_model`'s.
    """

    name = "easyspec"
    declared = Declared(
        draft_model=True,
        variants=(
            Variant(options={"tree": "chain"}, laws=(Sampled,), branches=False),
            Variant(options={"tree": "coupled"}, laws=(Coupled,), branches=False),
            Variant(options={"tree": "topk"}, laws=(PointMass,), branches=True),
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelDrafter.Config):
        """Options of EasySpec: those of drafting with a model, and the grouping of its layers."""

        parallel: Annotated[
            int,
            Option(
                "Most layers of a group, N; groups start at multiples of N, the first and the last layer run alone. "
                "1 is the ordinary drafter.",
                least=1,
            ),
        ] = 4
        groups: Annotated[
            Sequence[int] | None,
            Option(
                "Sizes of consecutive groups instead, for example [1, 3, 4, 4, 3, 1]; they add up to the layers.",
                convert=_sizes,
            ),
        ] = None
        calibrate: Annotated[
            bool,
            Option(
                "Accepted tokens are read again, exactly. Without it their fuzzy rows stay and errors add up: for "
                "comparison."
            ),
        ] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        """Load the draft and check its groups.

        Raises:
            ConfigError: ``groups`` do not add up to its layers.
            UnsupportedArchitecture: its layers cannot be grouped.
        """
        super().__init__(config, target)
        self._calibrates = config.calibrate
        self.groups = _groups(config, self.model)
        self._fuzzy = any(len(group) > 1 for group in self.groups)
        if self._fuzzy:
            try:
                check(self.model)
            except UnsupportedArchitecture as error:
                raise UnsupportedArchitecture(f"{error}: use parallel=1, or method='draft_model'") from None
            named = " ".join(f"[{g[0]}]" if len(g) == 1 else f"[{g[0]}-{g[-1]}]" for g in self.groups)
            self.explanation = f"{len(self.groups)} phases of attention for {self.model.num_layers} layers: {named}"
        else:
            self.explanation = f"{self.model.num_layers} layers, none of them grouped: drafts as draft_model does"

    def _keep(self, state: State, tokens: Sequence[int]) -> None:
        """Bonus calibration: drop the fuzzy rows of the draft."""
        if self._fuzzy and self._calibrates:
            state.tail.clear()
        super()._keep(state, tokens)

    def _forward_drafted(self, batch: PackedBatch) -> Output:
        """Run a level of drafts in groups."""
        if not self._fuzzy:
            return super()._forward_drafted(batch)
        plan = DensePlan(self.cache, batch)
        plan.native = None  # the native decoder runs layers only in order
        with fuzzy(anatomy.find(self.model.model), self.groups):
            return self._forward(batch, plan)


def _groups(config: EasySpecDrafter.Config, model: LanguageModel) -> Groups:
    """Return the groups of the config.

    Raises:
        ConfigError: the sizes do not add up to the model's layers.
    """
    if config.groups is None:
        return groups_of(model.num_layers, config.parallel)
    if sum(config.groups) != model.num_layers:
        raise ConfigError(
            f"groups={list(config.groups)} add up to {sum(config.groups)}: draft model '{model.name}' has "
            f"{model.num_layers} layers"
        )
    ends = [sum(config.groups[: place + 1]) for place in range(len(config.groups))]
    return tuple(range(end - size, end) for end, size in zip(ends, config.groups, strict=True))
