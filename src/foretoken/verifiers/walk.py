"""The walk that the node-wise rules share: from the root down, one decision per node, many requests abreast.

A rule is then one function, ``NodeRule.decide``: what becomes of the children of a node. It is given the nodes of B
requests that stand at the same number of steps from their roots, so that the arithmetic over the vocabulary is done for
all of them at once.

Letters: B requests, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.core.distortion import Spent
from foretoken.core.draft import Draft, Law, PointMass
from foretoken.core.laws import Laws
from foretoken.core.needs import Offers
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict, follow
from foretoken.verifiers import guessed

Siblings = tuple[int, ...]
Pick = tuple[int | None, int]  # (number of the sibling that stands, its token), or (None, the token emitted instead)
Decide = Callable[[type[Law], Tensor, Tensor | None, Sequence[Siblings], Sequence[Streams]], list[Pick]]


class NodeRule(Verifier):
    """A lossless rule for trees that decides node by node, from the root down.

    A node without children emits a draw from the target's distribution there, the bonus (purpose bonus). At temperature
    0 the verdict is the walk along the argmax, and no decision is made.
    """

    offers = Offers(batches=True)
    promise = "same distribution"
    trees = True

    @staticmethod
    @abstractmethod
    def decide(
        kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """What becomes of the children of one node per request.

        Args:
            kind: of distribution of all drafts in the call.
            p_BV: the target's distribution at the node; rows sum to 1. A view: not to be written to.
            q_BV: the distribution that the children were drawn from; None for point masses. A view as well.
            tokens: the children's tokens in drafting order, at least one per request.
            rngs: the requests' streams.
        Returns:
            one pick per request.
        """

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Decide one draft.

        Args:
            draft: tree of N nodes; siblings share a row of q_KV float32 (already processed), or are point masses.
            target: N + 1 rows; only rows on the walked path are processed.
            rng: the request's streams; what each rule draws from them is at its ``decide``.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        Raises:
            ValueError: the draft's kind of distribution is not among ``laws``.
        """
        return self.verify_batch([draft], [target], [rng])[0]

    def verify_batch(self, drafts: Sequence[Draft], targets: Sequence[Laws], rngs: Sequence[Streams]) -> list[Verdict]:
        return walk(self.name, self.laws, self.decide, drafts, targets, rngs)

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """One more decision of the rule; see verifiers/guessed.py."""
        return guessed.finish(self.decide, verdict, guess, target, rng)


def walk(
    rule: str,
    kinds: tuple[type[Law], ...],
    decide: Decide,
    drafts: Sequence[Draft],
    targets: Sequence[Laws],
    rngs: Sequence[Streams],
) -> list[Verdict]:
    """Verify one draft per request.

    Args:
        rule: name of the rule, for its errors.
        kinds: distributions of the draft that the rule is valid for.
        decide: see ``NodeRule.decide``.
        drafts, targets, rngs: see ``core.protocols.Verifier``.
    Returns:
        one verdict per request. At temperature 0 it is the walk along the argmax, and no decision is made.
    Raises:
        ValueError: a draft's distribution is not among ``kinds``.
    """
    verdicts: list[Verdict | None] = [None] * len(drafts)
    standing: dict[type[Law], list[int]] = {}
    for number, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        if target.greedy:
            verdicts[number] = follow(draft.tree, target.best)
        else:
            if len(draft) and type(draft.law) not in kinds:
                raise ValueError(
                    f"verifier '{rule}' is not valid for drafts of kind {type(draft.law).__name__}, "
                    f"only for {', '.join(kind.__name__ for kind in kinds)}"
                )
            standing.setdefault(type(draft.law), []).append(number)
    for kind, numbers in standing.items():
        _walk_abreast(kind, decide, numbers, drafts, targets, rngs, verdicts)
    return [verdict for verdict in verdicts if verdict is not None]


def _walk_abreast(
    kind: type[Law],
    decide: Decide,
    numbers: list[int],
    drafts: Sequence[Draft],
    targets: Sequence[Laws],
    rngs: Sequence[Streams],
    verdicts: list[Verdict | None],
) -> None:
    """Walk the requests of one kind of distribution to their ends; fills in their verdicts."""
    at = dict.fromkeys(numbers, ROOT)
    paths: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
    while numbers:
        leaves = [number for number in numbers if at[number] not in drafts[number].tree.children]
        if leaves:
            p_BV = _rows([targets[number].p_at(at[number] + 1) for number in leaves])
            extras = categorical_rows([rngs[number] for number in leaves], "bonus", p_BV)
            for number, extra in zip(leaves, extras, strict=True):
                verdicts[number] = Verdict(paths[number], extra)
            numbers = [number for number in numbers if verdicts[number] is None]
            if not numbers:
                return
        children = [drafts[number].tree.children[at[number]] for number in numbers]
        tokens = [
            tuple(drafts[number].tree.tokens[child] for child in its)
            for number, its in zip(numbers, children, strict=True)
        ]
        p_BV = _rows([targets[number].p_at(at[number] + 1) for number in numbers])
        q_BV = None
        if not issubclass(kind, PointMass):
            laws = [drafts[number].law for number in numbers]
            q_BV = _rows([law.q_at(its[0]) for law, its in zip(laws, children, strict=True)])  # type: ignore[union-attr]
        picks = decide(kind, p_BV, q_BV, tokens, [rngs[number] for number in numbers])
        going_on = []
        for number, its, (sibling, token) in zip(numbers, children, picks, strict=True):
            if sibling is None:
                verdicts[number] = Verdict(paths[number], token)
            else:
                at[number] = its[sibling]
                paths[number] = (*paths[number], its[sibling])
                going_on.append(number)
        numbers = going_on


def _rows(rows: list[Tensor]) -> Tensor:
    """Rows as one tensor; one row is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def at_tokens(weights_BV: Tensor, tokens: Sequence[int]) -> list[float]:
    """The entry of one token per row."""
    if len(tokens) == 1:
        return [float(weights_BV[0, tokens[0]])]
    ids = torch.tensor(tokens, device=weights_BV.device)
    return weights_BV.gather(1, ids[:, None])[:, 0].tolist()
