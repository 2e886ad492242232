"""The last hidden states of a model, as its own head reads them, or before the final norm.

Letters: M rows, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.adoption.probe import refusal, same
from foretoken.models.language_model import LanguageModel, Output


class LastStates:
    """The last hidden states of a model: a forward with ``span`` keeps them, :meth:`of` takes them from its output.

    Args:
        model: checked here: its head must give the same logits for these states as the model did.
        normed: as the head reads them; False: the residual stream after the last layer.
    Raises:
        UnsupportedArchitecture: it does not.
    """

    def __init__(self, model: LanguageModel, *, normed: bool = True) -> None:
        self._normed = normed
        self._depth = model.num_layers
        self.span = Span(0, model.num_layers, taps=(model.num_layers,))
        kind = type(model.model).__name__

        def check() -> str | None:
            self._norm = anatomy.find(model.model).final_norm
            return None if self._agrees(model) else "its head reads something else than its last hidden state"

        reason = refusal(model, check, "its hidden states cannot be kept")
        if reason is not None:
            raise UnsupportedArchitecture(
                f"model '{model.name}' ({kind}) cannot carry a head on its last hidden state: {reason}"
            )

    def of(self, output: Output, rows: Sequence[int]) -> Tensor:
        """float32 [M, D]: the tapped states of these rows."""
        return self._state(output.hidden[self._depth][list(rows)], normed=self._normed)

    @torch.inference_mode()
    def _state(self, residual_MD: Tensor, *, normed: bool) -> Tensor:
        return (self._norm(residual_MD) if normed else residual_MD).float()

    def _agrees(self, model: LanguageModel) -> bool:
        cache = model.new_cache(1)
        batch = PackedBatch.of_text(range(3), cache)
        output = model.forward(batch, DensePlan(cache, batch), span=self.span)
        residual_MD = output.hidden[self._depth]
        h_MD = self._state(residual_MD, normed=True).to(residual_MD.dtype)
        return same(output.logits_MV, model.score(h_MD, final_norm=False).logits_MV)
