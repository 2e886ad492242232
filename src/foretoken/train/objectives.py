"""What a step of training minimises: next-token loss in three forms, four distances to a target, and masked diffusion.

Every objective takes the model and a block of tokens and gives one loss; all are means over positions, in nats (total
variation: in probability).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.train import head_loss

DISTANCES = ("kl", "reverse_kl", "tv", "neg_log_acceptance")


class Objective(Protocol):
    """One loss."""

    name: str

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        """The mean loss of a block.

        Args:
            model: gives ``.logits`` [B, T, V].
            tokens_BT: int64.
            generator: for an objective that draws; on the CPU.
        Returns:
            a float32 scalar with a gradient.
        """
        ...


class NextToken:
    """Cross-entropy of the next token."""

    name = "next_token"

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        return weighted_loss(model, tokens_BT, None)


class AnswersFirst:
    """Next-token loss in which answers count in full, and what was asked only here and there.

    The questions of generated tasks are drawn: most of their loss is the entropy of names and numbers, which no model
    can learn, and in a block of reading questions four fifths of all tokens are of that kind. Of the tokens of user and
    system turns a share is drawn to count, so that the language of people who ask is not forgotten. Every token that
    counts counts the same, so that a block of prose weighs more than a block of questions.

    Args:
        openings: ids of the markers that open a turn of somebody who asks.
        endings: ids of the markers that end a turn or open an answer.
        asked: share of the tokens of such turns that count.
    """

    name = "next_token_answers_first"

    def __init__(self, openings: Sequence[int], endings: Sequence[int], asked: float = 0.2) -> None:
        self._openings = torch.tensor(openings, dtype=torch.int64)
        self._endings = torch.tensor(endings, dtype=torch.int64)
        self._asked = asked

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
        asked_BT = opens_BT.gather(1, last_BT.clamp(min=0)) & (last_BT >= 0)
        drawn_BT = torch.rand(tokens_BT.shape, generator=generator).to(tokens_BT.device) < self._asked
        counted_BT = (~asked_BT | drawn_BT).float()
        counted_BT[:, 0] = 0.0  # nothing predicts it
        return counted_BT / counted_BT.sum().clamp(min=1.0)


def weighted_loss(model: nn.Module, tokens_BT: Tensor, weights_BT: Tensor | None, **inputs: Tensor) -> Tensor:
    """Next-token loss in which tokens count differently.

    Args:
        model: gives ``.logits`` [B, T, V].
        tokens_BT: int64.
        weights_BT: float32, what each token counts as one to be predicted, of a sum of 1 without the first column;
            None: all the same.
        inputs: others of the model, such as positions.
    Returns:
        a float32 scalar with a gradient.
    """
    if head_loss.applies(model):
        return head_loss.next_token_loss(model, tokens_BT, weights_BT, **inputs)
    output = model(input_ids=tokens_BT, use_cache=False, **inputs)
    logits_NV, targets_N = output.logits[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten()
    if weights_BT is None:
        return F.cross_entropy(logits_NV, targets_N) + _balance(model, output)
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    return (losses_N * weights_BT[:, 1:].flatten()).sum() + _balance(model, output)


class SkippedPositions:
    """Next-token loss on short blocks whose positions skip ahead, so that far distances are learnt at the cost of near.

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
            # the library takes a skip for the beginning of another text, unless it is told that all is one
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


class Distil:
    """Distance of the draft's law q to the target's law p at every position, both at temperature 1.

    ``kl`` is KL(p || q), ``reverse_kl`` KL(q || p), ``tv`` the total variation, which is one minus the expected
    acceptance of token-wise verification (Leviathan et al., 2023, eq. 3), ``neg_log_acceptance`` minus the logarithm of
    that acceptance, sum of min(p, q), which weighs the positions where the draft is bad more.

    Args:
        teacher: the target; its parameters are not touched.
        distance: one of ``DISTANCES``.
        next_token: share of the loss that is the next-token loss on the data.
        temperature: both laws are taken at this temperature; below 1 the loss looks at what greedy decoding looks at.
    """

    def __init__(
        self, teacher: nn.Module, distance: str = "kl", next_token: float = 0.0, temperature: float = 1.0
    ) -> None:
        self.name = distance
        self._teacher = teacher.eval().requires_grad_(False)
        self._next_token, self._temperature = next_token, temperature

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            target = self._teacher(input_ids=tokens_BT, use_cache=False).logits
        output = model(input_ids=tokens_BT, use_cache=False)
        logits = output.logits
        p_NV, q_NV = target.flatten(0, 1), logits.flatten(0, 1).float()
        loss = distance(p_NV.float() / self._temperature, q_NV / self._temperature, self.name)
        if self._next_token:
            plain = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
            loss = (1 - self._next_token) * loss + self._next_token * plain
        return loss + _balance(model, output)


def _balance(model: nn.Module, output: Any) -> Tensor | float:
    """The load-balancing loss of a mixture of experts that was asked for it, weighted as its configuration says."""
    balance: Tensor | None = getattr(output, "aux_loss", None) if model.training else None
    if balance is None:
        return 0.0
    return balance.float() * float(model.config.router_aux_loss_coef)  # type: ignore[union-attr, arg-type]


def distance(target_NV: Tensor, draft_NV: Tensor, name: str) -> Tensor:
    """Mean distance over N positions of the laws of two sets of logits (see ``Distil``).

    Args:
        target_NV: float32 logits of p; no gradient.
        draft_NV: float32 logits of q.
    Returns:
        a scalar.
    """
    log_q = F.log_softmax(draft_NV, dim=-1)
    if name == "kl":
        log_p = F.log_softmax(target_NV, dim=-1)
        return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    if name == "reverse_kl":
        log_p = F.log_softmax(target_NV, dim=-1)
        return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    overlap_N = torch.minimum(F.softmax(target_NV, dim=-1), log_q.exp()).sum(-1)
    if name == "tv":
        return (1 - overlap_N).mean()
    if name == "neg_log_acceptance":
        return -overlap_N.clamp_min(1e-8).log().mean()
    raise ValueError(f"distance {name!r} is not one of {', '.join(DISTANCES)}")


class MaskedDiffusion:
    """The masked-diffusion loss of LLaDA (Nie et al., 2025, eq. 3), in blocks that follow a clean prefix.

    A share t of a window's tokens is replaced by the mask token; the loss is the cross-entropy at the masked positions,
    weighted by 1/t, over the window's length. The window is the whole block with t uniform in (0, 1] as in the paper;
    in a share ``suffix`` of the blocks it is the last few tokens, and then t is 1 half of the time (ours): a drafter
    is asked for a run of masks after a clean prefix, and should have seen it.

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
