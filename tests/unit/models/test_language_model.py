"""What a forward says of its rows next to the logits: the best tokens, peaks and shares."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.core.columns import Columns
from foretoken.models.language_model import Output

LOGITS = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 1.0]])


def test_of_tied_tokens_the_first_is_the_best() -> None:
    found = Output.of(LOGITS)
    assert list(found.best) == [1, 0, 1]
    assert list(found.peaks) == [3.0, 2.0, 1.0]
    assert list(found.top_ids) == list(found.top_shares) == []


def test_the_most_probable_tokens_come_with_their_shares() -> None:
    found = Output.of(torch.tensor([[0.0, math.log(6.0), math.log(3.0)]]), top=2)
    assert list(found.top_ids) == [1, 2]
    assert list(found.top_shares) == pytest.approx([0.6, 0.3])


def test_columns_are_named_by_their_tokens() -> None:
    columns = Columns(torch.tensor([7, 2, 9, 4]), 10)
    found = Output.of(LOGITS, top=1, columns=columns)
    assert list(found.best) == [2, 7, 2]
    assert found.columns is columns
    assert all(token in (7, 2, 9, 4) for token in found.top_ids)
    assert next(iter(found.top_ids)) in (2, 9)


def test_a_row_that_is_no_number_has_a_peak_that_is_none() -> None:
    poisoned = LOGITS.clone()
    poisoned[1, 3] = math.nan
    assert [math.isnan(peak) for peak in Output.of(poisoned).peaks] == [False, True, False]


def test_no_rows_have_no_best() -> None:
    found = Output.of(LOGITS[:0], top=2)
    assert list(found.best) == list(found.peaks) == list(found.top_ids) == []
