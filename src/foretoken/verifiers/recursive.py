"""Recursive rejection over a tree: try the children of a node in turn, each against what its elders left over."""

from __future__ import annotations

from torch import Tensor

from foretoken.core.draft import Draft, Law, PointMass, Sampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual_without
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict, follow


class RecursiveVerifier:
    """Multi-round speculative sampling, from the root down."""

    name = "recursive"
    promise = "same law"
    laws: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """At each node try its children in order with chance min(1, p/q); p becomes (p - q)+ after each refusal.

        From p_1 = p at the node, for its children x_1..x_n in drafting order:

            accept x_j with chance min(1, p_j(x_j) / q_j(x_j)) and go down to it;
            else p_{j+1} = normalised (p_j - q_j)+, and
                independent draws:    q_{j+1} = q            (a repeat is tried again: skipping it is a bias)
                without replacement:  q_{j+1} = normalised q_j without x_j
                point masses:         q_j = 1 at x_j, so p_{j+1} = normalised p_j without x_j
            all refused: extra ~ p_{n+1}.  A node without children: extra ~ p, the bonus.

        Paper:   Miao et al. 2023, arXiv:2305.09781, multi-step speculative sampling (independent draws); Jeon et al.
            2024, arXiv:2402.14160, Algorithm 1 (without replacement).
        Exact:   yes, whenever the children were drawn by the law that the draft declares. Checked by
            tests/statistical/test_exactness.py.
        Differs: on a chain it is the ratio rule. At temperature 0 it is the walk along the argmax. Where rounding
            leaves no mass in q or in the residual, the remaining children are not tried and the extra token comes
            from the last residual that had mass.

        Args:
            draft: tree of N nodes; siblings share a row of q_KV float32 (already processed), or point masses.
            target: N + 1 rows; row i + 1 is the law after node i. Only rows on the walked path are normalised.
            rng: one decision of purpose accept per tried child, then one draw of purpose residual or bonus.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        """
        tree = draft.tree
        if target.greedy:
            return follow(tree, target.best)
        path: list[int] = []
        node = ROOT
        while True:
            p_V = target.p_at(node + 1)
            children = tree.children.get(node, ())
            if not children:
                return Verdict(tuple(path), rng.categorical("bonus", p_V))
            if isinstance(draft.law, PointMass):
                found, left_V = _try_points(tree.tokens, children, p_V, rng)
            else:
                found, left_V = _try_draws(draft.law, tree.tokens, children, p_V, rng)
            if found is None:
                return Verdict(tuple(path), rng.categorical("residual", left_V))
            path.append(found)
            node = found


def _try_points(
    tokens: tuple[int, ...], children: tuple[int, ...], p_V: Tensor, rng: Streams
) -> tuple[int | None, Tensor]:
    """The child that stands, or None and the residual weights [V]; one pass over the vocabulary if all are refused."""
    refused: list[int] = []
    mass = 1.0
    for child in children:
        token = tokens[child]
        chance = 0.0 if token in refused else float(p_V[token])
        # mass <= 0 only by rounding: then the elder siblings held everything, and this one has the rest for certain
        if chance > 0.0 and rng.bernoulli("accept", (chance / mass if mass > 0.0 else 1.0,))[0]:
            return child, p_V
        refused.append(token)
        mass -= chance
    return None, residual_without(p_V, refused)


def _try_draws(
    law: Sampled | WithoutReplacement, tokens: tuple[int, ...], children: tuple[int, ...], p_V: Tensor, rng: Streams
) -> tuple[int | None, Tensor]:
    """The child that stands, or None and the residual weights [V]."""
    distinct = isinstance(law, WithoutReplacement)
    q_V = law.q_at(children[0])
    for number, child in enumerate(children):
        token = tokens[child]
        if rng.bernoulli("accept", (ratio(float(p_V[token]), float(q_V[token])),))[0]:
            return child, p_V
        left_V = (p_V - q_V).clamp_(min=0.0)
        mass = float(left_V.sum())
        if mass <= 0.0:
            break
        p_V = left_V.div_(mass)
        if distinct and number + 1 < len(children):
            q_V = residual_without(q_V, (token,))
            mass = float(q_V.sum())
            q_V = q_V / mass
            if float(q_V[token]) > 0.0:  # nothing but this token was left to draw from
                break
    return None, p_V
