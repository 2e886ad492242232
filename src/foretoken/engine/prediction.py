"""Predicted outputs: the tokens that an answer is expected to repeat are drafts, copied from where the answer stands.

Letters as tokens, the end of the output as a bar:

    prediction    a b c d e f g h
    output        a b X d e |           left at c, found again by "d e"
    draft         f ── g ── h

A copy is a point mass that follows from the request's own past, so it is lossless under any lossless rule.
"""

from bisect import bisect_left
from collections.abc import Sequence

from foretoken.core.draft import NO_DRAFT, Draft, PointMass
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafters.agreement import AgreementRates
from foretoken.engine.draft_length.history_only import OwnPastRule

SOURCE = "prediction"
"""The source of copied nodes (``Draft.sources``)."""

_LONGEST = 32  # tokens: longer agreement would not add information
_TRUST = 0.8  # that a token stands, before any was tested
_PRIOR_WEIGHT = 2.0  # few tests suffice to give up a wrong prediction
_ROW_COST = 0.08  # of a copied token, in plain steps; fixed, so that seeded requests draft alike everywhere
_MOST_COMPARED = 64  # places with the same two tokens, the nearest ones


class PredictedText:
    """The tokens of a prediction, and where each pair of them occurs; all completions of a prompt share it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self._after: dict[tuple[int, int], list[int]] = {}  # a pair -> the places after it, increasing
        for place in range(2, len(self.tokens)):
            self._after.setdefault((self.tokens[place - 2], self.tokens[place - 1]), []).append(place)

    def find(self, tokens: Sequence[int], begin: int, near: int) -> tuple[int, int]:
        """Find where a text goes on in the prediction.

        Args:
            tokens: the text, of which the part from ``begin`` on is compared.
            near: of equally good places, the first one from here on is taken, else the last one before.
        Returns:
            the place, and how many tokens before it agree with the text's end; (0, 0): nowhere.
        """
        if len(tokens) - begin < 2:
            return 0, 0
        places = self._after.get((tokens[-2], tokens[-1]), [])
        first = bisect_left(places, near)
        half = _MOST_COMPARED // 2
        found = best = 0
        for place in (*places[first : first + half], *reversed(places[max(0, first - half) : first])):
            longest = min(_LONGEST, place, len(tokens) - begin)
            agreement = 2
            while agreement < longest and self.tokens[place - agreement - 1] == tokens[-agreement - 1]:
                agreement += 1
            if agreement > best:
                found, best = place, agreement
        return found, best


class PredictionReader:
    """One request's place in its prediction.

    Args:
        text: the prediction.
    """

    def __init__(self, text: PredictedText) -> None:
        self._text = text
        self._place = 0  # where the answer goes on, or where it left the prediction
        self._agreement = 0  # tokens before that place that agree with the output
        self._follows = True
        self._num_read = 0  # tokens of the output
        self._tested = False
        self._rates = AgreementRates(_LONGEST, _PRIOR_WEIGHT)
        self._rule = OwnPastRule(_ROW_COST)

    def draft(self, tokens: Sequence[int], num_prompt: int, limit: int) -> Draft:
        """Copy a chain of at most ``limit`` tokens, as far as they are expected to be worth their rows."""
        self._read(tokens, num_prompt)
        if not self._follows:
            return NO_DRAFT
        copied = self._text.tokens[self._place : self._place + max(0, limit)]
        confidences: list[float] = []
        reach = 1.0
        for place in range(len(copied)):
            rate = self._rates.rates[min(self._agreement + place, _LONGEST)]
            confidence = rate if self._tested else max(rate, _TRUST)
            if not self._rule.worthwhile(reach, confidence, place):
                break
            confidences.append(confidence)
            reach *= confidence
        if not confidences:
            return NO_DRAFT
        tree = TokenTree(copied[: len(confidences)])
        return Draft(tree, PointMass(), tuple(confidences), sources=(SOURCE,) * len(tree), by_engine=True)

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in a step with a copy, or one without a draft, before its tokens are read."""
        self._rule.learn(draft, verdict)
        accepted = len(verdict.path)
        for place in range(min(accepted + 1, len(draft))):
            self._rates.learn(self._agreement + place, place < accepted)
            self._tested = True

    def _read(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Follow the new tokens of the output; where they leave the prediction, find them again."""
        known = self._text.tokens
        for token in tokens[num_prompt + self._num_read :]:
            self._follows = self._follows and self._place < len(known) and known[self._place] == token
            if self._follows:
                self._place += 1
                self._agreement += 1
        self._num_read = len(tokens) - num_prompt
        if not self._follows:
            place, self._agreement = self._text.find(tokens, num_prompt, self._place)
            if self._agreement:
                self._place, self._follows = place, True
