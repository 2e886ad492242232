"""Rotary tables: they grow with the text, by values that do not depend on their size, and can be given back."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.native.rotary import RotaryTables


def angles(positions_N: Tensor) -> tuple[Tensor, Tensor]:
    phases_Nh = positions_N[:, None] * torch.tensor([1.0, 0.1, 0.01])
    return phases_Nh.cos(), phases_Nh.sin()


def test_tables_are_forgotten_but_for_their_beginning_and_made_again_alike() -> None:
    tables = RotaryTables(angles)
    small = len(tables.up_to(1).cos_Nh)
    grown = tables.up_to(small + 1)
    tables.forget()
    assert len(tables.up_to(1).cos_Nh) == small
    assert tables.up_to(1).cos_Nh.untyped_storage().nbytes() == small * 3 * 4  # nothing of the large one is held
    assert len(grown.cos_Nh) == 2 * small  # whoever reads it goes on
    again = tables.up_to(small + 1)
    assert torch.equal(again.cos_Nh, grown.cos_Nh)
    assert torch.equal(again.sin_Nh, grown.sin_Nh)
