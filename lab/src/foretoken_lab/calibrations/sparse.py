"""Measure a target's statistics for sparse verification on text: see methods/sparse/calibration.py.

The target reads blocks of text densely, in chunks, over its cache. Next to it stand observers:

    MLPs, experts   which gates are shut at each threshold, in one row and in several rows together
    experts         the ratios r_1 .. r_{k-1} of every row; their medians become beta
    attention       which blocks the rows of a chunk would pick in each layer, and how alike two layers' picks are; how
                    much of the attention those picks hold, for each way of scoring blocks

Letters: R rows of a chunk, F channels, n rows of a group, G key/value heads, N whole blocks, L layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, InputError
from foretoken.data import documents as doc
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.feed_forward import Forward, GatedMLP, RoutedExperts, gated_mlps, routed_experts
from foretoken.methods.sparse.blocks import SUMMARIES, BlockRule, scores_of_summaries, weights_of_blocks
from foretoken.methods.sparse.calibration import Anchors, Calibration, Sparsity, Thresholds, sweep
from foretoken.methods.sparse.feed_forward import ratios
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import chunks
from foretoken.train.rendering import encoder

TAUS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
GROUPS = (1, 8, 32)  # rows of a verification: plain decoding, a usual draft, several requests or a tree
THETA = 0.7
RULE = BlockRule(budget=0.25, dense_below=0)
_CHUNK = 128  # rows of a forward
_ROOTS = range(0, _CHUNK, 32)  # rows of a chunk that pick blocks as if they were roots
_DRAFT = 8  # rows that a root chooses for, itself included
_TILE = 16


def calibrate(
    target: LanguageModel,
    blocks: Iterable[Sequence[int]],
    *,
    rule: BlockRule = RULE,
    theta: float = THETA,
    provenance: Mapping[str, Any] | None = None,
    report: Callable[[int], None] = lambda tokens: None,
) -> Calibration:
    """Read text and measure.

    Args:
        blocks: sequences of token ids; each is a context of its own.
        rule: how blocks of the prefix are picked; ``dense_below`` 0, so that short contexts count as well.
        theta: similarity below which a layer becomes an anchor.
        provenance: recorded as given.
        report: called with the tokens read so far, after every forward.
    Raises:
        InputError: there is no text.
        UnsupportedArchitecture: MLPs or experts of a kind that is not known here.
    """
    mlps, experts = gated_mlps(target.model), routed_experts(target.model)
    seen = _Seen(target.num_layers, rule)
    swaps: dict[Any, Forward] = {mlp.module: _watch_mlp(mlp, seen) for mlp in mlps}
    swaps.update({each.module: _watch_experts(each, seen) for each in experts})
    cache = target.new_cache(1)
    slot = cache.acquire()
    num_tokens = 0
    for tokens in blocks:
        cache.rollback(slot, 0)
        for begin, end, batch in chunks(cache, slot, tokens, rows=_CHUNK, wanted=lambda begin, end: 0):
            with torch.inference_mode():
                target.forward(batch, _Watching(cache, batch, swaps, seen))
            seen.end_of_chunk()
            num_tokens += end - begin
            report(num_tokens)
    if not num_tokens:
        raise InputError("there is no text to calibrate on: the files hold no document")
    return Calibration(
        model=target.name,
        fingerprint=fingerprint_of(target.source),
        num_tokens=num_tokens,
        ffn=seen.sparsities() if mlps or experts else (),
        moe=seen.thresholds(experts) if experts else None,
        attention=seen.anchors(theta),
        provenance=dict(provenance or {}),
    )


def blocks_of(files: Sequence[Path], target: LanguageModel, *, block: int, num_tokens: int) -> Iterator[list[int]]:
    """The files' documents end to end, in blocks of so many tokens, the files by turns, until there are enough.

    Raises:
        ConfigError: a block is longer than the target's context.
        InputError: a file cannot be read.
    """
    if not 2 <= block <= target.max_length:
        raise ConfigError(
            f"--block {block}: must be between 2 and the {target.max_length} positions of '{target.name}'"
        )
    encode = encoder(target.tokenizer)
    streams = [_cut(encode, path, block) for path in files]
    given = 0
    while streams and given < num_tokens:
        for stream in list(streams):
            tokens = next(stream, None)
            if tokens is None:
                streams.remove(stream)
            elif given < num_tokens:
                given += len(tokens)
                yield tokens


def _cut(encode: Callable[[list[str]], list[list[int]]], path: Path, block: int) -> Iterator[list[int]]:
    kept: list[int] = []
    for document in doc.documents(path):
        kept += encode([document])[0]
        while len(kept) >= block:
            yield kept[:block]
            kept = kept[block:]
    if len(kept) > 1:
        yield kept


class _Watching(DensePlan):
    """Dense, module by module, with observers in the modules' places, and an eye on queries and keys."""

    def __init__(self, cache: KVCache, batch: PackedBatch, swaps: Mapping[Any, Forward], seen: _Seen) -> None:
        super().__init__(cache, batch)
        self.native = None
        self.swaps = swaps
        self._seen = seen

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        output = super().attend(layer, q_HTD, k_GTD, v_GTD, **options)
        if options.get("window") is None and options.get("softcap") is None and options.get("sinks_H") is None:
            keys_SGCD = self.cache.keys[layer]
            assert keys_SGCD is not None
            segment = self.segments[0]
            self._seen.pick(layer, q_HTD, keys_SGCD[segment.slot], segment.prefix, options["scaling"])
        return output


