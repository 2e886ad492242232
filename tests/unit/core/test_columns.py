"""Columns and tokens, looked up either way."""

from __future__ import annotations

import torch

from foretoken.core.columns import Columns


def test_tokens_of_columns_and_columns_of_tokens() -> None:
    columns = Columns(torch.tensor([4, 0, 2]), 5)
    for _ in range(2):  # the second time from the list that is kept
        assert columns.tokens_of([2, 0, 0]) == [2, 4, 4]
    assert [columns.of(token) for token in range(5)] == [1, -1, 2, -1, 0]
    assert [token in columns for token in range(5)] == [True, False, True, False, True]
    assert columns.of_tokens(torch.tensor([2, 3])).tolist() == [2, -1]
