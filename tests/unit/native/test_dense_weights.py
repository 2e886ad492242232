"""Dense weights in the order of native products: transposed, and rounded to the bits of the definition."""

from __future__ import annotations

import ctypes

import pytest
import torch

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import rounded
from foretoken.forward.stored_weight import RoundedWeight
from foretoken.native import build
from foretoken.native.dense_weights import rounded_tiles
from foretoken.native.packing import packed_in_turn, packed_of, tiled
from foretoken.native.quantised import CodedTiles, coded_tiles, joined


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = build.library()
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


def dense(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With a channel and a row that are larger, and a group of zeros."""
    weight_OK = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    weight_OK[:, 5] *= 40
    weight_OK[0] *= 1e-3
    weight_OK[-1, :64] = 0
    return weight_OK.to(dtype)


def later(weight_OK: torch.Tensor, bits: int, group: int) -> RoundedWeight:
    return RoundedWeight(weight_OK, bits, group, "w")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [16, 77, 4112])
def test_weights_are_tiled(library: ctypes.CDLL, dtype: torch.dtype, outputs: int) -> None:
    for inputs in (32, 50, 576):
        weight_OK = dense(outputs, inputs, dtype)
        assert torch.equal(packed_of([weight_OK], dtype, library), tiled(weight_OK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_weights_are_tiled_in_turn(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    first, second = dense(64, 96, dtype, seed=1), dense(64, 96, dtype, seed=2)
    found = packed_in_turn(first, second, dtype, library)
    assert torch.equal(found[0::2], tiled(first))
    assert torch.equal(found[1::2], tiled(second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32), (4, 64), (8, 576)])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_rounding_has_the_bits_of_the_definition(
    library: ctypes.CDLL, dtype: torch.dtype, bits: int, group: int, size: float
) -> None:
    """Of tiny weights the scales need float32."""
    for outputs in (16, 77, 1040):
        weight_OK = dense(outputs, 576, dtype) * size
        found, expected = (
            rounded_tiles(later(weight_OK, bits, group), library),
            coded_tiles(rounded(weight_OK, bits, group)),
        )
        assert found.form == expected.form
        assert torch.equal(found.data, expected.data)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(library: ctypes.CDLL, odd: float) -> None:
    weight_OK = dense(32, 64, torch.float32)
    weight_OK[17, 40] = odd
    with pytest.raises(ModelError):
        rounded_tiles(later(weight_OK, 8, 32), library)


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32)])
@pytest.mark.parametrize("tiny_row", [None, 70])
def test_some_rows_are_rounded_as_they_are_among_all(bits: int, group: int, tiny_row: int | None) -> None:
    """A row of tiny elements makes all rows keep their scales in float32."""
    weight_OK = dense(77, 576, torch.bfloat16)
    if tiny_row is not None:
        weight_OK[tiny_row] *= 1e-6
    weight, which_O = later(weight_OK, bits, group), torch.tensor([0, 40, 12])
    found, expected = weight.rows(which_O), rounded(weight_OK, bits, group).rows(which_O)
    assert torch.equal(found.codes_OK, expected.codes_OK)
    assert torch.equal(found.scale_OG, expected.scale_OG)
    assert (found.minimum_OG is None) == (expected.minimum_OG is None)
    assert found.minimum_OG is None or torch.equal(found.minimum_OG, expected.minimum_OG)
    assert weight.kept_in == rounded(weight_OK, bits, group).kept_in
    assert weight.kept_in == torch.float32 or tiny_row is None


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 1e-6)], ids=["one form", "two forms"])
def test_two_weights_are_rounded_in_turn(library: ctypes.CDLL, sizes: tuple[float, float]) -> None:
    given = [dense(64, 96, torch.bfloat16, seed) * size for seed, size in enumerate(sizes)]
    found = packed_in_turn(later(given[0], 4, 32), later(given[1], 4, 32), torch.bfloat16, library)
    assert isinstance(found, CodedTiles)
    for number, each in enumerate(given):
        assert torch.equal(found[number::2].weight(64).dense(), rounded(each, 4, 32).dense())


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32)])
def test_experts_are_rounded_and_packed_as_they_are_by_themselves(library: ctypes.CDLL, bits: int, group: int) -> None:
    """One of tiny elements keeps its scales in float32, the others keep theirs."""
    given = [dense(64, 96, torch.bfloat16, seed) * (1e-6 if seed == 1 else 1.0) for seed in range(3)]
    halves = [later(each, bits, group).split([32, 32]) for each in given]
    for part in (0, 1):
        whole = joined([each[part] for each in halves])
        assert isinstance(whole, RoundedWeight)
        expected = joined([rounded(each, bits, group).split([32, 32])[part] for each in given])
        found = packed_of([whole], torch.bfloat16, library)
        assert isinstance(found, CodedTiles)
        assert torch.equal(found.data, coded_tiles(expected).data)
