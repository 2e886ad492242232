"""The probe rows after a draft, with which the target reads it twice, and the meaning of their outputs.

    rows      x_t   d_1   d_2   d_3 │ R_1 … R_r   S_1 … S_s   d_1   d_2        R: the prompt   S: the end of the text
    Z0         1     2     3    (4) │                                          (4): the bonus
    Zr                              │                   1      2     3

Row i judges d_i. Zr's row 1 comes from S's last token, which is x_t again: the row of the copied d_i has read d_i.
Every path of a tree has its own prompt, prefix and copy, which follow its leaf and attend to no other path.

Letters: N draft nodes, P probe rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree


def paths_of(tree: TokenTree) -> list[list[int]]:
    """Return the node paths from the root to every leaf, in the order of the leaves."""
    return [tree.path_to(node) for node in range(len(tree)) if node not in tree.children]


def with_copies(tree: TokenTree, prompt: Sequence[int], prefix: Sequence[int], *, bonus: bool) -> TokenTree:
    """Return the draft's tree with prompt, prefix and copy after every leaf.

    Args:
        tree: N nodes, at least one.
        prompt: r tokens; prefix: s tokens. Not both may be empty.
        bonus: copy the last token of a path, too: its row reflects on the bonus.
    """
    tokens, parents = list(tree.tokens), list(tree.parents)
    for path in paths_of(tree):
        parent = path[-1]
        copied = path if bonus else path[:-1]
        for token in (*prompt, *prefix, *(tree.tokens[node] for node in copied)):
            parents.append(parent)
            parent = len(tokens)
            tokens.append(token)
    return TokenTree(tokens, None if tree.is_chain else parents)


def reflected(tree: TokenTree, probe_PV: Tensor, num_prompt: int, *, bonus: bool) -> dict[int, Tensor]:
    """Return Zr of every row that has one: row -> float32 [V]; row 0 is the root, row i + 1 node i.

    Shared nodes of several paths get the mean of their copies' rows.

    Args:
        tree: the draft's.
        probe_PV: raw logits of the P rows of :func:`with_copies`; P determines the length of the prefix.
        num_prompt: r.
        bonus: as in :func:`with_copies`.
    Raises:
        ValueError: no prefix has that number of rows.
    """
    paths = paths_of(tree)
    copies = [len(path) if bonus else len(path) - 1 for path in paths]
    before, rest = divmod(len(probe_PV) - sum(copies), len(paths))  # r + s
    if rest or before < max(1, num_prompt):
        raise ValueError(f"{len(probe_PV)} probe rows are not those of {len(paths)} paths after {num_prompt} tokens")
    found: dict[int, list[int]] = {}
    begin = 0
    for path, count in zip(paths, copies, strict=True):
        for row, node in enumerate([-1, *path][: 1 + count]):
            found.setdefault(node + 1, []).append(begin + before - 1 + row)
        begin += before + count
    return {row: probe_PV[torch.tensor(sources)].float().mean(0) for row, sources in found.items()}
