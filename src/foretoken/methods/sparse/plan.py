"""Sparse verification: attention, MLPs and experts of a verification's rows, each dense or sparse by the settings.

    packed batch     [ chunk of a prompt | root and draft | root and draft ]
    attention             dense               sparse            sparse         segment by segment
    MLP, experts          dense               sparse            sparse         row by row

The attention plan alone computes a step without verification rows. Drafts and prompts are always dense. The cache keeps
the keys and values of the sparse forward.

Letters: T packed rows, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Context, Drafter, Plan, PlanMaker
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan, DensePlans
from foretoken.forward.feed_forward import Forward, routed_experts
from foretoken.forward.native_plan import NativePlan
from foretoken.methods.sparse import calibration
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.methods.sparse.config import KEY, VerificationConfig, configured
from foretoken.methods.sparse.confirm import DenseRefresh, SparseDraft
from foretoken.methods.sparse.feed_forward import Skip, SparseExperts, SparseMLP, sparse_mlps
from foretoken.models.language_model import LanguageModel

_EXPLAINED_ROWS = 8


class SparseVerification(PlanMaker):
    """Makes the plan of every step from the settings; one for each engine.

    Exact: no. The promise of a recipe with it is "approximate", with any verifier, and the distance from the dense
           target's distribution is unknown: its measurement would need the dense target.

    Args:
        config: the omitted parts, at least one; otherwise use a DensePlan.
        target: the verifying model.
    Raises:
        ConfigError: the target lacks what a setting is about, a setting is beyond it, or a calibration is missing.
        MismatchError: the calibration is another model's.
        UnsupportedArchitecture: its MLPs or experts are of a kind that is not known here.
    """

    name = "sparse_verification"
    settings_key = KEY
    Config = VerificationConfig
    exact = False

    def __init__(self, config: VerificationConfig, target: LanguageModel) -> None:
        self.config = config
        self.blocks = _sparse_attention(config, target) if config.attention != "off" else None
        self.attention: Callable[[KVCache, PackedBatch], Plan] = self.blocks or DensePlan
        self._mlps: list[SparseMLP] = sparse_mlps(target.model, config.ffn) if config.ffn else []
        self._experts: list[SparseExperts] = []
        if config.moe or config.ffn:
            self._experts = _sparse_experts(config, target)
        if config.ffn and not self._mlps and not self._experts:
            raise ConfigError(
                f"{KEY}.ffn={config.ffn:g}: model '{target.name}' has no gated MLP, and only a gate says which "
                "channels count: leave it out"
            )
        if target.kv_cache_dtype == "int8" and (self.blocks is not None or self._experts):
            raise ConfigError(
                f"{KEY}.{'moe' if self.blocks is None else 'attention'} reads keys and values as they are computed, "
                "and kv_cache_dtype='int8' keeps codes of them: leave one of them out"
            )
        self.reason = f"sparse verification ({config.in_words})"
        self._refresh = DenseRefresh(target, config.refresh) if config.refresh else None
        self.explanation = "; ".join(filter(None, (_expected(config, target), self._packed(target))))

    def over(self, base: DensePlans) -> "SparseVerification":
        """Return this plan, with the other's attention over the selected rows."""
        if self.blocks is None:
            self.attention = base.attention
        else:
            self.blocks.base = base.attention
        return self

    @classmethod
    def arranged(cls, settings: Mapping[str, Any], target: LanguageModel) -> PlanMaker | None:
        config = configured(settings)
        if (config.sparse or config.confirm) and target.mixers:
            raise ConfigError(
                f"verification.*: model '{target.name}' has state-space layers, and their states cannot take back "
                "a sparse step: leave these settings out"
            )
        if config.sparse:
            return cls(config, target)
        return ConfirmedVerification(config, target) if config.confirm else None

    def before_step(self, cache: KVCache, decoding: Sequence[Context]) -> None:
        """Refresh the rows that are due, densely."""
        if self._refresh is not None:
            self._refresh(cache, decoding)

    def _packed(self, target: LanguageModel) -> str:
        """A remark where sparse MLPs or experts cannot save time, whatever they leave out."""
        if target.native_decoder is not None and self._experts:
            return (
                "verifications with sparse experts are computed layer by layer, and the model's other steps by the "
                "native decoder, which is faster: on this machine leaving experts out costs time"
            )
        if target.native_decoder is not None or not any(each.packed for each in self._mlps):
            return ""
        return (
            "the MLPs' weights are packed for kernels that read all of them, so that leaving channels out saves no time"
        )

    def __call__(self, cache: KVCache, batch: PackedBatch) -> Plan:
        """The plan of one step."""
        attention = self.attention(cache, batch)
        if not self._mlps and not self._experts:
            return attention
        if not any(segment.verification for segment in batch.segments):
            return attention
        return SparsePlan(attention, batch, self._mlps, self._experts, self.config.ffn)


class ConfirmedVerification(DensePlans):
    """The sparse target drafts on top of the recipe's drafter, and the dense target verifies: the promise stands.

    Args:
        config: what the drafting leaves out; ``confirm`` says how many tokens it drafts.
        target: drafts and verifies.
    """

    def __init__(self, config: VerificationConfig, target: LanguageModel) -> None:
        self._config = config
        self._target = target
        self._sparse = SparseVerification(config, target)

    def over(self, base: DensePlans) -> "ConfirmedVerification":
        """The other's attention, drafting and verifying."""
        self._sparse.over(base)
        self.attention = base.attention
        return self

    def wrap(self, drafter: Drafter, num_nodes: int) -> tuple[Drafter, int | None]:
        """Return the sparse target as a drafter of ``confirm`` tokens a step."""
        config = self._config
        wrapped = SparseDraft(
            drafter,
            self._target,
            self._sparse,
            dense_below=0 if config.attention == "off" else config.dense_below,
            length=config.confirm,
            inner_length=num_nodes,
        )
        return wrapped, config.confirm


