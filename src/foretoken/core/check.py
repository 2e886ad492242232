"""Is this the distribution that the tree was drawn by? What can be seen of a lie at little cost, seen before it biases
output.

A verifier believes the draft. One draft does not show whether its tokens were *drawn* as it says; but whether q is a
distribution at all, and whether the distribution could have made these siblings, can.

Letters: N draft nodes, K rows of q, V vocabulary, C columns where q has some tokens only.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.draft import HubPair, Law, Sampled, Tabulated, TopThenSampled
from foretoken.core.threads import threads_for
from foretoken.core.tree import TokenTree

_TOLERANCE = 1e-3  # of a row's sum: float32 over a large vocabulary is within 1e-5


def check(law: Law, tree: TokenTree, vocab_size: int) -> None:
    """Refuse a tabulated distribution that is none, or that cannot have made this tree. Two passes over q.

    Args:
        law: point masses and drafts without nodes need no check and get none.
        tree: N nodes with tokens from 0 to V - 1.
        vocab_size: V.
    Raises:
        ValueError: with the reason: shape, dtype or rows of q; entries that are NaN, infinite or negative; a row that
            does not sum to 1; a token of probability 0; siblings of different rows, or such as this kind of
            distribution never draws together.
    """
    if not isinstance(law, Tabulated) or not len(tree):
        return
    q_KV, rows, columns = law.q_KV, law.row_of, law.columns
    if not isinstance(q_KV, Tensor):
        raise ValueError(f"q is a {type(q_KV).__name__}, not a tensor")
    if columns is not None and columns.vocab_size != vocab_size:
        raise ValueError(f"the columns of q are of a vocabulary of {columns.vocab_size}, not of {vocab_size}")
    width = vocab_size if columns is None else len(columns)
    if q_KV.dim() != 2 or q_KV.shape[1] != width:
        raise ValueError(f"q has the shape {list(q_KV.shape)}, not [rows, {width}]")
    if q_KV.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"q is {str(q_KV.dtype)[6:]}: the sampled and the declared distribution must be the same, in float32"
        )
    if len(rows) != len(tree):
        raise ValueError(f"row_of has {len(rows)} entries for {len(tree)} nodes")
    if min(rows) < 0 or max(rows) >= q_KV.shape[0]:
        raise ValueError(f"row_of goes from {min(rows)} to {max(rows)}, but q has {q_KV.shape[0]} rows")
    with threads_for(q_KV.numel()):
        _check_rows(q_KV)
    columns_N = tree.tokens_N.to(q_KV.device) if columns is None else columns.of_tokens(tree.tokens_N)
    if columns is not None and int(columns_N.min()) < 0:
        node = columns_N.tolist().index(-1)
        raise ValueError(f"node {node} carries token {tree.tokens[node]}, which q has no column for: q = 0 there")
    q_N: list[float] = q_KV[torch.tensor(rows, device=q_KV.device), columns_N].tolist()
    for node, q in enumerate(q_N):
        if q <= 0.0:
            raise ValueError(f"node {node} carries token {tree.tokens[node]}, which has q = 0: it was not drawn from q")
    for children in tree.children.values():
        if len(children) > 1:
            _check_siblings(law, tree, children, q_N)


def _check_rows(q_KV: Tensor) -> None:
    """Every row is a distribution. A sum over NaN or infinity is not finite; the least entry of all shows a negative
    one.
    """
    lowest = float(q_KV.amin())
    for row, total in enumerate(q_KV.sum(-1).tolist()):
        if not math.isfinite(total):
            raise ValueError(f"row {row} of q has entries that are NaN or infinite")
        if lowest >= 0.0 and abs(total - 1.0) > _TOLERANCE:
            raise ValueError(f"row {row} of q sums to {total:g}, not to 1")
    if lowest < 0.0:
        raise ValueError(f"q has the negative entry {lowest:g}")


def _check_siblings(law: Tabulated, tree: TokenTree, children: Sequence[int], q_N: Sequence[float]) -> None:
    """Siblings share a row, and their tokens are such as the kind of distribution can draw together."""
    rows = {law.row_of[child] for child in children}
    if len(rows) > 1:
        raise ValueError(f"the siblings {list(children)} were drawn from different rows of q: {sorted(rows)}")
    if isinstance(law, Sampled):
        return
    kind = type(law).__name__
    tokens = [tree.tokens[child] for child in children]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"the siblings {list(children)} repeat a token ({tokens}), which {kind} never does")
    q_of = {tree.tokens[child]: q_N[child] for child in children}
    if isinstance(law, HubPair):
        if len(tokens) > 2:
            raise ValueError(f"a node has {len(tokens)} children, but {kind} has pairs only")
        if not _is_hub(law.q_at(children[0]), min(tokens, key=lambda token: (-q_of[token], token))):
            raise ValueError(f"the pair {tokens} lacks the most probable token of its row of q (the first of equals)")
    if isinstance(law, TopThenSampled) and q_of[tokens[-1]] > min(map(q_of.__getitem__, tokens)):
        raise ValueError(f"the siblings {tokens} do not begin with the most probable tokens of their row of q")


def _is_hub(q_V: Tensor, token: int) -> bool:
    """Whether ``siblings.hub_of`` would name this token; ten times faster than asking which it names."""
    peak = q_V[token]
    return bool(q_V.amax() == peak) and not (token and bool(q_V[:token].amax() == peak))
