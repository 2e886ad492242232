"""What a step of training minimises: next-token loss, and four distances to a target.

Every objective takes the model and a block of tokens and gives one loss; all are means over positions, in nats (total
variation: in probability).
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.forward import anatomy
from foretoken.train import head_loss

ROWS = 128  # of logits at a time
_NONE = -100  # no next token
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


class _Known(torch.autograd.Function):
    """A loss with its gradients for two tensors, which were computed along with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, d_q: Tensor, d_head: Tensor, q_ND: Tensor, head_VD: Tensor) -> Tensor:
        ctx.save_for_backward(d_q, d_head)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_q, d_head = ctx.saved_tensors
        return None, None, None, d_q * grads[0], d_head * grads[0]


class Distil:
    """Distance of the draft's distribution q to the target's distribution p at every position, both at temperature 1.

    ``kl`` is KL(p || q), ``reverse_kl`` KL(q || p), ``tv`` the total variation, which is one minus the expected
    acceptance of token-wise verification (Leviathan et al., 2023, eq. 3), ``neg_log_acceptance`` minus the logarithm of
    that acceptance, sum of min(p, q), which weighs the positions where the draft is bad more.

    Args:
        teacher: the target; its parameters are not touched.
        distance: one of ``DISTANCES``.
        next_token: share of the loss that is the next-token loss on the data.
        temperature: both distributions are taken at this temperature; below 1 the loss looks at what greedy decoding
            looks at.
    """

    def __init__(
        self, teacher: nn.Module, distance: str = "kl", next_token: float = 0.0, temperature: float = 1.0
    ) -> None:
        self.name = distance
        self._teacher = teacher.eval().requires_grad_(False)
        self._next_token, self._temperature = next_token, temperature

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        next_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=_NONE)
        if head_loss.applies(model) and head_loss.applies(self._teacher):
            return self._by_rows(model, tokens_BT, next_BT.flatten())
        with torch.no_grad():
            target = self._teacher(input_ids=tokens_BT, use_cache=False).logits
        output = model(input_ids=tokens_BT, use_cache=False)
        apart, plain = self._sums(target.flatten(0, 1), output.logits.flatten(0, 1), next_BT.flatten())
        return self._mean(apart, plain, tokens_BT) + _balance(model, output)

    def _by_rows(self, model: nn.Module, tokens_BT: Tensor, next_N: Tensor) -> Tensor:
        """Some rows at a time, down to their gradients: the logits of a block are never all there."""
        ours, theirs = anatomy.find(model), anatomy.find(self._teacher)
        with torch.no_grad():
            p_ND = theirs.body(input_ids=tokens_BT, use_cache=False).last_hidden_state.flatten(0, 1)
        q_ND = ours.body(input_ids=tokens_BT, use_cache=False).last_hidden_state.flatten(0, 1)
        head_VD: Any = ours.head.weight
        learns = torch.is_grad_enabled()
        total, d_head = q_ND.new_zeros((), dtype=torch.float32), torch.zeros_like(head_VD)
        d_rows = list[Tensor]()
        for p_RD, q_RD, next_R in zip(p_ND.split(ROWS), q_ND.detach().split(ROWS), next_N.split(ROWS), strict=True):
            q_RD.requires_grad_(learns)
            with torch.no_grad():
                target_RV = theirs.head(p_RD)
            loss = self._mean(*self._sums(target_RV, F.linear(q_RD, head_VD), next_R), tokens_BT)
            total += loss.detach()
            if learns:
                d_q, d_part = torch.autograd.grad(loss, (q_RD, head_VD))
                d_rows.append(d_q)
                d_head += d_part
        return _Known.apply(total, torch.cat(d_rows), d_head, q_ND, head_VD) if learns else total

    def _sums(self, target_NV: Tensor, draft_NV: Tensor, next_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over rows: of the distance, and of the next-token loss if it has a share."""
        p_NV, q_NV = target_NV.float(), draft_NV.float()
        apart = distance(p_NV / self._temperature, q_NV / self._temperature, self.name) * len(q_NV)
        if not self._next_token:
            return apart, apart.new_zeros(())
        return apart, F.cross_entropy(q_NV, next_N, ignore_index=_NONE, reduction="sum")

    def _mean(self, apart: Tensor, plain: Tensor, tokens_BT: Tensor) -> Tensor:
        loss = apart / tokens_BT.numel()
        if not self._next_token:
            return loss
        return (1 - self._next_token) * loss + self._next_token * plain / tokens_BT[:, 1:].numel()


def _balance(model: nn.Module, output: Any) -> Tensor | float:
    """The load-balancing loss of a mixture of experts, if its configuration enables it, with its weight."""
    balance: Tensor | None = getattr(output, "aux_loss", None) if model.training else None
    if balance is None:
        return 0.0
    return balance.float() * float(model.config.router_aux_loss_coef)  # type: ignore[union-attr, arg-type]


def distance(target_NV: Tensor, draft_NV: Tensor, name: str) -> Tensor:
    """Mean distance over N positions of the distributions of two sets of logits (see ``Distil``).

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
