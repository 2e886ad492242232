"""A draft while it grows: nodes, where they hang, and the rows of q that they were drawn from.

Shared by the drafters that run a model: they differ in which model computes the next rows, and in when they stop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.draft import NO_DRAFT, Coupled, Draft, GreedyLaws, Law, PointMass, ResumePoint, Sampled, Tabulated
from foretoken.core.errors import RequestError
from foretoken.core.protocols import Budget, Context
from foretoken.core.siblings import draw_siblings
from foretoken.core.threads import threads_for
from foretoken.core.tree import ROOT, TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.models.language_model import Output


@dataclass(slots=True)
class DraftBuilder:
    """One request's draft.

    Attributes:
        confidence, reach: of each node: that it stands given its parent does, and that its whole path does.
        row_of: index into ``q_rows`` of each node.
        greedy_rows: of each node of a chain at temperature 0, if the budget asks: the distribution that it is the
            argmax of.
        frontier: nodes to expand next; ROOT at first.
        columns: of the rows of q, where some tokens are scored only; None: column i is token i.
    """

    context: Context
    budget: Budget
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    q_rows: list[Tensor] = field(default_factory=list)
    greedy_rows: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    chain: bool = True
    columns: Columns | None = None

    def add(self, token: int, parent: int, confidence: float, q_row: int) -> int:
        """Append a node and return its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.reach.append(confidence * self.reach_of(parent))
        self.confidence.append(confidence)
        self.row_of.append(q_row)
        self.chain = self.chain and parent == node - 1
        return node

    def reach_of(self, parent: int) -> float:
        """Estimated probability that a parent stands."""
        return 1.0 if parent == ROOT else self.reach[parent]

    def has_room(self, node: int) -> bool:
        """Whether children of ``node`` may still be proposed."""
        return len(self.tokens) < self.budget.max_nodes and self.depths[node] < self.budget.max_depth

    def ancestors(self, node: int) -> list[int]:
        """The node's ancestors, nearest first, without the root."""
        found = []
        node = self.parents[node]
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found

    def add_frontier(
        self, batch: PackedBatch, slot: int, prefix: int, tokens: Sequence[int], row_of: Mapping[int, int] | range
    ) -> None:
        """Add the frontier's rows to a batch, which see their ancestors among the draft's earlier rows.

        Args:
            prefix: committed rows of the slot.
            tokens: of the rows.
            row_of: nodes that were read, in the order of their rows -> their rows after the prefix.
        """
        batch.add_level(
            slot,
            prefix,
            tokens,
            depths=[self.depths[node] - 1 for node in self.frontier],
            tail=len(row_of),
            tail_depths=[self.depths[node] - 1 for node in row_of],
            ancestors=[[row_of[each] for each in self.ancestors(node)] for node in self.frontier],
        )

    def process(self, logits_MV: Tensor, columns: Columns | None) -> Tensor:
        """Processed logits of the frontier, under the history that each node stands for.

        Args:
            columns: of the logits.
        """
        maker = self.context.laws
        if maker.trivial:
            return logits_MV
        return maker.process(logits_MV, TokenTree(self.tokens, self.parents), self.frontier, columns)

    def pays(self, reach: float, confidence: float, count: int | None = None) -> bool:
        """Whether one more node is worth its time, as far as the controller has a say.

        Args:
            reach: of its parent.
            confidence: that it stands.
            count: nodes before it; None: all there are.
        """
        stop_rule, num_nodes = self.budget.stop_rule, len(self.tokens) if count is None else count
        return stop_rule is None or stop_rule.worthwhile(reach, confidence, num_nodes)

    def draw(self, output: Output, row: int, name: str, *, if_it_pays: bool = False) -> int | None:
        """Give the last node of a chain its child: the argmax at temperature 0, else drawn from q.

        Args:
            output: of a forward with ``top`` at least 1.
            row: of the chain's last node in it.
            name: of the drafting model, for messages.
            if_it_pays: let the controller end the chain instead; it decides from q alone, before the draw.
        Returns:
            the child; None where none of the tokens that are scored may be emitted, or where it does not pay.
        Raises:
            RequestError: the logits are NaN.
        """
        context, parent = self.context, self.frontier[0]
        raw_1V, columns, q_V = output.logits_MV[row : row + 1], output.columns, None
        if not context.params.greedy:
            q_V = torch.softmax(self.process(raw_1V, columns)[0].float(), dim=-1)
            # the chance that an independent draw from q agrees, as drafters/draft_model.py takes it
            confidence = float((q_V * q_V).sum()) ** 0.5
        else:
            if not context.laws.trivial:
                output, row = Output.of(self.process(raw_1V, columns), top=1, columns=columns), 0
            confidence = output.top_shares[row * (len(output.top_shares) // len(output.best))]
        if confidence != confidence:
            check_numbers(raw_1V, name)
            return None
        if if_it_pays and not self.pays(self.reach_of(parent), confidence):
            return None
        if q_V is None:
            self.keep_greedy_law(output, row)
            return self.add(output.best[row], parent, confidence, 0)
        (token,) = draw_siblings(Sampled, q_V, 1, context.streams, columns)
        if not if_it_pays:
            confidence = float(q_V[token if columns is None else columns.of(token)])
        return self.add(token, parent, confidence, self.keep(q_V, columns))

    def keep(self, q_V: Tensor, columns: Columns | None) -> int:
        """Keep a row of q that nodes are drawn from; returns its number."""
        self.q_rows.append(q_V)
        self.columns = columns
        return len(self.q_rows) - 1

    def extend_tree(
        self,
        output: Output,
        first: int,
        *,
        width: int,
        name: str,
        expands: Callable[[int, float], bool] = lambda parent, best: True,
        pays: Callable[[float, float], bool] = lambda reach, q: True,
    ) -> None:
        """Grow one level of a tree of the most probable continuations; they become the frontier.

            frontier   a       b            of every node its ``top`` best tokens,
                      ╱│╲     ╱│╲
            level    · c ·   d · ·          of all of these the ``width`` best by the probability of their path

        Args:
            output: of a forward that ranked the ``top`` best tokens of every row.
            first: the frontier's first row in it; the others follow.
            width: nodes of a level at most.
            name: of the drafting model, for messages.
            expands: whether a parent gets children, given the probability of its best one.
            pays: whether a node is worth its verification, given its parent's reach and its own probability; the first
                one that is not ends the level.
        Raises:
            RequestError: the logits are NaN.
        """
        fresh: list[int] = []
        for _, parent, token, q in self.candidates(output, first, name, expands)[:width]:
            if len(self.tokens) >= self.budget.max_nodes or not pays(self.reach_of(parent), q):
                break
            fresh.append(self.add(token, parent, q, 0))
        self.frontier = [node for node in fresh if self.has_room(node)]

    def candidates(
        self, output: Output, first: int, name: str, expands: Callable[[int, float], bool] = lambda parent, best: True
    ) -> list[tuple[float, int, int, float]]:
        """Candidates to extend the frontier: probability of the path, parent, token and its own probability.

        Args:
            output, first, name, expands: as :meth:`extend_tree`.
        Returns:
            most probable path first.
        Raises:
            RequestError: the logits are NaN.
        """
        found: list[tuple[float, int, int, float]] = []
        for parent, ranked in self.ranked(output, first, name):
            if expands(parent, ranked[0][1]):
                reach = self.reach_of(parent)
                found += [(reach * q, parent, token, q) for token, q in ranked if q > 0]
        found.sort(key=lambda each: -each[0])
        return found

    def ranked(self, output: Output, first: int, name: str) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Yield the nodes of the frontier, each with its best tokens and their probabilities for this request.

        A node after which the request allows none of the scored tokens is left out.

        Args:
            output, first, name: as :meth:`extend_tree`.
        Raises:
            RequestError: the logits are NaN.
        """
        raw_MV, columns = output.logits_MV[first : first + len(self.frontier)], output.columns
        top = len(output.top_ids) // len(output.best)
        if not self.context.laws.trivial:
            output, first = Output.of(self.process(raw_MV, columns), top=top, columns=columns), 0
        for row, parent in enumerate(self.frontier, first):
            best = slice(row * top, (row + 1) * top)
            ranked = list(zip(output.top_ids[best], output.top_shares[best], strict=True))
            if ranked[0][1] != ranked[0][1]:
                check_numbers(raw_MV, name)
            else:
                yield parent, ranked

    def keep_greedy_law(self, output: Output, row: int) -> None:
        """Temperature 0: keep the distribution that the next node is the argmax of, if the budget asks for it."""
        if self.budget.evidence is GreedyLaws:
            q_V = torch.softmax(output.logits_MV[row].float(), dim=-1)
            self.greedy_rows.append(q_V if output.columns is None else output.columns.spread(q_V))

    def finish(self, kind: type[Law], resume: ResumePoint | None = None) -> Draft:
        """The draft. Without rows of q it is a point mass, whatever ``kind`` says."""
        if not self.tokens:
            return NO_DRAFT
        tree = TokenTree(self.tokens, None if self.chain else self.parents)
        confidence = tuple(min(1.0, max(1e-6, value)) for value in self.confidence)
        if not self.q_rows:
            law = Coupled() if kind is Coupled and not self.context.params.greedy else PointMass()
            evidence = GreedyLaws(torch.stack(self.greedy_rows)) if self.greedy_rows else None
            return Draft(tree, law, confidence, resume, evidence)
        tabulated = cast(type[Tabulated], kind)
        with threads_for(len(self.q_rows) * self.q_rows[0].numel()):
            q_KV = torch.stack(self.q_rows)
        return Draft(tree, tabulated(q_KV, tuple(self.row_of), self.columns), confidence, resume)


def check_numbers(logits_MV: Tensor, name: str) -> None:
    """Refuse logits that are NaN; where no token is possible without them, logit_bias and min_tokens forbid all.

    That is for the target to say: it may have tokens that the draft does not score.

    Raises:
        RequestError: they are.
    """
    if bool(logits_MV.isnan().any()):
        raise RequestError(no_numbers(name))


def no_numbers(name: str) -> str:
    """The error message for logits that are NaN."""
    return f"draft model '{name}' has nothing to propose: its logits are NaN"
