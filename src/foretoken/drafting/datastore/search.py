"""Looking up the end of a text in a datastore: the longest context that occurs in it, and its continuations.

    context backwards   cat the                    one binary search finds its place among the sorted suffixes of the
    sorted suffixes     ...                        reversed stream; the neighbours say how much of it occurs
                        cat a | ...
                        cat the . sat              all places where a context of n tokens occurs are one run of
                        cat the on                 suffixes, which grows around the same place as n shrinks
                        ...

A search reads some twenty-five suffixes a segment, wherever they lie in the file; nothing is loaded.
"""

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretoken.core.errors import MismatchError
from foretoken.drafting.datastore.layout import Manifest, Segment, read_manifest


class SegmentReader:
    """One segment, memory-mapped and never written.

    Args:
        folder: of the datastore.
        segment: from its manifest.
        token_bytes: of one token.
    """

    def __init__(self, folder: Path, segment: Segment, token_bytes: int) -> None:
        tokens, suffixes = segment.paths(folder)
        self._width = token_bytes
        self._dtype = np.dtype(f">u{token_bytes}")
        self._tokens = _mapped(tokens)
        self._suffixes = memoryview(_mapped(suffixes)).cast("I")

    def place_of(self, key: bytes) -> tuple[int, int]:
        """Where a reversed context belongs among the suffixes, and how many of its tokens, at most, occur."""
        suffixes, tokens, width = self._suffixes, self._tokens, self._width
        size = len(key)
        place = bisect_left(suffixes, key, key=lambda at: tokens[at * width : at * width + size])
        longest = 0
        for neighbour in (place - 1, place):
            if 0 <= neighbour < len(suffixes):
                begin = suffixes[neighbour] * width
                longest = max(longest, _agreeing(tokens[begin : begin + size], key) // width)
        return place, longest

    def run_of(self, prefix: bytes, place: int) -> tuple[int, int]:
        """The run of suffixes that begin with a prefix, which one next to ``place`` does: from .. to - 1."""
        suffixes, tokens, width = self._suffixes, self._tokens, self._width
        size = len(prefix)

        def beginning(at: int) -> bytes:
            return tokens[at * width : at * width + size]

        # most runs are short: look near the place first
        reach, count = 8, len(suffixes)
        while True:
            low, high = max(place - reach, 0), min(place + reach, count)
            left_open = low > 0 and beginning(suffixes[low]) >= prefix
            right_open = high < count and beginning(suffixes[high - 1]) <= prefix
            if not left_open and not right_open:
                return (
                    bisect_left(suffixes, prefix, low, high, key=beginning),
                    bisect_right(suffixes, prefix, low, high, key=beginning),
                )
            reach *= 16

    def following(self, number: int, count: int) -> list[int]:
        """The tokens that follow the context of one suffix, at most ``count``; separators and beyond included."""
        end = self._suffixes[number] * self._width
        begin = max(end - count * self._width, 0)
        return np.frombuffer(self._tokens[begin:end], dtype=self._dtype)[::-1].tolist()


@dataclass(frozen=True, slots=True)
class Match:
    """Where the end of a text occurs.

    Attributes:
        length: tokens of the context that was found.
        runs: (segment, from, to) with at least one suffix each.
    """

    length: int
    runs: tuple[tuple[SegmentReader, int, int], ...]

    @property
    def count(self) -> int:
        """How often it occurs."""
        return sum(to - begin for _, begin, to in self.runs)


class Datastore:
    """A datastore that is open for reading.

    Args:
        folder: where it lies.
    Raises:
        InputError: it is not there, of another format, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        width = self.manifest.token_bytes
        self._width, self._separator = width, self.manifest.vocab_size
        self._segments = [SegmentReader(folder, segment, width) for segment in self.manifest.segments]

    def check(self, vocabulary: str, model: str) -> None:
        """Refuse a model with another tokenizer.

        Raises:
            MismatchError: with the models' names.
        """
        if vocabulary != self.manifest.vocabulary:
            raise MismatchError(
                f"datastore {self.folder} holds tokens of '{self.manifest.model}', which has another vocabulary than "
                f"'{model}': build one with --model {model}"
            )

    def find(self, tokens: Sequence[int], shortest: int, longest: int) -> Match | None:
        """The longest context at the end of a text that occurs, within bounds in tokens; None if none does."""
        key = b""
        for token in reversed(tokens[-longest:]):
            if not 0 <= token < self._separator:  # an id that the vocabulary lacks: nothing beyond it can be found
                break
            key += token.to_bytes(self._width, "big")
        places = [segment.place_of(key) for segment in self._segments]
        length = max((found for _, found in places), default=0)
        if length < max(shortest, 1):
            return None
        prefix = key[: length * self._width]
        runs = [
            (segment, *segment.run_of(prefix, place))
            for segment, (place, found) in zip(self._segments, places, strict=True)
            if found >= length
        ]
        return Match(length, tuple(runs))

    def continuations(self, match: Match, depth: int, most: int) -> list[list[int]]:
        """Continuations at up to ``most`` matches, evenly spread over all of them: tokens of one document each."""
        count = match.count
        chosen = range(count) if count <= most else [i * count // most for i in range(most)]
        found = []
        base, runs = 0, iter(match.runs)
        segment, begin, to = next(runs)
        for number in chosen:
            while number >= base + to - begin:
                base += to - begin
                segment, begin, to = next(runs)
            tokens = segment.following(begin + number - base, depth)
            for at, token in enumerate(tokens):
                if token >= self._separator:
                    del tokens[at:]
                    break
            found.append(tokens)
        return found


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _agreeing(a: bytes, b: bytes) -> int:
    """How many first bytes are equal."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])
