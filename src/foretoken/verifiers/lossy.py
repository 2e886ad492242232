"""What the lossy rules share: the walk, the meter, and the budget that falls back to exact verification.

A rule says two things of a node with children: by which distribution it would emit there, and how it decides. Before
anything is drawn the walk compares that distribution with the target's; where the request's budget does not allow the
difference, the node is decided by `recursive`, which is exact for both kinds of q.

Letters: V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from foretoken.core.distortion import Account, Spent, divergence, total_variation
from foretoken.core.draft import Draft, GreedyLaws, Law, PointMass, Sampled
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict
from foretoken.options.option import Checked, Option
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.walk import Pick, Siblings

Step = Callable[[int, Siblings, Siblings], Pick]  # node, its children, their tokens


@dataclass(frozen=True, kw_only=True)
class LossyConfig(Checked):
    """Options of every lossy rule."""

    max_distortion: Annotated[
        float | None,
        Option(
            "Budget: mean total variation per token at most, of every prefix of a request's output; None: no bound, "
            "0: exact.",
            least=0,
            most=1,
            remedy="leave it out for no bound, use 0 for exact verification",
        ),
    ] = None


class BudgetedVerifier(Verifier, ABC):
    """Base of whatever is metered and has a budget; it gives ``verify_within``."""

    promise = "approximate"
    Config: ClassVar[type[Any]] = LossyConfig

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @property
    def budget(self) -> float | None:
        bound: float | None = self.config.max_distortion
        return bound

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Decide one draft as if nothing had been emitted before: the budget is that of a fresh request."""
        return self.verify_within(draft, target, rng, None)


