"""Products with weights in the superblocks of a GGUF file: packing, and the bits of their definition."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.forward.quantised_weight import QuantisedLinear, QuantisedWeight, product, rounded, rows_of
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native import build
from foretoken.native.packing import TiledLinear, alternating, described, packed_apart
from foretoken.native.quantised import CodedTiles, joined
from foretoken.native.superblocks import MixedTiles, SuperblockTiles, packed_codes
from helpers.native_products import KINDS, library_of, native
from helpers.stored_weights import random_stored

BITS = {"Q2_K": 2.625, "Q3_K": 3.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.625, "IQ4_XS": 4.375}  # of a packed weight
KEPT = tuple(BITS)


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_of(request.param)


@pytest.fixture(scope="module")
def decoder() -> ctypes.CDLL:
    found = build.library()
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


def rows(count: int, inputs: int) -> Tensor:
    """Of very different sizes, with a channel that is larger."""
    x_TK = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x_TK[:, 37] *= 50
    return x_TK * torch.logspace(-10, 10, count)[:, None]


@pytest.mark.covering(2)
@pytest.mark.parametrize("outputs", [1, 16, 80, 77])
@pytest.mark.parametrize("name", KEPT)
def test_a_product_has_the_bits_of_its_definition(library: ctypes.CDLL, name: str, outputs: int) -> None:
    for inputs in (256, 512, 1280):
        weight = random_stored(name, outputs, inputs, seed=inputs)
        packed = packed_codes(weight, library)
        for count in (*range(1, 18), 40):
            x_TK = rows(count, inputs)
            assert torch.equal(native(library, packed, x_TK)[:, :outputs], product(rows_of(x_TK), weight)), count


@pytest.mark.parametrize("name", KEPT)
def test_the_largest_codes_and_scales(library: ctypes.CDLL, name: str) -> None:
    """Every bit of codes and scales set, and rows at the ends of their codes."""
    weight = random_stored(name, 16, 512)
    kind = weight.kind
    blocks = torch.full_like(weight.blocks_OR, 255).view(-1, kind.bytes)
    for begin in kind.halves:
        blocks[:, begin : begin + 2] = torch.tensor([1.5]).half().view(torch.uint8)
    weight = StoredWeight(blocks.view(16, -1), kind)
    for sign in (1.0, -1.0):
        x_TK = torch.full((9, 512), sign)
        assert torch.equal(native(library, packed_codes(weight, library), x_TK), product(rows_of(x_TK), weight))


def _swap_scales(packed: SuperblockTiles) -> None:
    first, second = packed.data[0, 64].item(), packed.data[0, 80].item()  # of output 0, in groups 0 and 1
    packed.data[0, 64], packed.data[0, 80] = second, first


def _swap_upper_bits(packed: SuperblockTiles) -> None:
    packed.data[0, -1] ^= 1


@pytest.mark.parametrize("fault", [_swap_scales, _swap_upper_bits])
@pytest.mark.parametrize("name", KEPT)
def test_a_planted_fault_changes_the_product(
    library: ctypes.CDLL, name: str, fault: Callable[[SuperblockTiles], None]
) -> None:
    weight = random_stored(name, 16, 256)
    packed = packed_codes(weight, library)
    assert isinstance(packed, SuperblockTiles)
    fault(packed)
    x_TK = rows(1, 256)
    assert not torch.equal(native(library, packed, x_TK), product(rows_of(x_TK), weight))


@pytest.mark.parametrize("name", KEPT)
def test_packed_blocks_can_be_unpacked(library: ctypes.CDLL, name: str) -> None:
    weight = random_stored(name, 77, 768)
    packed = packed_codes(weight, library)
    assert len(packed) == 5
    assert packed.data.numel() * 8 == 80 * 768 * BITS[name]
    assert packed.data.data_ptr() % 64 == 0
    found = packed.weight(77)
    assert isinstance(found, StoredWeight)
    assert torch.equal(found.blocks_OR, weight.blocks_OR)
    both = alternating(packed, packed_codes(random_stored(name, 77, 768, seed=1), library))
    assert isinstance(both, CodedTiles)
    assert torch.equal(both[0::2].weight(77).dense(), weight.dense())


@pytest.mark.parametrize("name", KEPT)
def test_outputs_can_be_copied_one_by_one(library: ctypes.CDLL, name: str) -> None:
    """As a head of fewer tokens does (models/head_rows.py)."""
    weight = random_stored(name, 48, 512)
    packed = packed_codes(weight, library)
    taken = packed.like(torch.zeros_like(packed.data[:1]))
    chosen = torch.tensor([40, 3, 17])
    for to, whole in zip(taken.parts(), packed.parts(), strict=True):
        to[0, :, :3] = whole[chosen // 16, :, chosen % 16].transpose(0, 1)
    found = taken.weight(3)
    assert torch.equal(found.dense(), weight.rows(chosen).dense())


def test_packing_does_not_depend_on_threads(decoder: ctypes.CDLL) -> None:
    weight = random_stored("Q4_K", 4096 + 5, 2048)  # more than one thread takes alone
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = packed_codes(weight, decoder)
        torch.set_num_threads(3)
        assert torch.equal(packed_codes(weight, decoder).data, alone.data)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_several_kinds_are_kept_apart(decoder: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = rounded(torch.randn(32, 512, generator=generator), 8, 32)
    kinds: list[QuantisedWeight] = [
        random_stored("Q4_K", 64, 512),
        random_stored("Q4_K", 32, 512, seed=1),
        random_stored("Q6_K", 48, 512),
        plain,
    ]
    packed = packed_apart(list(kinds), torch.float32, decoder)
    assert isinstance(packed, MixedTiles)
    assert [type(run) for run in packed.runs] == [SuperblockTiles, SuperblockTiles, CodedTiles]
    assert [len(run) for run in packed.runs] == [6, 3, 2]
    x_TK = torch.randn(5, 512, generator=generator).to(dtype)
    expected_TO = torch.cat([QuantisedLinear(each)(x_TK) for each in kinds], dim=1)
    begin = 0
    for each in kinds:
        tiles = each.shape[0] // 16
        alone = TiledLinear(packed[begin : begin + tiles], each.shape[0], None, decoder)
        assert torch.equal(alone(x_TK), QuantisedLinear(each)(x_TK))
        begin += tiles
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(_whole(packed, x_TK, decoder), expected_TO)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="tiles 5 to 7 are packed in several forms"):
        packed[5:7]
    matrix = described(packed)
    assert matrix.own_tiles == 6


def _whole(packed: MixedTiles, x_TK: Tensor, decoder: ctypes.CDLL) -> Tensor:
    """One native product with all forms."""
    whole = TiledLinear(packed.runs[0], 16 * len(packed.runs[0]), None, decoder)
    whole._packed, whole.out_features = packed, 16 * len(packed)  # type: ignore[assignment]  # what the decoder's layers have
    return whole(x_TK)


def test_alike_weights_are_joined_in_their_blocks_and_others_are_widened() -> None:
    first, second = random_stored("Q4_K", 16, 256), random_stored("Q4_K", 32, 256, seed=1)
    one = joined([first, second])
    assert isinstance(one, StoredWeight)
    assert torch.equal(one.dense(), torch.cat([first.dense(), second.dense()]))
    other = random_stored("Q6_K", 16, 256)
    wide = joined([first, other])
    assert not isinstance(wide, StoredWeight)
    assert torch.equal(wide.dense(), torch.cat([first.dense(), other.dense()]))


@pytest.mark.parametrize("name", KEPT)
def test_a_stored_weight_is_the_decoded_one(name: str) -> None:
    weight = random_stored(name, 24, 512)
    plain: QuantisedWeight = weight.decoded()
    assert (weight.shape, weight.group, weight.bits) == (plain.shape, plain.group, plain.bits)
    assert torch.equal(weight.codes_OK, plain.codes_OK)
    assert torch.equal(weight.scale_OG, plain.scale_OG)
    assert weight.num_bytes == weight.blocks_OR.numel() < plain.num_bytes
    order_O = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight.rows(order_O).dense(), plain.dense()[order_O])
    assert [each.shape[0] for each in weight.split([8, 16])] == [8, 16]
    assert torch.equal(weight.split([8, 16])[1].dense(), plain.dense()[8:])
    copied = copy.deepcopy(weight)
    assert isinstance(copied, StoredWeight)
    assert torch.equal(copied.dense(), plain.dense())
