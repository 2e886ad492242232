"""The packed batch: rows of all requests end to end in one forward.

    input_ids     [ a0 a1 a2 a3 | b0 | c0 c1 c2 ]      a: prefill chunk, b: plain decoding, c: root and a draft
    position_ids  [ 0  1  2  3  | 57 | 9  10 10 ]      a tree node's position is the prefix + its depth
    segments        slot 0       slot 1  slot 2

One request and a hundred, prompts and drafts, are the same code path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree

if TYPE_CHECKING:
    from foretoken.forward.adapter import Adapter
    from foretoken.forward.cache import KVCache


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request.

    Attributes:
        slot: where its keys and values live.
        prefix: committed rows in that slot before this step.
        start: index of its first row in the packed batch.
        num_rows: how many rows.
        tail: uncommitted rows of earlier forwards after the prefix (a draft model reads its tree level by level).
        seen: bool [num_rows, tail + num_rows]: which rows after the prefix each row sees; None means all rows up to
            itself, as in a chain.
        depths: positions after the prefix of the tail's rows and then of these rows, if ``seen`` is given.
        verification: whether these rows are a root and its draft, perhaps an empty one; a prompt's chunk is not.
        adapter: corrects the linear layers for these rows; None: the base model's rows.
    """

    slot: int
    prefix: int
    start: int
    num_rows: int
    tail: int = 0
    seen: Tensor | None = None
    depths: tuple[int, ...] | None = None
    verification: bool = False
    adapter: Adapter | None = None


class PackedBatch:
    """Rows, positions and segments of one forward; built by appending requests.

    Attributes:
        tokens, positions: T integers each.
        segments: one per request.
        wanted: packed rows that need logits, in order.
    """

    __slots__ = ("positions", "segments", "tokens", "wanted")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.wanted: list[int] = []

    @classmethod
    def of_text(cls, tokens: Sequence[int], cache: KVCache | None = None) -> PackedBatch:
        """One text from its beginning, in slot 0 or in a new slot of a cache; logits of all rows."""
        batch, slot = cls(), 0 if cache is None else cache.acquire()
        if cache is not None:
            cache.reserve(slot, len(tokens))
        batch.add_chunk(slot, 0, tokens, wanted=len(tokens))
        return batch

    def __len__(self) -> int:
        return len(self.tokens)

    def add_chunk(
        self,
        slot: int,
        prefix: int,
        tokens: Sequence[int],
        *,
        wanted: int,
        tail: int = 0,
        verification: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """Append consecutive tokens; logits of the last ``wanted`` rows.

        Args:
            slot, prefix: the request's slot and its committed rows.
            tail: rows after the prefix that they follow, a chain.
            verification, adapter: see :class:`Segment`.
        """
        start = len(self.tokens)
        end = start + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(prefix + tail, prefix + tail + len(tokens)))
        self.segments.append(
            Segment(slot, prefix, start, len(tokens), tail, verification=verification, adapter=adapter)
        )
        self.wanted.extend(range(end - wanted, end))

    def add_tree(self, slot: int, prefix: int, root: int, tree: TokenTree, adapter: Adapter | None = None) -> None:
        """Append the root token and the draft after it; logits of all rows."""
        if tree.is_chain:
            self.add_chunk(slot, prefix, (root, *tree.tokens), wanted=1 + len(tree), verification=True, adapter=adapter)
            return
        start = len(self.tokens)
        self.tokens.append(root)
        self.tokens.extend(tree.tokens)
        self.positions.append(prefix)
        self.positions.extend(prefix + depth for depth in tree.depths)
        size = 1 + len(tree)
        rows = bytearray(b"\1").ljust(size, b"\0") + b"".join(b"\1" + row for row in tree.ancestor_rows)
        seen = torch.frombuffer(rows, dtype=torch.bool).view(size, size)
        self.segments.append(Segment(slot, prefix, start, size, 0, seen, (0, *tree.depths), True, adapter))
        self.wanted.extend(range(start, len(self.tokens)))

    def add_level(
        self,
        slot: int,
        prefix: int,
        tokens: Sequence[int],
        *,
        depths: Sequence[int],
        tail: int,
        tail_depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
    ) -> None:
        """Append one level of a tree to its upper levels, which are in the tail; logits of all rows.

        Args:
            slot, prefix: the request's slot and its committed rows.
            tokens: one per row.
            depths: position of each row after the prefix.
            tail: rows already after the prefix.
            tail_depths: their positions after the prefix.
            ancestors: for each row, the tail rows it sees; it also sees itself.
        """
        start = len(self.tokens)
        count = len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(prefix + depth for depth in depths)
        rows = bytearray(count * (tail + count))
        for row, visible in enumerate(ancestors):
            begin = row * (tail + count)
            for column in (*visible, tail + row):
                rows[begin + column] = 1
        seen = torch.frombuffer(rows, dtype=torch.bool).view(count, tail + count)
        self.segments.append(Segment(slot, prefix, start, count, tail, seen, (*tail_depths, *depths)))
        self.wanted.extend(range(start, start + count))

    def add_block(self, slot: int, prefix: int, tokens: Sequence[int], *, first: int) -> None:
        """Append rows that all see each other, later ones included, and the committed prefix; logits of all rows.

        Args:
            slot, prefix: the request's slot and its committed rows.
            tokens: one per row.
            first: position of the first row after the prefix; the others follow.
        """
        start, count = len(self.tokens), len(tokens)
        self.tokens.extend(tokens)
        depths = tuple(range(first, first + count))
        self.positions.extend(prefix + depth for depth in depths)
        seen = torch.ones(count, count, dtype=torch.bool)
        self.segments.append(Segment(slot, prefix, start, count, 0, seen, depths))
        self.wanted.extend(range(start, start + count))

    def of_segments(self, segments: Sequence[Segment]) -> PackedBatch:
        """The rows of some of the segments as a batch of their own; no logits are wanted of it."""
        part = PackedBatch()
        for segment in segments:
            rows = slice(segment.start, segment.start + segment.num_rows)
            part.segments.append(replace(segment, start=len(part.tokens)))
            part.tokens += self.tokens[rows]
            part.positions += self.positions[rows]
        return part

    def ids_1T(self, device: torch.device) -> Tensor:
        """Token ids, int64 [1, T]."""
        return torch.tensor([self.tokens], dtype=torch.int64, device=device)

    def positions_1T(self, device: torch.device) -> Tensor:
        """Positions, int64 [1, T]."""
        return torch.tensor([self.positions], dtype=torch.int64, device=device)

    def wanted_rows(self, device: torch.device) -> Tensor | None:
        """Rows to score, int64; None if every row is wanted."""
        if len(self.wanted) == len(self.tokens):
            return None
        return torch.tensor(self.wanted, dtype=torch.int64, device=device)