class LossyVerifier(BudgetedVerifier):
    """Base of the lossy rules; they give ``name``, ``Config``, :meth:`law`, :meth:`decide` and :meth:`stands`."""

    name: str
    laws: tuple[type[Law], ...] = (PointMass, Sampled)
    trees = True

    @abstractmethod
    def law(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings) -> Tensor:
        """The distribution e by which this rule emits at a node, [V]; see core/distortion.py.

        Args:
            p_V: the target's distribution, sums to 1; not to be written to.
            q_V: the distribution that the children were drawn from; None: point masses, and e is the distribution given
                the children.
            tokens: the children's tokens in drafting order, at least one. If they were drawn, e depends on their number
                only.
        """

    @abstractmethod
    def decide(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
        """What becomes of the children: the number of the one that stands and its token, or None and another token."""

    @abstractmethod
    def stands(self, p_V: Tensor, q_V: Tensor | None, token: int) -> bool:
        """Temperature 0: whether a child that is not the argmax stands; both distributions are those at temperature 1.

        Args:
            p_V: the target's.
            q_V: the drafter's, where the draft carries it (``GreedyLaws``); else None.
            token: has p > 0.
        """

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft within the rest of the request's budget.

        From the root down, at a node with children: the rule's emitted distribution e is compared with p; if the budget
        allows their distance the rule decides, else exact verification does. A node without children: extra ~ p, the
        bonus.

        Temperature 0: the first child that is the argmax, or that the rule lets stand by the target's distribution at
        temperature 1 (bias and penalties applied, no filter), is accepted; if there is none the argmax is emitted.
        Where the budget does not allow another token than the argmax, the walk is the exact one.

        Args:
            draft: tree (or chain) of N nodes, point masses or independent draws.
            target: N + 1 rows; only rows on the walked path are processed.
            rng: the decisions and draws of the rule, or of `recursive`.
            spent: what the request has emitted and spent.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft is of another kind, or branches where the rule verifies chains.
        """
        check_fit(self, draft, target)
        account = Account(spent, self.config.max_distortion)

        def step(node: int, children: Siblings, tokens: Siblings) -> Pick:
            return self._decide(draft, children, target, node + 1, rng, account)

        return descend(draft, target, rng, account, step)

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide the guess as a node after the path: by the same rule, meter and budget."""
        account = Account(spent, self.config.max_distortion)
        for charged in list(zip(verdict.distortions, verdict.divergences, strict=True))[:-1]:  # the extra token is anew
            account.add(*charged)
        _, extra = self._decide(guess, (0,), target, len(verdict.path), rng, account)
        return _verdict(list(verdict.path), extra, account)

    def _decide(self, draft: Draft, children: Siblings, target: Laws, row: int, rng: Streams, account: Account) -> Pick:
        """What becomes of the children of the node with this row; charges for the token."""
        tokens = tuple(draft.tree.tokens[child] for child in children)
        if target.greedy:
            greedy = draft.evidence
            q_V = greedy.q_NV[children[0]] if isinstance(greedy, GreedyLaws) else None
            return self._step_greedy(target, row, q_V, tokens, account)
        q_V = None if isinstance(draft.law, PointMass) else draft.law.q_at(children[0])
        return self._step(target.p_at(row), q_V, tokens, rng, account)

    def _step(self, p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams, account: Account) -> Pick:
        e_V = self.law(p_V, q_V, tokens)
        distance = total_variation(e_V, p_V)
        if account.allows(distance):
            account.add(distance, divergence(e_V, p_V))
            return self.decide(p_V, q_V, tokens, rng)
        account.add(0.0, 0.0)
        return exactly(p_V, q_V, tokens, rng)

    def _step_greedy(self, target: Laws, row: int, q_V: Tensor | None, tokens: Siblings, account: Account) -> Pick:
        best = target.best[row]
        raw_V: Tensor | None = None
        for number, token in enumerate(tokens):
            if token == best:
                account.add(0.0, 0.0)
                return number, token
            if not account.allows(1.0):
                continue
            if raw_V is None:
                raw_V = torch.softmax(target.logits_at(row).float(), dim=-1)
            if float(raw_V[token]) > 0.0 and self.stands(raw_V, q_V, token):
                account.add(1.0, float("inf"))
                return number, token
        account.add(0.0, 0.0)
        return None, best


def exactly(p_V: Tensor, q_V: Tensor | None, tokens: Siblings, rng: Streams) -> Pick:
    """The same node by `recursive`, against p."""
    kind: type[Law] = PointMass if q_V is None else Sampled
    return RecursiveVerifier.decide(kind, p_V[None], None if q_V is None else q_V[None], [tokens], [rng])[0]


def permitted(target: Laws, row: int, token: int) -> bool:
    """Temperature 0: whether nothing (bias, min_tokens) forbids the token."""
    return math.isfinite(float(target.logits_at(row)[token]))


def check_fit(rule: Verifier, draft: Draft, target: Laws) -> None:
    """Refuse a draft that the rule does not know.

    Raises:
        ValueError: it is of another kind, or branches where the rule verifies chains.
    """
    kind = type(draft.law)
    if len(draft) and not target.greedy and kind not in rule.laws:
        raise ValueError(
            f"verifier '{rule.name}' is not valid for drafts of kind {kind.__name__}, "
            f"only for {', '.join(law.__name__ for law in rule.laws)}"
        )
    if not rule.trees and not draft.tree.is_chain:
        raise ValueError(f"the rule '{rule.name}' verifies chains: use 'typical' or 'mixture' for a branching tree")


def descend(draft: Draft, target: Laws, rng: Streams, account: Account, step: Step) -> Verdict:
    """From the root down for as long as a child stands; after a node without children comes a draw of p, the bonus.

    Args:
        account: has recorded every token except the bonus when ``step`` returns.
        step: what becomes of the children (their tokens next to them) of a node.
    """
    tree = draft.tree
    path: list[int] = []
    node = ROOT
    while children := tree.children.get(node, ()):
        sibling, token = step(node, children, tuple(tree.tokens[child] for child in children))
        if sibling is None:
            return _verdict(path, token, account)
        node = children[sibling]
        path.append(node)
    extra = target.best[node + 1] if target.greedy else rng.categorical("bonus", target.p_at(node + 1))
    account.add(0.0, 0.0)
    return _verdict(path, extra, account)


def _verdict(path: list[int], extra: int, account: Account) -> Verdict:
    return Verdict(tuple(path), extra, tuple(account.distortions), tuple(account.divergences))