class SparsePlan(Plan):
    """One step: an attention plan, and modules that are swapped while the target computes it.

    Args:
        attention: answers the attention layers.
        batch: the step's rows.
        mlps, experts: replacements of the modules.
        tau: threshold of the MLPs' gates.
    """

    def __init__(
        self, attention: Plan, batch: PackedBatch, mlps: list[SparseMLP], experts: list[SparseExperts], tau: float
    ) -> None:
        self._attention = attention
        self.native: NativePlan | None = None
        if attention.native is not None and not experts:
            taus = [tau * segment.verification for segment in batch.segments for _ in range(segment.num_rows)]
            self.native = replace(attention.native, thresholds=taus)
        self.prefix_read = attention.prefix_read
        self._experts = experts
        rows = _verification_rows(batch)
        for each in experts:
            each.num_needed = 0  # a span of layers may not include all of them
        self.swaps: Mapping[nn.Module, Forward] = {
            **{each.mlp.module: _for_rows(each, each.mlp.module, rows) for each in mlps},
            **{each.experts.module: _for_rows(each, each.experts.module, rows) for each in experts},
        }

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        return self._attention.attend(layer, q_HTD, k_GTD, v_GTD, **options)

    @property
    def num_experts(self) -> float | None:
        """Different experts that verification rows needed, mean over the layers that have some."""
        found = [each.num_needed for each in self._experts if each.num_needed]
        return sum(found) / len(found) if found else None


def _for_rows(sparse: Forward, module: nn.Module, rows: Tensor | None) -> Forward:
    """``sparse`` for these packed rows, what the module computes by itself for the others."""
    if rows is None:
        return sparse
    dense = module.forward

    def forward(hidden_states: Tensor, *per_row: Tensor) -> Tensor:
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        others = torch.ones(len(flat_TD), dtype=torch.bool, device=flat_TD.device)
        others[rows] = False
        y_TD = torch.empty_like(flat_TD)
        y_TD[others] = dense(flat_TD[others], *(each[others] for each in per_row))
        y_TD[rows] = sparse(flat_TD[rows], *(each[rows] for each in per_row))
        return y_TD.view(hidden_states.shape)

    return forward


def _verification_rows(batch: PackedBatch) -> Tensor | None:
    """Packed rows of verifications, int64; None if all are."""
    if all(segment.verification for segment in batch.segments):
        return None
    rows = [
        row
        for segment in batch.segments
        if segment.verification
        for row in range(segment.start, segment.start + segment.num_rows)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def _sparse_attention(config: VerificationConfig, target: LanguageModel) -> SparseAttention:
    if config.dense_below >= target.max_length:
        raise ConfigError(
            f"{KEY}.dense_below={config.dense_below} leaves nothing to be sparse: the context of '{target.name}' holds "
            f"{target.max_length}; set it lower"
        )
    if (config.sinks + config.locals + 1) * config.block > target.max_length:
        raise ConfigError(
            f"{KEY}.block={config.block}: the context of '{target.name}' holds {target.max_length}, so next to "
            f"{config.sinks} sinks and {config.locals} locals there is no block to leave out; set it lower"
        )
    anchors = None
    if config.reuse == "calibrated":
        known = calibration.needed(target, config.calibration, f"{KEY}.reuse=calibrated")
        anchors = known.anchors_for(target.num_layers, config.attention, config.theta)
    rule = BlockRule(
        budget=config.budget,
        dense_below=config.dense_below,
        size=config.block,
        sinks=config.sinks,
        locals=config.locals,
        sets=config.attention,
        score=config.score,
        voters=config.voters,
        gated=config.gate,
    )
    return SparseAttention(rule, anchors)


def _sparse_experts(config: VerificationConfig, target: LanguageModel) -> list[SparseExperts]:
    found = routed_experts(target.model)
    if not config.moe:
        return [SparseExperts(each, None, config.ffn) for each in found]
    what = f"{KEY}.moe={config.moe}"
    if not found:
        raise ConfigError(
            f"{what}: model '{target.name}' has no routed experts, every row needs all of it: leave it out"
        )
    k = found[0].num_chosen
    if config.moe >= k:
        remedy = f"use at most {k - 1}" if k > 1 else "leave it out"
        raise ConfigError(f"{what}: model '{target.name}' chooses {k} experts a row and must keep one: {remedy}")
    known = calibration.needed(target, config.calibration, what)
    beta = known.thresholds([each.layer for each in found], k)
    return [
        SparseExperts(each, Skip(beta[each.layer], config.moe, config.moe_rule, each.renormalised), config.ffn)
        for each in found
    ]


def _expected(config: VerificationConfig, target: LanguageModel) -> str:
    """Return the expected effect of the threshold by the calibration; the command line prints it."""
    known = calibration.find(target, config.calibration) if config.ffn else None
    if known is None or not known.ffn:
        return ""
    nearest = min(known.ffn, key=lambda each: abs(each.tau - config.ffn))
    rows = min(nearest.union, key=lambda each: abs(each - _EXPLAINED_ROWS))
    text = (
        f"at ffn={nearest.tau:g} a row leaves out {nearest.row:.0%} of its channels, {rows} rows together "
        f"{nearest.union[rows]:.0%}: at best {nearest.speedup(rows):.2f}x of an MLP"
    )
    return text if nearest.speedup(rows) >= 1.05 else f"{text}, which hardly pays"
