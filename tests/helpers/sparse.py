"""Sparse attention by its definition: one number at a time, in double precision, without blocks laid end to end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.forward.batch import Segment
from foretoken.methods.sparse.blocks import BlockRule


def kept_columns(q_HD: Tensor, k_GLD: Tensor, prefix: int, rule: BlockRule, scaling: float) -> list[set[int]]:
    """Columns of the committed prefix that each head's rows may see.

    Args:
        q_HD: the root's queries.
        k_GLD: keys of everything that the root sees, the prefix first.
    """
    G, P = len(k_GLD), prefix
    n = q_HD.shape[0] // G
    rho, floor, B = rule.budget, rule.dense_below, rule.size
    whole = P // B
    number = math.floor(((P - floor) * rho + floor) * G / B)
    if floor >= P or number >= whole * G or rule.sinks + rule.locals >= whole:
        return [set(range(P)) for _ in range(G)]
    always = {*range(rule.sinks), *range(whole - rule.locals, whole)}
    ranked = []
    for g in range(G):
        for b in range(whole):
            queries = q_HD[g * n : (g + 1) * n].double()
            score = (
                math.inf
                if b in always
                else _score(queries, k_GLD[g].double(), slice(b * B, (b + 1) * B), rule, scaling)
            )
            ranked.append((-score, g, b))
    if rule.sets == "per_layer":  # every head ranks by the sum
        total = {b: sum(score for score, _, block in ranked if block == b) for b in range(whole)}
        ranked = [(total[b], g, b) for _, g, b in ranked]
    ranked.sort()
    if rule.sets == "global":
        chosen = ranked[: max(number, G * max(1, len(always)))]
    else:
        each = max(number // G, 1, len(always))
        chosen = [unit for g in range(G) for unit in [u for u in ranked if u[1] == g][:each]]
    rest = set(range(whole * B, P))
    columns = [set(rest) for _ in range(G)]
    for _, g, b in chosen:
        columns[g] |= set(range(b * B, (b + 1) * B))
    return columns


def _score(q_nD: Tensor, k_LD: Tensor, block: slice, rule: BlockRule, scaling: float) -> float:
    if rule.score == "exact":
        return float(sum(torch.softmax(k_LD @ q_D * scaling, dim=0)[block].sum() for q_D in q_nD))
    if rule.score == "mean":
        return float((k_LD[block] @ q_nD.T).mean())
    q_D = q_nD.sum(dim=0)
    return sum(float(max(q_d * k_d.min(), q_d * k_d.max())) for q_d, k_d in zip(q_D, k_LD[block].T, strict=True))


def attend(
    q_HRD: Tensor, k_GLD: Tensor, v_GLD: Tensor, segment: Segment, columns: list[set[int]], scaling: float
) -> Tensor:
    """[R, H, Dv] in double precision: dense attention in which everything else of the prefix is masked."""
    H, R, _ = q_HRD.shape
    n = H // len(columns)
    behind = segment.tail + R
    rows = []
    for r in range(R):
        seen = [j <= segment.tail + r for j in range(behind)] if segment.seen is None else segment.seen[r].tolist()
        heads = []
        for h in range(H):
            g = h // n
            visible = sorted(columns[g]) + [segment.prefix + j for j in range(behind) if seen[j]]
            weights = torch.softmax(k_GLD[g, visible].double() @ q_HRD[h, r].double() * scaling, dim=0)
            heads.append(weights @ v_GLD[g, visible].double())
        rows.append(torch.stack(heads))
    return torch.stack(rows)
