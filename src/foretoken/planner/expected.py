"""The expected steps of a drafter along a recorded text, by the probability that its first i draft tokens are accepted.

Given the emitted text x, a verifier accepted the first i tokens of a draft with the probability

    ratio    r_1 ... r_i,   r_k = min(1, q(x_k) / p(x_k))
    block    min over k <= i of min(1, q(x_1..x_k) / p(x_1..x_k))
    match    q(x_1) ... q(x_i), where the draft was drawn independently
    greedy   1 if the draft agrees with x up to i, as for every deterministic draft

No probability depends on tokens of x after i, so that a step that starts at token t emits j + 1 tokens with probability
S_j - S_(j+1), whatever follows. The only noise left is that of the text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Start:
    """The draft of one step, wherever it may start.

    Attributes:
        nodes: draft tokens.
        log_q: of the recorded tokens, in the distributions that the draft tokens were drawn from; -inf where the draft
            could not have been the recorded token. It ends where the text ends.
    """

    nodes: int
    log_q: tuple[float, ...]


@dataclass(slots=True)
class Expected:
    """The steps of one answer, each with the probability that it takes place.

    Attributes:
        steps: (probability, tokens of the context, draft tokens).
        tokens: emitted by these steps.
    """

    steps: list[tuple[float, int, int]] = field(default_factory=list)
    tokens: int = 0

    @property
    def num_steps(self) -> float:
        return math.fsum(step[0] for step in self.steps)

    @property
    def mean_nodes(self) -> float:
        """Draft tokens of a step."""
        return math.fsum(step[0] * step[2] for step in self.steps) / max(self.num_steps, 1e-9)


def survival(rule: str, log_q: Sequence[float], log_p: Sequence[float]) -> list[float]:
    """The probability that the first i draft tokens are accepted, i = 1, 2, ..., given the recorded tokens.

    Args:
        rule: "ratio", "block", "match" or "greedy".
        log_q, log_p: of the recorded tokens, by draft and target.
    """
    found: list[float] = []
    total, kept = 0.0, 1.0
    for q, p in zip(log_q, log_p, strict=False):
        if rule == "block":
            total += q - p
            kept = min(kept, math.exp(min(0.0, total)))
        elif rule == "ratio":
            kept *= math.exp(min(0.0, q - p))
        else:
            kept *= math.exp(q)
        found.append(kept)
    return found


def expect(starts: Sequence[Start], log_p: Sequence[float], length: int, rule: str, prompt: int) -> Expected:
    """Add up the steps of one answer with drafts of at most ``length`` tokens.

    Args:
        starts: the draft after each token of the answer but the last.
        log_p: of every token of the answer.
        length: draft tokens at most.
        rule: the verifier's name.
        prompt: tokens of the prompt.
    """
    last = len(log_p) - 1
    reached = [1.0] + [0.0] * last
    found = Expected(tokens=last)
    for place in range(last):
        weight = reached[place]
        if weight <= 0.0:
            continue
        start = starts[place]
        nodes = min(start.nodes, length)
        chances = survival(rule, start.log_q[:nodes], log_p[place + 1 :])
        found.steps.append((weight, prompt + place, nodes))
        before = 1.0
        for emitted, chance in enumerate([*chances, 0.0], start=1):
            reached[min(place + emitted, last)] += weight * (before - chance)
            before = chance
    return found


def chained(ones: Sequence[Start], most: int, limit: int) -> list[Start]:
    """Longer drafts from drafts of one token after every token of the text.

    For a chain in which each token follows from text and draft alone: along accepted tokens the draft reads the text.

    Args:
        ones: the draft of one token after each token of the answer but the last.
        most: draft tokens at most.
        limit: tokens that the answer may have.
    """
    found = []
    for place, one in enumerate(ones):
        nodes = max(0, min(most, limit - place - 2)) if one.nodes else 0
        following = takewhile(bool, (each.log_q for each in ones[place : place + nodes]))
        found.append(Start(nodes, tuple(log_q[0] for log_q in following)))
    return found
