"""The token tree: what a drafter proposes. A chain is a tree in which every node has at most one child.

    root (last committed token, not part of the tree; parent index -1)
    ├── 0 ── 2 ── 3
    └── 1
tokens  = (t0, t1, t2, t3)
parents = (-1, -1,  0,  2)
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

ROOT = -1


class TokenTree:
    """N proposed tokens and where each of them hangs; immutable.

    Plain tuples carry the structure, because a step looks at a handful of nodes and a tensor costs microseconds
    to touch; the tensor views are made on demand.

    Args:
        tokens: N token ids.
        parents: N parent indices in topological order (``parents[i] < i``); -1 hangs on the root.
            None means a chain.
    Raises:
        ValueError: lengths differ, or a parent does not come before its child.
    """

    def __init__(self, tokens: Sequence[int] | Tensor, parents: Sequence[int] | Tensor | None = None) -> None:
        self.tokens: tuple[int, ...] = tuple(tokens.tolist() if isinstance(tokens, Tensor) else tokens)
        if parents is None:
            self.parents: tuple[int, ...] = tuple(range(ROOT, len(self.tokens) - 1))
            self.is_chain = True
            return
        self.parents = tuple(parents.tolist() if isinstance(parents, Tensor) else parents)
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"a tree of {len(self.tokens)} tokens cannot have {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent must come before its child")
        self.is_chain = all(parent == node - 1 for node, parent in enumerate(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and (self.tokens, self.parents) == (other.tokens, other.parents)

    def __hash__(self) -> int:
        return hash((self.tokens, self.parents))

    def __repr__(self) -> str:
        return f"TokenTree(tokens={self.tokens}, parents={self.parents})"

    @cached_property
    def tokens_N(self) -> Tensor:
        """Token ids, int64 [N]."""
        return torch.tensor(self.tokens, dtype=torch.int64)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; a child of the root has depth 1."""
        if self.is_chain:
            return tuple(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Children of every inner node in drafting order; key -1 is the root."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in found.items()}

    @cached_property
    def ancestor_rows(self) -> tuple[bytearray, ...]:
        """One row of :attr:`ancestors_NN` per node, a byte per entry."""
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parents):
            row = bytearray(len(self.tokens)) if parent == ROOT else rows[parent].copy()
            row[node] = 1
            rows.append(row)
        return tuple(rows)

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """bool [N, N]: entry (i, j) says that j is i or an ancestor of i, that is, row i may attend to row j."""
        size = len(self.tokens)
        if not size:
            return torch.zeros(0, 0, dtype=torch.bool)
        return torch.frombuffer(bytearray().join(self.ancestor_rows), dtype=torch.bool).view(size, size)

    def path_to(self, node: int) -> list[int]:
        """Node indices from a child of the root down to ``node``, both included; empty for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


EMPTY_TREE = TokenTree(())
