"""A drafter's own vocabulary: which tokens its head scores, as rows of logits and the ids that the rows stand for.

    hidden [M, D] ── FullHead ─────────────────────────────── logits [M, V]    ids: all
                  └─ TrimmedHead: K rows of that head ─────── logits [M, K]    ids [K], increasing
                                                  on_vocabulary ── [M, V], -inf at every other token

What a drafter proposes are always ids of the target, and the q of a trimmed head is a law over the whole vocabulary
that is 0 outside of the ids. Every rule stays what it is: a token with q = 0 can still be emitted, by a residual or as
the extra token.

Letters: M rows, D width, K rows of a trimmed head, V vocabulary.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.models import anatomy, trial
from foretoken.models.language_model import LanguageModel

_TRIAL_ROWS = 4


class DraftHead(Protocol):
    """Scores hidden states for a drafter.

    Attributes:
        vocab_size: V, of the model whose tokens are drafted.
        ids_K: int64 [K], increasing: the token that each column of the logits stands for; None: column i is token i.
    """

    vocab_size: int
    ids_K: Tensor | None = None

    @abstractmethod
    def score(self, hidden_MD: Tensor) -> Tensor:
        """Logits of its own tokens, float32 [M, K].

        Args:
            hidden_MD: [M, D], behind the final norm.
        """
        ...

    def tokens_of(self, columns_M: Tensor) -> Tensor:
        """The target's ids of columns of the logits, int64 of the same shape: the one place where one becomes other."""
        return columns_M if self.ids_K is None else self.ids_K[columns_M]

    def on_vocabulary(self, logits_MK: Tensor) -> Tensor:
        """The logits over all tokens, [M, V]: -inf at those that are not scored, so that their q is 0."""
        if self.ids_K is None:
            return logits_MK
        logits_MV = logits_MK.new_full((len(logits_MK), self.vocab_size), -torch.inf)
        logits_MV[:, self.ids_K] = logits_MK
        return logits_MV


class FullHead(DraftHead):
    """A model's own head, with whatever the model does to logits behind it.

    Args:
        model: the target, or a draft model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.vocab_size = model.vocab_size

    def score(self, hidden_MD: Tensor) -> Tensor:
        logits_MV: Tensor = self._model.score(hidden_MD, final_norm=False).logits_MV[:, : self.vocab_size].float()
        return logits_MV


class TrimmedHead(DraftHead):
    """The rows of a model's head that score the given tokens, copied; nothing is trained.

    Paper:   VocabTrim, arXiv:2506.22694 (and FR-Spec, arXiv:2502.14856): W_trim = W[ids]. Which tokens to keep is the
             caller's choice.
    Exact:   q is the trimmed head's own law, 0 outside of the ids: lossless under every lossless rule that knows the
             kind of q. A token outside is never drafted, so acceptance falls by the target's mass there.
    Differs: the head is read through its own module, packed or not; a model that scales or caps its logits behind the
             head is refused, since its trimmed logits would be others.

    Args:
        model: whose head it is.
        ids: tokens to keep, increasing, each once.
    Raises:
        ConfigError: ids that are none, not increasing, or not of the vocabulary.
        UnsupportedArchitecture: the model does more to hidden states than a linear head.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int]) -> None:
        kept = list(ids)
        if not kept or any(a >= b for a, b in itertools.pairwise(kept)):
            raise ConfigError(f"ids of a trimmed head must be increasing, at least one, not {kept[:8]}")
        if kept[0] < 0 or kept[-1] >= model.vocab_size:
            raise ConfigError(
                f"ids of a trimmed head go from {kept[0]} to {kept[-1]}: '{model.name}' has tokens 0 to "
                f"{model.vocab_size - 1}"
            )
        self.vocab_size = model.vocab_size
        self.ids_K: Tensor = torch.tensor(kept, device=model.device)
        head = anatomy.find(model.model).head
        width = model.config.get_text_config(decoder=True).hidden_size
        with torch.inference_mode():
            # what the module makes of the unit vectors are its weights, in whatever order they lie in memory
            unit_DD = torch.eye(width, dtype=model.dtype, device=model.device)
            bias_V = head(torch.zeros_like(unit_DD[:1]))[0]
            self._bias_K = bias_V[self.ids_K].clone()
            self._weight_KD = (head(unit_DD)[:, self.ids_K] - self._bias_K).T.contiguous()
        self._check(FullHead(model), model, width)

    def score(self, hidden_MD: Tensor) -> Tensor:
        weight_KD = self._weight_KD
        return F.linear(hidden_MD.to(weight_KD.dtype), weight_KD, self._bias_K.to(weight_KD.dtype)).float()

    def _check(self, full: FullHead, model: LanguageModel, width: int) -> None:
        """Compare with the whole head on a few random states."""
        noise_MD = torch.randn(_TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0))
        hidden_MD = noise_MD.to(model.device, model.dtype)
        expected_MV = full.score(hidden_MD)
        found_MV = expected_MV.clone()
        found_MV[:, self.ids_K] = self.score(hidden_MD)
        difference = trial.difference(found_MV, expected_MV, model.dtype)
        if difference is not None:
            raise UnsupportedArchitecture(
                f"the head of '{model.name}' cannot be trimmed: {difference}; its logits are not only the head's"
            )
