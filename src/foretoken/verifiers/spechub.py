"""SpecHub: pairs that all contain the draft's favourite token, which takes up what the other tokens leave over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.draft import HubPair, Law
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.residual import ratio
from foretoken.core.siblings import hub_of
from foretoken.verifiers.walk import NodeRule, Pick, Siblings


class SpecHubVerifier(NodeRule):
    """The optimum of its own pair distribution, by two tests and two sums.

    At each node test the token that is not the hub, then the hub with what such tests left over.

    With a the hub (the most probable token of q), Q1(i) = Pr(i, a) = q(i), Q2(i) = Pr(a, i) = q(a) q(i)/(1 - q(a)):

        pair (i, a): accept i with chance min(1, p(i) / Q1(i));      then r = (p - Q1)+, Q1' = (Q1 - p)+
        pair (a, i): accept i with chance min(1, r(i) / Q2(i));      then Q2' = (Q2 - r)+, r = (r - Q2)+
        pair (a, i) still open: accept a with chance min(1, p(a) / sum Q2');   r(a) = (p(a) - sum Q2')+
        pair (i, a) still open: accept a with chance min(1, r(a) / sum Q1');   r(a) = (r(a) - sum Q1')+
        else extra ~ r.  One child: the ratio rule.  A node without children: extra ~ p.

    Paper:   Sun et al. 2024, arXiv:2411.05289, Algorithm 1.
    Exact:   yes, for pairs drawn as ``HubPair`` says. Checked by tests/statistical/test_exactness.py.
    Differs: nothing.
    """

    name = "spechub"
    laws: tuple[type[Law], ...] = (HubPair,)

    @classmethod
    def decide(
        cls, kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: at most two decisions of purpose accept and one draw of purpose residual per node."""
        assert q_BV is not None
        picks: list[Pick] = [(None, -1)] * len(tokens)
        hubs: dict[int, int] = {}  # the hub of every row that is still open; its only token where there is no pair
        for row, (p_V, q_V, its, rng) in enumerate(zip(p_BV, q_BV, tokens, rngs, strict=True)):
            if len(its) > 2:
                raise ValueError(f"verifier 'spechub' takes pairs, not {len(its)} children: set num_drafts=2")
            hub = hub_of(q_V) if len(its) == 2 else -1
            number = 1 if its[0] == hub else 0  # of the token that is not the hub
            p, q = float(p_V[its[number]]), float(q_V[its[number]])
            if number == 0:
                chance = ratio(p, q)
            else:
                # 1 - q(a) as the sum of the others: the difference has no digits left where the hub has nearly all
                others = float(q_V.index_fill(0, torch.tensor([hub], device=q_V.device), 0.0).sum())
                chance = ratio(cls.left_for_second(p, q), float(q_V[hub]) * q / others)
            if rng.bernoulli("accept", (chance,))[0]:
                picks[row] = (number, its[number])
            else:
                hubs[row] = hub
        if hubs:
            _let_hubs_take(p_BV, q_BV, hubs, tokens, rngs, picks)
        return picks

    @staticmethod
    def left_for_second(p: float, first: float) -> float:
        """r(i): what the pairs (i, a) leave of p(i) for the pairs (a, i)."""
        return max(p - first, 0.0)


def _let_hubs_take(
    p_BV: Tensor,
    q_BV: Tensor,
    hubs: dict[int, int],
    tokens: Sequence[Siblings],
    rngs: Sequence[Streams],
    picks: list[Pick],
) -> None:
    """Decide on the hubs of the open rows, and draw from the residual where they are refused too; fills in picks."""
    open_rows = list(hubs)
    p_BV, q_BV = p_BV[open_rows], q_BV[open_rows]
    left_BV = (p_BV - q_BV).clamp_(min=0.0)  # what a single draw from q leaves
    paired = [place for place, row in enumerate(open_rows) if hubs[row] >= 0]
    refused = [place for place, row in enumerate(open_rows) if hubs[row] < 0]
    if paired:
        a_B1 = torch.tensor([[hubs[open_rows[place]]] for place in paired], device=p_BV.device)
        p_PV, q_PV = p_BV[paired], q_BV[paired]
        hub_B1 = q_PV.gather(1, a_B1)
        others_PV = q_PV.scatter(1, a_B1, 0.0)
        second_PV = others_PV * (hub_B1 / others_PV.sum(-1, keepdim=True))
        first_left = (others_PV - p_PV).clamp_(min=0.0).sum(-1).tolist()
        r_PV = (p_PV - others_PV).clamp_(min=0.0)
        second_left = (second_PV - r_PV.scatter(1, a_B1, 0.0)).clamp_(min=0.0).sum(-1).tolist()
        r_PV = (r_PV - second_PV).clamp_(min=0.0)
        for number, place in enumerate(paired):
            row = open_rows[place]
            hub, its = hubs[row], tokens[row]
            p = float(p_PV[number, hub])
            after_second = max(p - second_left[number], 0.0)
            first_is_hub = its[0] == hub
            chance = ratio(p, second_left[number]) if first_is_hub else ratio(after_second, first_left[number])
            r_PV[number, hub] = max(after_second - first_left[number], 0.0)
            if rngs[row].bernoulli("accept", (chance,))[0]:
                picks[row] = (0 if first_is_hub else 1, hub)
            else:
                refused.append(place)
        left_BV[paired] = r_PV
    if refused:
        left_BV = left_BV[refused]
        left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0.0, left_BV, p_BV[refused])
        extras = categorical_rows([rngs[open_rows[place]] for place in refused], "residual", left_BV)
        for place, extra in zip(refused, extras, strict=True):
            picks[open_rows[place]] = (None, extra)
