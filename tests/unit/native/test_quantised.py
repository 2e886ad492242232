"""Native products with quantised weights: the bits of their definition, on every kind of processor there is here."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from foretoken.forward.quantised_weight import QuantisedWeight, product, rounded, rows_of
from foretoken.forward.stored_weight import RoundedWeight
from foretoken.native import quantised
from foretoken.native.packing import alternating
from foretoken.native.quantised import CodedTiles, can_join, coded_tiles, joined
from helpers.native_products import KINDS, library_of, native

INPUTS = 256


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_of(request.param)


def some(
    bits: int, group: int, *, signed: bool, minimum: bool, short: bool, outputs: int = 80, inputs: int = INPUTS
) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    codes_OK = (codes - 2 ** (bits - 1)).to(torch.int8) if signed else codes.to(torch.uint8)
    scale_OG, minimum_OG = torch.randn(2, outputs, inputs // group, generator=generator)
    scale_OG[0, 0] = 2.0**-24 if short else 1e-30  # the smallest that float16 has
    if short:
        scale_OG, minimum_OG = scale_OG.half().float(), minimum_OG.half().float()
    return QuantisedWeight(codes_OK, scale_OG, minimum_OG if minimum else None, bits)


def rows(count: int, inputs: int = INPUTS) -> Tensor:
    """Of very different sizes, with a channel that is larger; one of zeros and one at the ends of the codes."""
    x_TK = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x_TK[:, 37] *= 50
    x_TK *= torch.logspace(-20, 20, count)[:, None]
    if count > 3:
        x_TK[1] = 0
        x_TK[2] = torch.where(x_TK[2] > 0, 1.0, -1.0)
    return x_TK


FORMS = [
    (bits, group, signed, minimum, short)
    for bits, group in itertools.product((4, 8), (16, 32, 128, INPUTS))
    for signed, minimum, short in ((True, False, True), (True, False, False), (False, True, True), (False, True, False))
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("bits", "group", "signed", "minimum", "short"), FORMS)
def test_a_product_has_the_bits_of_its_definition(
    library: ctypes.CDLL, bits: int, group: int, signed: bool, minimum: bool, short: bool
) -> None:
    weight = some(bits, group, signed=signed, minimum=minimum, short=short)
    packed = coded_tiles(weight)
    bias_O = torch.randn(80, generator=torch.Generator().manual_seed(1))
    for count in (*range(1, 14), 21, 40):  # every number of rows that is computed in its own way, and more
        x_TK = rows(count)
        expected = product(rows_of(x_TK), weight)
        assert torch.equal(native(library, packed, x_TK), expected)
        assert torch.equal(native(library, packed, x_TK, bias_O), expected + bias_O)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("inputs", "group"), [(48, 16), (48, 48), (16, 16), (32, 32), (208, 208), (528, 16), (528, 528), (1040, 16)]
)
def test_rows_that_end_within_a_step(library: ctypes.CDLL, bits: int, inputs: int, group: int) -> None:
    weight = some(bits, group, signed=False, minimum=True, short=True, inputs=inputs)
    for count in (1, 3, 8, 13):
        x_TK = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
        assert torch.equal(native(library, coded_tiles(weight), x_TK), product(rows_of(x_TK), weight))


def test_the_largest_codes_of_the_longest_rows(library: ctypes.CDLL) -> None:
    """Sums of either sign at the ends of what a cell may hold."""
    for codes_OK in (torch.full((16, 65536), 255, dtype=torch.uint8), torch.full((16, 65536), -128, dtype=torch.int8)):
        weight = QuantisedWeight(codes_OK, torch.ones(16, 1), None, 8)
        for sign in (1.0, -1.0):
            x_TK = torch.full((1, 65536), sign)
            found = native(library, coded_tiles(weight), x_TK)
            assert torch.equal(found, product(rows_of(x_TK), weight))
            assert found[0, 0] == pytest.approx(sign * float(codes_OK[0, 0]) * 65536)


def test_ties_go_to_even_and_a_value_that_is_not_finite_spoils_its_row(library: ctypes.CDLL) -> None:
    weight = some(8, INPUTS, signed=True, minimum=False, short=False)
    x_TK = rows(6)
    x_TK[0] = torch.arange(INPUTS) - 127.5
    x_TK[0, -1] = 127
    expected = product(rows_of(x_TK), weight)
    for odd in (torch.nan, torch.inf, -torch.inf):
        x_TK[3, 77] = odd
        found = native(library, coded_tiles(weight), x_TK)
        assert found[3].isnan().all()
        others = [0, 1, 2, 4, 5]
        assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize(("bits", "group", "signed", "minimum", "short"), FORMS)
def test_packed_codes_can_be_unpacked(bits: int, group: int, signed: bool, minimum: bool, short: bool) -> None:
    weight = some(bits, group, signed=signed, minimum=minimum, short=short, outputs=77)
    packed = coded_tiles(weight)
    assert len(packed) == 5
    found = packed.weight(77)
    assert torch.equal(found.codes_OK, weight.codes_OK)
    assert found.codes_OK.dtype == weight.codes_OK.dtype
    assert torch.equal(found.scale_OG, weight.scale_OG)
    assert (found.minimum_OG is None) == (weight.minimum_OG is None)
    assert torch.equal(found.dense(), weight.dense())
    both = alternating(packed, coded_tiles(joined([weight])))
    assert isinstance(both, CodedTiles)
    assert torch.equal(both[1::2].weight(77).dense(), weight.dense())


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_outputs_are_packed_by_parts(bits: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = some(bits, group, signed=bits == 8, minimum=bits == 4, short=True)
    whole = coded_tiles(weight)
    monkeypatch.setattr(quantised, "_ROWS", 16)
    parts = coded_tiles(weight)
    assert parts.form == whole.form
    assert torch.equal(parts.data, whole.data)
    dense_OK = weight.dense()
    given = rounded(dense_OK, bits, group)
    later = RoundedWeight(dense_OK, bits, group, "weight")
    assert torch.equal(coded_tiles(later).data, coded_tiles(given).data)


def test_weights_of_several_kinds_in_one() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(16, 128, generator=generator) for _ in range(3)]
    kinds = [rounded(dense[0], 4, 32), rounded(dense[1], 8, 16), rounded(dense[2], 8)]
    assert can_join(kinds)
    one = joined(kinds)
    assert (one.bits, one.group) == (8, 16)
    assert torch.equal(one.dense(), torch.cat([each.dense() for each in kinds]))
    unsigned = QuantisedWeight(torch.full((16, 128), 200, dtype=torch.uint8), torch.ones(16, 1), None, 8)
    assert not can_join([unsigned, kinds[0]])
    assert can_join([unsigned, unsigned])
