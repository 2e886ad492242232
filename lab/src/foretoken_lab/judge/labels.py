"""Labelled tokens for the judge: whether a token is fine after the text before it, and the target's states.

    prompt ── t0 ── t1 ── t2 ── t3 …        the text; every token of it is read once
                     └─ x                   a tried replacement of t2 that was not fine

A label belongs to a token *and* the text before it, so the tokens of a question form a tree, and one forward of the
target gives the states of all of them.

Letters: N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.last_states import LastStates
from foretoken.models.prefill import prefill

Label = tuple[str, bool]  # source (a task or a file), and whether the token is fine


@dataclass(frozen=True)
class Marked:
    """A question's tokens with their labels; tokens without a label are read, too.

    Attributes:
        prompt: tokens before the answer, at least one; questions with equal prompts count as the same question.
        tree: the tokens.
        labels: for each token, its source and whether it is fine; None: no label.
    """

    prompt: Sequence[int]
    tree: TokenTree
    labels: Sequence[Label | None]


@dataclass(frozen=True)
class Labels:
    """Labelled tokens of many questions.

    Attributes:
        hidden_ND: float32, the target's state of the token, after the final norm.
        fine_N: bool.
        asked_N: bool, the token is not the target's own choice; the verifier uses the judge only for such tokens.
        question_N: int64, counted from 0.
        source_N: int64, index of the label's source in ``sources``.
        sources: names.
        law_N3: float32, of the model's distribution at the token: log p of the token, its difference to the largest
            log p, and the entropy. These need no head.
    """

    hidden_ND: Tensor
    fine_N: Tensor
    asked_N: Tensor
    question_N: Tensor
    source_N: Tensor
    sources: tuple[str, ...]
    law_N3: Tensor

    def __len__(self) -> int:
        return len(self.fine_N)

    def of(self, kept_N: Tensor) -> Labels:
        """Return a subset.

        Args:
            kept_N: bool.
        """
        hidden_ND, fine_N, asked_N = self.hidden_ND[kept_N], self.fine_N[kept_N], self.asked_N[kept_N]
        question_N, source_N, law_N3 = self.question_N[kept_N], self.source_N[kept_N], self.law_N3[kept_N]
        return Labels(hidden_ND, fine_N, asked_N, question_N, source_N, self.sources, law_N3)


def read_states(target: LanguageModel, questions: Sequence[Marked]) -> Labels:
    """Run the target once over every question.

    Args:
        target: or the draft, for its distribution at the same tokens.
        questions: prompt and tree of each fit the target's context.
    """
    reader = _Reader(target)
    numbers: dict[tuple[int, ...], int] = {}
    sources: dict[str, int] = {}
    hidden = [torch.zeros(0, target.config.get_text_config(decoder=True).hidden_size)]
    laws = [torch.zeros(0, 3)]
    rows: list[tuple[bool, bool, int, int]] = []
    for question in questions:
        known = {node: label for node, label in enumerate(question.labels) if label is not None}
        if not known:
            continue
        states_ND, own, law_N3 = reader.read(question)
        hidden.append(states_ND[list(known)])
        laws.append(law_N3[list(known)])
        number = numbers.setdefault(tuple(question.prompt), len(numbers))
        for node, (source, fine) in known.items():
            rows.append((fine, not own[node], number, sources.setdefault(source, len(sources))))
    fine_of, asked, question_of, source_of = zip(*rows, strict=True) if rows else ((),) * 4
    return Labels(
        torch.cat(hidden),
        torch.tensor(fine_of, dtype=torch.bool),
        torch.tensor(asked, dtype=torch.bool),
        torch.tensor(question_of, dtype=torch.int64),
        torch.tensor(source_of, dtype=torch.int64),
        tuple(sources),
        torch.cat(laws),
    )


class _Reader:
    """The target over a separate cache."""

    def __init__(self, target: LanguageModel) -> None:
        self._target, self._cache = target, target.new_cache(1)
        self._last = LastStates(target)

    @torch.inference_mode()
    def read(self, question: Marked) -> tuple[Tensor, list[bool], Tensor]:
        """Return float32 [N, D]; for each token whether it is the target's own choice; and ``Labels.law_N3`` of
        each.
        """
        slot = self._cache.acquire()
        try:
            *before, root = question.prompt
            prefill(self._target, self._cache, slot, before)
            self._cache.reserve(slot, 1 + len(question.tree))
            batch = PackedBatch()
            batch.add_tree(slot, self._cache.lengths[slot], root, question.tree)
            output = self._target.forward(batch, DensePlan(self._cache, batch), span=self._last.span)
        finally:
            self._cache.release(slot)
        # row 0 is the root, row i + 1 node i: the judge reads a node's own row, its parent's row chose it
        rows = range(1, 1 + len(question.tree))
        behind = [parent + 1 for parent in question.tree.parents]
        own = [token == output.best[row] for token, row in zip(question.tree.tokens, behind, strict=True)]
        logp_NV = output.logits_MV[behind].float().log_softmax(-1)
        logp_N = logp_NV[range(len(behind)), list(question.tree.tokens)]
        law_N3 = torch.stack([logp_N, logp_N - logp_NV.amax(-1), torch.special.entr(logp_NV.exp()).sum(-1)], -1)
        return self._last.of(output, rows).cpu(), own, law_N3.cpu()
