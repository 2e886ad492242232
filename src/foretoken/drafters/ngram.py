"""Prompt lookup: copy the continuation of the last n tokens at their previous occurrence.

Tokens as words, the end of the text as a bar:

    text so far   the cat sat on the mat . the cat |
    lookup        "the cat" (n = 2) occurred before; followed by  sat on the mat . the cat
    draft         sat ── on ── the ── mat ── . ── ...
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Offers
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.core.stop_rule import StopRule
from foretoken.core.tree import TokenTree
from foretoken.drafters.agreement import AgreementRates
from foretoken.options.option import Checked, Option

_LONGEST_AGREEMENT = 32  # longer agreement would not add information
_LONGEST = 256  # tokens of an n-gram


@dataclass(slots=True)
class _Index:
    """One request.

    Attributes:
        follows: n-gram -> position of the token that followed its most recent occurrence.
        num_tokens: tokens of the text that are indexed.
        agreement: tokens that agreed before the place that the last draft was copied from; 0 once it was learnt from.
        rates: how often copied tokens stood: of all requests, or of this one alone where its past is all that counts.
    """

    rates: AgreementRates
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_tokens: int = 0
    agreement: int = 0


class NgramDrafter(Drafter):
    """Finds the longest n-gram that ends the text and occurred before, and copies its last continuation.

    Paper:   Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; option names as in vLLM.
    Exact:   a proposal is a function of past tokens only (point mass): lossless under any lossless verifier.
    Differs: the original rescans the text in every step and takes the first occurrence. Here a hash index grows with
             the text, so a step costs the same at any length, and the most recent occurrence wins. A copy that
             reaches the end of the text goes on with the draft's own tokens, so a periodic text is extended over its
             end. Confidence is the measured rate at which copied tokens stood, by the number of tokens (beyond n,
             too) that agreed before them; it is learned across requests, of a seeded one from itself where its
             tokens depend on the draft.
    """

    name = "ngram"
    flops = 0.0  # there is no model of its own
    laws: tuple[type[Law], ...] = (PointMass,)
    branches = False
    offers = Offers(foretells=True)

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of prompt lookup."""

        prompt_lookup_max: Annotated[
            int,
            Option(
                "Longest n-gram, in tokens, that is looked up.",
                least=1,
                most=_LONGEST,
                remedy="every length has an index of its own; method='suffix' looks up any length",
            ),
        ] = 4
        prompt_lookup_min: Annotated[
            int,
            Option(
                "Shortest n-gram that is looked up if no longer one is found; 2 or more drafts less often, with "
                "better odds.",
                least=1,
            ),
        ] = 1

        def check_together(self) -> None:
            if self.prompt_lookup_min > self.prompt_lookup_max:
                raise ConfigError(
                    f"prompt_lookup_min={self.prompt_lookup_min} is greater than "
                    f"prompt_lookup_max={self.prompt_lookup_max}: lower one or raise the other"
                )

    def __init__(self, config: Config, target: Any = None) -> None:
        del target
        self.config = config
        self._lengths = tuple(range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1))
        self._indexes: dict[int, _Index] = {}
        self._rates = AgreementRates(_LONGEST_AGREEMENT)

    def first_confidence(self, context: Context) -> float:
        index, _, agreement = self._found(context)
        return index.rates.rates[min(agreement, _LONGEST_AGREEMENT)] if agreement else 0.0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the nodes that the verifier decided: the accepted ones, and the first that was refused."""
        for outcome in outcomes:
            index = self._indexes.get(outcome.request_id)
            if index is None or not index.agreement:  # observed again, after a neighbour's fault
                continue
            num_accepted = len(outcome.verdict.path)
            for i in range(min(num_accepted + 1, len(outcome.draft))):
                index.rates.learn(index.agreement + i, i < num_accepted)
            index.agreement = 0

    def release(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)

    def _propose(self, context: Context, budget: Budget) -> Draft:
        limit = min(budget.max_nodes, budget.max_depth)
        if limit < 1:
            return NO_DRAFT  # nothing is indexed either: the next proposal catches up
        tokens = context.tokens
        index, source, agreement = self._found(context, budget.history_only)
        if not agreement:
            return NO_DRAFT
        index.agreement = agreement
        rates = index.rates.rates
        confidences = rates[min(agreement, _LONGEST_AGREEMENT) :][:limit]
        confidences += rates[-1:] * (limit - len(confidences))
        if budget.stop_rule is not None:
            limit = _worthwhile(confidences, budget.stop_rule)
            if not limit:
                return NO_DRAFT
        copied = list(tokens[source : source + limit])
        period = len(tokens) - source  # a copy longer than this repeats itself
        for i in range(len(copied), limit):
            copied.append(copied[i - period])
        return Draft(TokenTree(copied), confidence=tuple(confidences[:limit]))

    def _found(self, context: Context, history_only: bool = False) -> tuple[_Index, int, int]:
        """A request's index with all of its tokens, and what :meth:`_look_up` gives."""
        index = self._indexes.get(context.request_id)
        if index is None:
            learnt = AgreementRates(_LONGEST_AGREEMENT) if history_only else self._rates
            index = self._indexes[context.request_id] = _Index(learnt)
        self._extend(index, context.tokens)
        return index, *self._look_up(index, context.tokens)

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index every n-gram that has got a follower since the last call; the last n-gram of the text has none."""
        follows, lengths, longest = index.follows, self._lengths, self._lengths[0]
        end = len(tokens)
        for position in range(max(index.num_tokens, 1), end):
            before = tuple(tokens[max(position - longest, 0) : position])
            for n in lengths:
                follows[before[-n:]] = position
        index.num_tokens = end

    def _look_up(self, index: _Index, tokens: Sequence[int]) -> tuple[int, int]:
        """Where to copy from and how many tokens before that place agree with the end of the text (0: nowhere)."""
        end = len(tokens)
        tail = tuple(tokens[-self._lengths[0] :])
        for n in self._lengths:
            source = index.follows.get(tail[-n:])  # never found if n exceeds the text: all of it occurs once
            if source is not None:
                agreement = n
                longest = min(source, _LONGEST_AGREEMENT)
                while agreement < longest and tokens[source - agreement - 1] == tokens[end - agreement - 1]:
                    agreement += 1
                return source, agreement
        return 0, 0


def _worthwhile(confidences: Sequence[float], stop_rule: StopRule) -> int:
    """How many nodes of a chain are worth their time."""
    reach = 1.0
    for num_nodes, confidence in enumerate(confidences):
        if not stop_rule.worthwhile(reach, confidence, num_nodes):
            return num_nodes
        reach *= confidence
    return len(confidences)
