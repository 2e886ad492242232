"""Some rows of a model's head in memory of their own, which a forward scores in place of all of them.

    head         [V, D]   stays as it is: the target needs it
    base rows    [K, D]   copied once                               columns 0 .. K-1
    tail         [m, D]   other rows after them, few, changed at any time     K .. K+m-1

In the native decoder these are a packed head of another length, so that nothing native is new. A row of either kind
gives the very logit that the whole head gives.

Letters: M rows of hidden states, D width, V vocabulary, C columns: K base rows and m of the tail.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.core.columns import Columns
from foretoken.core.errors import UnsupportedArchitecture
from foretoken.forward import anatomy
from foretoken.forward.plain import own_ways
from foretoken.models.adoption import trial
from foretoken.models.language_model import LanguageModel
from foretoken.native.layout import Head
from foretoken.native.packing import Tiles, parts_of
from foretoken.native.quantised import CodedTiles

_TRIAL_ROWS = 4
_SPARE = 256  # rows by which the tail's memory grows


class HeadRows:
    """Rows of a model's head, copied; nothing is trained.

    Args:
        model: the owner of the head.
        ids: tokens of the base rows, each once.
        vocab_size: V of the columns, if they are those of a target with another padding; None: the model's.
    Attributes:
        columns: the tokens that its columns stand for.
        packed: for the native decoder; None where the model has none.
    Raises:
        ValueError: ids that are none, twice there, or not of the vocabulary.
        UnsupportedArchitecture: the model does more to hidden states than a linear head.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int], vocab_size: int | None = None) -> None:
        self._device, self._vocab_size = model.device, vocab_size or model.vocab_size
        self._base = torch.tensor(list(ids), dtype=torch.int64, device=model.device)
        self.columns = Columns(self._base, self._vocab_size)
        self._tail: list[int] = []
        self._pack = _Tiles(model.native_decoder.head) if model.native_decoder is not None else _Plain(model)
        self._pack.put(0, self._base)
        self._check(model)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_base(self) -> int:
        """K."""
        return len(self._base)

    @property
    def packed(self) -> Head | None:
        return self._pack.head(len(self)) if isinstance(self._pack, _Tiles) else None

    def score(self, normed_MD: Tensor) -> Tensor:
        """Logits float32 [M, C] of states after the final norm; for models without a native decoder."""
        assert isinstance(self._pack, _Plain), "a packed head is scored by the native decoder"
        return self._pack.score(normed_MD, len(self))

    def set_tail(self, ids: Sequence[int]) -> None:
        """Replace the tail. A common beginning with the present tail is not copied again.

        Args:
            ids: tokens that are no base rows, each once.
        """
        wanted = list(ids)
        if wanted == self._tail:
            return
        same = len(self._tail) if wanted[: len(self._tail)] == self._tail else 0
        self.columns = Columns(
            torch.cat([self._base, torch.tensor(wanted, dtype=torch.int64, device=self._device)]), self._vocab_size
        )
        if len(wanted) > same:
            self._pack.put(self.num_base + same, self.columns.ids_C[self.num_base + same :])
        self._tail = wanted

    def _check(self, model: LanguageModel) -> None:
        """Compare with the whole head on a few random states."""
        width = model.config.get_text_config(decoder=True).hidden_size
        noise_MD = torch.randn(_TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0))
        hidden_MD = noise_MD.to(model.device, model.dtype)
        expected_MV = model.score(hidden_MD, final_norm=False).logits_MV.float()
        found_MV = expected_MV.clone()
        found_MV[:, self.columns.ids_C] = model.score(hidden_MD, final_norm=False, head=self).logits_MV.float()
        difference = trial.difference(found_MV, expected_MV, model.dtype)
        if difference is not None:
            raise UnsupportedArchitecture(
                f"the head of '{model.name}' cannot be trimmed: {difference}; its logits are not only the head's"
            )


class _Tiles:
    """Tiles of the native decoder, filled row by row from those of the whole head."""

    def __init__(self, whole: Head) -> None:
        self._head, self._whole = whole, whole.packed
        self._packed, self._bias_C = _nothing_of(self._whole, 0), torch.zeros(0)

    def put(self, first: int, ids_N: Tensor) -> None:
        """Copy the rows of tokens to columns ``first`` and following."""
        columns_N = torch.arange(first, first + len(ids_N))
        needed = -(-(first + len(ids_N)) // 16)
        if needed > len(self._packed):
            spare = 0 if first == 0 else _SPARE // 16
            grown = _nothing_of(self._whole, needed + spare)
            for to, held in zip(parts_of(grown), parts_of(self._packed), strict=True):
                to[: len(held)] = held
            self._packed = grown
        for to, whole in zip(parts_of(self._packed), parts_of(self._whole), strict=True):
            to[columns_N // 16, :, columns_N % 16] = whole[ids_N // 16, :, ids_N % 16]

        if self._head.bias_V is not None:
            self._bias_C = torch.nn.functional.pad(self._bias_C, (0, 16 * len(self._packed) - len(self._bias_C)))
            self._bias_C[columns_N] = self._head.bias_V[ids_N]

    def head(self, count: int) -> Head:
        bias_C = None if self._head.bias_V is None else self._bias_C
        return self._head._replace(packed=self._packed[: -(-count // 16)], vocab_size=count, bias_V=bias_C)


def _nothing_of(like: Tiles, tiles: int) -> Tiles:
    """So many tiles of zeros."""
    if isinstance(like, CodedTiles):
        return like.like(like.data.new_zeros(tiles, like.data.shape[1]))
    return like.new_zeros(tiles, *like.shape[1:])


class _Plain:
    """Rows as they are, [C, D], and their biases."""

    def __init__(self, model: LanguageModel) -> None:
        head = anatomy.find(model.model).head
        width = model.config.get_text_config(decoder=True).hidden_size
        with torch.inference_mode():
            self._bias_V = head(torch.zeros(1, width, dtype=model.dtype, device=model.device))[0]
            if type(head) is nn.Linear and own_ways(head) is None:
                self._whole_VD: Tensor = head.weight.detach()
            else:
                # the module's outputs for the unit vectors are its weights, in any memory layout
                unit_DD = torch.eye(width, dtype=model.dtype, device=model.device)
                self._whole_VD = (head(unit_DD) - self._bias_V).T
        self._weight_CD = self._whole_VD[:0].clone()
        self._bias_C = self._bias_V[:0].clone()

    def put(self, first: int, ids_N: Tensor) -> None:
        with torch.inference_mode():
            self._weight_CD = torch.cat([self._weight_CD[:first], self._whole_VD[ids_N]])
            self._bias_C = torch.cat([self._bias_C[:first], self._bias_V[ids_N]])

    def score(self, normed_MD: Tensor, count: int) -> Tensor:
        rows_MD = normed_MD.to(self._weight_CD.dtype)
        return F.linear(rows_MD, self._weight_CD[:count], self._bias_C[:count]).float()
