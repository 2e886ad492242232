"""An online suffix automaton: every substring of a growing text, in amortised constant time per token.

States stand for sets of substrings that end at the same places. ``link`` leads to the longest proper suffix that ends
at more places, so the links of a state list its suffixes from long to short:

    text  a b c a b          substring   ends at   count
                             "ab"        1, 4      2      <- the link of the last state: the longest suffix of
                             "cab"       4         1         the text that occurred before, kept for free
"""

from collections.abc import Iterable

ROOT_STATE = 0


class SuffixAutomaton:
    """The substrings of one text, how often each occurs, and the longest suffix that occurred before.

    Paper:   Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text" (construction).
    Exact:   ``count[s]`` is the number of occurrences of the substrings in state s, for every state that holds a
             substring of at most ``count_limit`` tokens. Checked against brute force by
             tests/unit/drafters/test_suffix.py.
    Differs: occurrence counts are normally made in one pass after construction. Here they are kept while the text
             grows: a new token ends one more occurrence of every suffix, that is of every state on one chain of links.
             The chain of a text such as "aaaa" is as long as the text, so counting starts at the state of the
             longest suffix within ``count_limit`` (followed from token to token, never searched for). A state on
             the chain holds a shorter suffix than the one before it, so a token costs at most ``count_limit``
             increments; on real text a token takes four to seven operations in all (``work``).

    Args:
        count_limit: longest substring that is counted.

    Attributes:
        next: per state, token -> state.
        link: per state, the state of its longest suffix that occurs at more places; -1 for the root.
        length: per state, tokens of its longest substring; its shortest has ``length[link] + 1``.
        count: per state, occurrences.
        last: the state of the whole text.
        work: elementary operations so far (states visited while linking, and increments).
    """

    __slots__ = ("_head", "count", "count_limit", "last", "length", "link", "next", "num_tokens", "work")

    def __init__(self, count_limit: int) -> None:
        self.count_limit = count_limit
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = ROOT_STATE
        self.num_tokens = 0
        self.work = 0
        self._head = ROOT_STATE  # state of the longest suffix of at most count_limit tokens

    def __len__(self) -> int:
        """Number of states: at most twice the number of tokens."""
        return len(self.length)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        next_, link, length, count = self.next, self.link, self.length, self.count
        last, head, size, limit, work = self.last, self._head, self.num_tokens, self.count_limit, self.work
        for token in tokens:
            state = len(length)
            length.append(size + 1)
            next_.append({})
            link.append(ROOT_STATE)
            count.append(0)
            at = last
            while at >= 0:
                edges = next_[at]
                work += 1
                if token in edges:
                    break
                edges[token] = state
                at = link[at]
            if at >= 0:
                found = next_[at][token]
                if length[found] != length[at] + 1:
                    # the suffix that we link to shares a state with longer substrings, which do not end here: split
                    clone = len(length)
                    length.append(length[at] + 1)
                    next_.append(next_[found].copy())
                    link.append(link[found])
                    count.append(count[found])
                    while at >= 0 and next_[at].get(token) == found:
                        next_[at][token] = clone
                        at = link[at]
                        work += 1
                    link[found] = clone
                    found = clone
                link[state] = found

            kept = size if size < limit else limit
            head = next_[head][token]  # right after a split, too: the clone has the same edges
            if kept == limit and length[link[head]] >= limit:
                head = link[head]  # one token longer than the limit: drop the oldest
            at = head
            while at:
                count[at] += 1
                work += 1
                at = link[at]
            last = state
            size += 1
        self.last, self._head, self.num_tokens, self.work = last, head, size, work

    def repeated_suffix(self, limit: int) -> tuple[int, int]:
        """The longest suffix of the text that also occurs earlier, cut to ``limit`` tokens (below ``count_limit``).

        Returns:
            its state and its length in tokens; the root and 0 if even the last token is new.
        """
        if self.last == ROOT_STATE:
            return ROOT_STATE, 0
        state = self.link[self.last]
        matched = self.length[state]
        if matched <= limit:
            return state, matched
        # the cut suffix repeats as well, so its state lies on the same chain of links, at the head or just above
        state = self._head
        while self.length[self.link[state]] >= limit:
            state = self.link[state]
        return state, limit
