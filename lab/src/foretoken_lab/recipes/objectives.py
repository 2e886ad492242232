"""What the zoo's recipes minimise next to next-token loss and distances: answers first, far positions, masked
diffusion.

As in ``foretoken.train.objectives``, an objective returns the mean loss of a block over its positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.train.objectives import weighted_loss


class AnswersFirst:
    """Next-token loss in which answers count in full, and questions only here and there.

    The questions of generated tasks are drawn: most of their loss is the entropy of names and numbers, which no model
    can learn, and in a block of reading questions four fifths of all tokens are of that kind. Of the tokens of user and
    system turns a share is drawn to count, so that the language of questions is not forgotten. Every token that
    counts counts the same, so that a block of prose weighs more than a block of questions.

    Args:
        openings: ids of the markers that open a turn of user or system.
        endings: ids of the markers that end a turn or open an answer.
        questions: share of the tokens of such turns that count.
    """

    name = "next_token_answers_first"

    def __init__(self, openings: Sequence[int], endings: Sequence[int], questions: float = 0.2) -> None:
        self._openings = torch.tensor(openings, dtype=torch.int64)
        self._endings = torch.tensor(endings, dtype=torch.int64)
        self._questions = questions

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        return weighted_loss(model, tokens_BT, self.weights(tokens_BT, generator))

    def weights(self, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        """What each token counts as one to be predicted: float32 [B, T], of sum 1 without the first column."""
        opens_BT = torch.isin(tokens_BT, self._openings.to(tokens_BT.device))
        marks_BT = opens_BT | torch.isin(tokens_BT, self._endings.to(tokens_BT.device))
        places_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        # the last marker before each token; before the first of a block nothing is known, and all counts
        last_BT = torch.where(marks_BT, places_BT, -1).cummax(dim=1).values.roll(1, dims=1)
        last_BT[:, 0] = -1
        question_BT = opens_BT.gather(1, last_BT.clamp(min=0)) & (last_BT >= 0)
        drawn_BT = torch.rand(tokens_BT.shape, generator=generator).to(tokens_BT.device) < self._questions
        counted_BT = (~question_BT | drawn_BT).float()
        counted_BT[:, 0] = 0.0  # nothing predicts it
        return counted_BT / counted_BT.sum().clamp(min=1.0)


class SkippedPositions:
    """Next-token loss on short blocks with positions that skip ahead: far distances at the cost of near ones.

    PoSE (Zhu et al., 2024, section 3): a block is cut into pieces at random places, and each piece but the first skips
    a random number of positions. Differs: more pieces than two, and a share of the blocks keeps its plain positions.

    Args:
        longest: positions lie below this.
        pieces: most pieces of a block.
        plain: share of the blocks without skips.
        counted: what each token counts; all the same without it.
    """

    def __init__(self, longest: int, pieces: int = 4, plain: float = 0.25, counted: AnswersFirst | None = None) -> None:
        self._longest, self._pieces, self._plain, self._counted = longest, pieces, plain, counted
        self.name = "next_token_skipped_positions" + ("_answers_first" if counted else "")

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        positions_BT = torch.stack([self._positions(tokens_BT.shape[1], generator) for _ in tokens_BT])
        inputs = {
            "position_ids": positions_BT.to(tokens_BT.device),
            # without a mask the library takes a skip for the beginning of another text
            "attention_mask": torch.ones_like(tokens_BT),
        }
        weights_BT = None if self._counted is None else self._counted.weights(tokens_BT, generator)
        return weighted_loss(model, tokens_BT, weights_BT, **inputs)

    def _positions(self, length: int, generator: torch.Generator) -> Tensor:
        positions = torch.arange(length)
        if float(torch.rand((), generator=generator)) < self._plain:
            return positions
        cuts = torch.randint(1, length, (self._pieces - 1,), generator=generator).sort().values
        room = float(torch.rand((), generator=generator)) * (self._longest - length)
        shares = torch.rand(self._pieces - 1, generator=generator)
        skips = (shares / shares.sum() * room).long()
        for cut, skip in zip(cuts, skips, strict=True):
            positions[cut:] += skip
        return positions


class MaskedDiffusion:
    """The masked-diffusion loss of LLaDA (Nie et al., 2025, eq. 3), in blocks that follow a clean prefix.

    A share t of a window's tokens is replaced by the mask token; the loss is the cross-entropy at the masked positions,
    weighted by 1/t, over the window's length. The window is the whole block with t uniform in (0, 1] as in the paper;
    in a share ``suffix`` of the blocks it is the last few tokens, and then t is 1 half of the time (ours): a drafter
    fills a run of masks after a clean prefix, and should be trained on it.

    Args:
        mask_id: the mask token.
        window: longest window at the end, in tokens.
        suffix: share of the blocks that are masked at their end only.
    """

    name = "masked_diffusion"

    def __init__(self, mask_id: int, window: int = 32, suffix: float = 0.75) -> None:
        self._mask_id, self._window, self._suffix = mask_id, window, suffix

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        rows, length = tokens_BT.shape
        draw = torch.rand(rows, 4, generator=generator)
        at_end = draw[:, 0] < self._suffix
        width = torch.where(at_end, (draw[:, 1] * (self._window - 1)).long() + 2, length).clamp_max(length)
        share = torch.where(at_end & (draw[:, 3] < 0.5), 1.0, draw[:, 2].clamp_min(1.0 / self._window))
        inside = torch.arange(length)[None] >= (length - width)[:, None]
        noise = torch.rand(rows, length, generator=generator)
        masked = (inside & (noise < share[:, None])).to(tokens_BT.device)
        logits = model(input_ids=tokens_BT.masked_fill(masked, self._mask_id)).logits
        per_token = F.cross_entropy(logits[masked].float(), tokens_BT[masked], reduction="none")
        weight = (1.0 / (share * width)).to(tokens_BT.device)[:, None].expand(rows, length)[masked]
        return (per_token * weight).sum() / rows
