"""A target that is only read while something next to it is trained: its states at some depths, and its head.

Letters: B sequences, T positions, N rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import ModelError, UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.hidden_states import FINAL, Depth, state_of, watching
from foretoken.forward.quantised_weight import QuantisedLinear
from foretoken.forward.span import Span, within
from foretoken.train.processor import product_dtype, products

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD_ROWS = 512  # positions of one sequence that the head is given


class FrozenTarget:
    """A target that is only read: its states at some depths, and its head on any states, with their gradient.

    Args:
        model: a causal language model of transformers, on its device; becomes float32 and loses its gradients. Weights
            of its layers that are bfloat16 or quantised are bfloat16 where products are computed in it, so they are
            not rounded again at every forward. Quantised weights are expanded: their products are exact but slow.
        depths: of the residual stream that are read, next to what the final norm gives; none beyond the last layer.
    Raises:
        UnsupportedArchitecture: its parts cannot be found.
    """

    def __init__(self, model: Any, depths: Sequence[int]) -> None:
        device = next(model.parameters()).device
        fast = product_dtype(device.type)
        quantised = dense_products(model)
        narrow = (quantised or next(model.parameters()).dtype == fast) and fast != torch.float32
        self.model = model.float().eval().requires_grad_(False)
        self.parts = anatomy.find(model)
        if narrow:
            for module in self.parts.layers.modules():
                if isinstance(module, nn.Linear):
                    module.to(fast)
        self._products: Callable[[], AbstractContextManager[object]] = (
            (lambda: products(device)) if narrow else nullcontext
        )
        self.depths = tuple(sorted(set(depths)))
        text = model.config.get_text_config(decoder=True)
        self.vocabulary: int = text.vocab_size
        self.width: int = text.hidden_size
        self.longest: int | None = getattr(text, "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Refuse a tokenizer with ids that the model does not have.

        Args:
            name: of the model, for the message.
        Raises:
            ModelError: gives both numbers.
        """
        if len(tokenizer) > self.vocabulary:
            raise ModelError(
                f"vocabulary mismatch: the tokenizer of {name} has {len(tokenizer)} entries, its model "
                f"{self.vocabulary}"
            )

    @torch.no_grad()
    def states(self, tokens_BT: Tensor) -> dict[Depth, Tensor]:
        """One forward.

        Returns:
            the residual stream at the depths and what the final norm gives, [B, T, D] each.
        """
        kind, kept = type(self.model).__name__, dict[Depth, Tensor]()

        def keep(depth: Depth, values: Any) -> None:
            # a copy: the next layer may add to it in place
            kept[depth] = state_of(values, tuple(tokens_BT.shape), kind, depth).clone()

        with self._products(), watching(self.parts, (*self.depths, FINAL), keep):
            self.parts.body(input_ids=tokens_BT, use_cache=False)
        if len(kept) != len(self.depths) + 1:
            raise UnsupportedArchitecture(f"{kind}: its forward does not pass through its layers and final norm")
        return kept

    def logits(self, rows_ND: Tensor) -> Tensor:
        """The head, with what the model does around it, on states that stand where the final norm's output does.

        Returns:
            float32 [N, V].
        """
        # the library's own forward with all layers idle: what scales or caps the logits is in there, and nowhere else.
        # Rows are packed into sequences of a length that the model has positions for
        length = min(HEAD_ROWS, self.longest or HEAD_ROWS, len(rows_ND))
        missing = -len(rows_ND) % length
        packed_BTD = F.pad(rows_ND, (0, 0, 0, missing)).view(-1, length, rows_ND.shape[1])
        handle = self.parts.final_norm.register_forward_pre_hook(
            lambda module, args, kwargs: ((packed_BTD, *args[1:]), {}), with_kwargs=True
        )
        ids_BT = torch.zeros(packed_BTD.shape[:2], dtype=torch.int64, device=packed_BTD.device)
        depth = len(self.parts.layers)
        with handle, self._products(), within(self.parts, Span(depth, depth, final_norm=False)):
            logits_BTV: Tensor = self.model(input_ids=ids_BT, use_cache=False).logits
        return logits_BTV.flatten(0, 1)[: len(rows_ND)].float()


def dense_products(model: nn.Module) -> bool:
    """Whether the model had quantised products; they become dense ones, and a tied head shares the embedding."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, QuantisedLinear)
    ]
    parts = anatomy.find(model)
    tied = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))  # type: ignore[union-attr, operator]
    for parent, name, child in found:
        shared = tied and child is parts.head
        weight_OK: Any = parts.embedding.weight if shared else child.weight
        dense = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
        dense.weight = nn.Parameter(weight_OK.detach(), requires_grad=False)
        if child.bias is not None:
            dense.bias = nn.Parameter(child.bias, requires_grad=False)
        setattr(parent, name, dense)
    return bool(found)