def _watch_mlp(mlp: GatedMLP, seen: _Seen) -> Forward:
    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_up(x)
        g = mlp.act(gate)
        seen.gates(g.reshape(-1, g.shape[-1]))
        y: Tensor = mlp.down(g * up)
        return y

    return forward


def _watch_experts(experts: RoutedExperts, seen: _Seen) -> Forward:
    own = experts.module.forward

    def forward(x_RD: Tensor, chosen_Rk: Tensor, weights_Rk: Tensor) -> Tensor:
        seen.ratios[experts.layer].append(ratios(weights_Rk).cpu())
        for expert in chosen_Rk.unique().tolist():
            rows = (chosen_Rk == expert).any(-1).nonzero()[:, 0]
            gate_up, _ = experts.linears(expert)
            seen.gates(experts.act(gate_up(x_RD[rows]).chunk(2, dim=-1)[0]), rows)
        y_RD: Tensor = own(x_RD, chosen_Rk, weights_Rk)
        return y_RD

    return forward


@dataclass
class _Mean:
    """A mean that grows."""

    total: float = 0.0
    count: float = 0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class _Seen:
    """What the observers have found so far."""

    num_layers: int
    rule: BlockRule
    ratios: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _shut: dict[tuple[float, str, int], _Mean] = field(default_factory=lambda: defaultdict(_Mean))
    # of this chunk, by the owner of the sets: layer -> of each root bool [G, N], the layer's own set [1, N]
    _picks: dict[str, dict[int, list[Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    _alike: dict[tuple[str, int, int], _Mean] = field(default_factory=lambda: defaultdict(_Mean))
    _caught: dict[tuple[str, str], _Mean] = field(default_factory=lambda: defaultdict(_Mean))  # score, owner

    # ---------------------------------------------------------------- MLPs

    def gates(self, g_RF: Tensor, rows: Tensor | None = None) -> None:
        """Activated gates of some rows of the chunk; ``rows`` says which, if not all."""
        places = torch.arange(len(g_RF), device=g_RF.device) if rows is None else rows
        for tau in TAUS:
            keep_RF = g_RF.abs() >= tau
            for size in GROUPS:
                # a group keeps a channel if one of its rows does; a group counts if one of its rows is present
                present, index_R = (places // size).unique(return_inverse=True)
                kept_PF = torch.zeros(len(present), g_RF.shape[1], dtype=torch.int32, device=g_RF.device)
                kept_PF.index_add_(0, index_R, keep_RF.int())
                shut_PF = kept_PF == 0
                self._shut[tau, "union", size].add(float(shut_PF.sum()), shut_PF.numel())
                tiles = shut_PF[:, : shut_PF.shape[1] // _TILE * _TILE].unflatten(1, (-1, _TILE)).all(-1)
                self._shut[tau, "tiles", size].add(float(tiles.sum()), tiles.numel())

    def sparsities(self) -> tuple[Sparsity, ...]:
        """One entry a threshold."""

        def shares(tau: float, what: str) -> dict[int, float]:
            return {size: round(self._shut[tau, what, size].value, 5) for size in GROUPS}

        return tuple(
            Sparsity(tau=tau, row=shares(tau, "union")[1], union=shares(tau, "union"), tiles=shares(tau, "tiles"))
            for tau in TAUS
        )

    # ---------------------------------------------------------------- experts

    def thresholds(self, experts: Sequence[RoutedExperts]) -> Thresholds:
        """The medians."""
        beta = {
            layer: tuple(round(each, 6) for each in torch.cat(found).median(dim=0).values.tolist())
            for layer, found in sorted(self.ratios.items())
        }
        return Thresholds(num_chosen=experts[0].num_chosen, beta=beta)

    # ---------------------------------------------------------------- attention

    def pick(self, layer: int, q_HTD: Tensor, keys_GCD: Tensor, prefix: int, scaling: float) -> None:
        """What some rows of the chunk would pick in this layer, by exact scores; blocks kept anyway are left out."""
        rule, num_groups = self.rule, keys_GCD.shape[0]
        count = rule.num_blocks(prefix)
        keep = rule.keep(prefix, num_groups)
        if keep <= (rule.sinks + rule.locals) * num_groups:
            return
        blocks_GNBD = keys_GCD[:, : count * rule.size].unflatten(1, (count, rule.size))
        known = {score: sum_up(blocks_GNBD) for score, sum_up in SUMMARIES.items()}
        free_GN = self._free([torch.arange(count)] * num_groups, count)
        for row in _ROOTS:
            if row >= q_HTD.shape[1]:
                continue
            weights = [  # that the root gives to every block, and those after it
                weights_of_blocks(q_HTD[:, each], keys_GCD[:, : prefix + each + 1], rule.size, count, scaling=scaling)
                for each in range(row, min(row + _DRAFT, q_HTD.shape[1]))
            ]
            scores = {"exact": weights[0]}
            scores |= {score: scores_of_summaries(q_HTD[:, row], each) for score, each in known.items()}
            for score, scores_GN in scores.items():
                picked_GN = self._free(rule.select(scores_GN, keep), count)
                if score == "exact":
                    self._picks["per_head"].setdefault(layer, []).append(picked_GN)
                    together = replace(rule, sets="per_layer").select(scores_GN, keep)[:1]
                    self._picks["per_layer"].setdefault(layer, []).append(self._free(together, count))
                for place, each in enumerate(weights):
                    of_row_GN, whose = each.cpu(), "draft" if place else "root"
                    self._caught[score, whose].add(float(of_row_GN[picked_GN].sum()), float(of_row_GN[free_GN].sum()))

    def _free(self, chosen: Sequence[Tensor], count: int) -> Tensor:
        """Which of the chosen blocks would not have been kept anyway, bool [G, N]."""
        picked_GN = torch.zeros(len(chosen), count, dtype=torch.bool)
        for head, blocks in enumerate(chosen):
            picked_GN[head, blocks.cpu()] = True
        picked_GN[:, : self.rule.sinks] = picked_GN[:, count - self.rule.locals :] = False
        return picked_GN

    def end_of_chunk(self) -> None:
        """Compare the layers' picks."""
        for sets, picks in self._picks.items():
            for i in picks:
                for j in picks:
                    ours, theirs = torch.stack(picks[i]), torch.stack(picks[j])
                    if ours.shape == theirs.shape:
                        shared, either = (ours & theirs).sum(-1), (ours | theirs).sum(-1)
                        alike = torch.where(either > 0, shared / either.clamp(min=1), 1.0)
                        self._alike[sets, i, j].add(float(alike.sum()), alike.numel())
        self._picks.clear()

    def _table(self, sets: str) -> tuple[tuple[float, ...], ...]:
        layers = range(self.num_layers)
        return tuple(tuple(round(self._alike[sets, i, j].value, 4) for j in layers) for i in layers)

    def anchors(self, theta: float) -> Anchors | None:
        """Return the layers' similarities, and the anchors at this threshold; None without measured choices."""
        if not self._alike:
            return None
        table = self._table("per_head")
        rule = self.rule
        settings = {
            "budget": rule.budget,
            "block": rule.size,
            "sinks": rule.sinks,
            "locals": rule.locals,
            "score": "exact",
        }
        caught = {
            score: {whose: round(self._caught[score, whose].value, 4) for whose in ("root", "draft")}
            for score in dict.fromkeys(score for score, _ in self._caught)
        }
        return Anchors(
            layers=tuple(sweep(table, theta)),
            theta=theta,
            jaccard=table,
            jaccard_of_layers=self._table("per_layer"),
            settings=settings,
            caught=caught,
        )
