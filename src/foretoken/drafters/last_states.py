"""The last hidden states of a draft model, as its own head reads them.

Letters: M rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, UnsupportedArchitecture
from foretoken.models import anatomy
from foretoken.models.batch import PackedBatch
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.probe import same
from foretoken.models.span import Span
from foretoken.plans.dense import DensePlan


class LastStates:
    """The last hidden states of a model: a forward with ``span`` keeps them, :meth:`of` takes them from its output.

    Args:
        model: checked here: its head must give the same logits for these states as the model did.
    Raises:
        UnsupportedArchitecture: it does not.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._depth = model.num_layers
        self.span = Span(0, model.num_layers, taps=(model.num_layers,))
        kind = type(model.model).__name__
        try:
            self._norm = anatomy.find(model.model).final_norm
            reason = None if self._agrees(model) else "its head reads something else than its last hidden state"
        except ForetokenError as error:
            reason = str(error)
        except Exception as error:  # hundreds of families raise whatever they like
            reason = f"its hidden states cannot be kept ({' '.join(str(error).split())[:200]})"
        if reason is not None:
            raise UnsupportedArchitecture(f"model '{model.name}' ({kind}) cannot carry a SPRINTER head: {reason}")

    @torch.inference_mode()
    def of(self, output: Output, rows: Sequence[int]) -> Tensor:
        """float32 [M, D]: what the final norm gives for these packed rows."""
        return self._norm(output.hidden[self._depth][list(rows)]).float()

    def _agrees(self, model: LanguageModel) -> bool:
        batch, cache = PackedBatch(), model.new_cache(1)
        slot = cache.acquire()
        cache.reserve(slot, 3)
        batch.add_chunk(slot, 0, range(3), wanted=3)
        output = model.forward(batch, DensePlan(cache, batch), span=self.span)
        h_MD = self.of(output, [0, 1, 2]).to(output.hidden[self._depth].dtype)
        return same(output.logits_MV, model.score(h_MD, final_norm=False).logits_MV)
