"""The distribution of one emitted token *given the draft*, for any rule that decides node by node.

The mixed distribution at a node depends on the drafted tokens, so it has no meaning without them. Given the draft, a
rule accepts a child with some probability, or samples from the residual. Both follow from a run of the rule on this
node alone, with streams that follow every branch of its decisions and record the distribution of each sample.

Letters: K siblings, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams


class _Branch(Streams):
    """Replay scripted decisions, then take the first possible one; record the alternatives, and the weights of a
    sample.
    """

    def __init__(self, script: tuple[bool, ...]) -> None:
        super().__init__(0)
        self.script = script
        self.taken: list[bool] = []
        self.untried: list[tuple[bool, ...]] = []
        self.chance = 1.0
        self.rest_V: Tensor | None = None

    def bernoulli(self, purpose: str, chances: Sequence[float]) -> list[bool]:
        return [self._decide(min(max(chance, 0.0), 1.0)) for chance in chances]

    def _decide(self, chance: float) -> bool:
        number = len(self.taken)
        if number < len(self.script):
            yes = self.script[number]
        else:
            yes = chance > 0.0
            if 0.0 < chance < 1.0:
                self.untried.append((*self.taken, False))
        self.taken.append(yes)
        self.chance *= chance if yes else 1.0 - chance
        return yes

    def categorical(self, purpose: str, p_V: Tensor) -> int:
        if purpose != "bonus":  # the bonus belongs to another token
            self.rest_V = p_V
        return 0


def law_given(rule: Verifier, draft: Draft, logits_V: Tensor) -> Tensor:
    """Return the distribution of the token that the rule emits at a node, given its children, float [V].

    Args:
        rule: decides by bernoulli and categorical, node by node; or promises the same stream: then its token is the
            target's own sample, independent of the draft.
        draft: K siblings at the root, with the distribution of their samples.
        logits_V: the target's processed logits at the node.
    """
    target = Laws(logits_V.expand(1 + len(draft), -1), greedy=False, positions=range(1 + len(draft)))
    if rule.promise == "same stream":
        return target.p_at(0)
    e_V = torch.zeros_like(target.p_at(0))
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        branch = _Branch(scripts.pop())
        verdict = rule.verify(draft, target, branch)
        if verdict.path:
            e_V[draft.tree.tokens[verdict.path[0]]] += branch.chance
        elif branch.rest_V is not None:
            e_V += branch.chance * branch.rest_V / branch.rest_V.sum()
        scripts += branch.untried
    return e_V
