"""Blocks of a GGUF file in native code: packed as the definition packs them, and decoded to the same bits."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from foretoken.forward.quantised_weight import product, rows_of
from foretoken.forward.stored_weight import StoredWeight
from foretoken.native import build
from foretoken.native.packing import alternating, packed_in_turn
from foretoken.native.quantised import coded_tiles
from foretoken.native.stored_blocks import block_number, packed_blocks
from foretoken.native.superblocks import packed_codes
from foretoken.native.tiles import numbers_and_addresses
from helpers.native_products import KINDS, library_of, native
from helpers.stored_weights import random_stored

SMALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
LARGE = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
TABLED = {"IQ4_NL": 4.5, "MXFP4": 5.0}  # bits of a packed weight


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = build.library()
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


@pytest.mark.parametrize("outputs", [1, 16, 77])
@pytest.mark.parametrize("name", SMALL)
def test_small_blocks_are_packed_as_their_decoded_twins(library: ctypes.CDLL, name: str, outputs: int) -> None:
    for inputs in (32, 96, 320):
        weight = random_stored(name, outputs, inputs, seed=inputs)
        found, expected = packed_blocks(weight, library), coded_tiles(weight.decoded(), torch.float16)
        assert torch.equal(found.data, expected.data)
        assert found.form == expected.form


@pytest.fixture(scope="module", params=KINDS)
def any_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library_of(request.param)


@pytest.mark.parametrize("outputs", [1, 80, 77])
@pytest.mark.parametrize("name", TABLED)
def test_codes_that_stand_for_numbers_of_a_table(any_library: ctypes.CDLL, name: str, outputs: int) -> None:
    for inputs in (32, 512, 1312):
        weight = random_stored(name, outputs, inputs, seed=inputs)
        if name == "MXFP4":  # other powers of two leave no sum finite
            weight.blocks_OR[:, ::17] = weight.blocks_OR[:, ::17] % 40 + 100
        packed = packed_blocks(weight, any_library)
        assert packed.data.numel() <= 16 * len(packed) * (inputs * TABLED[name] / 8 + 4)
        assert torch.equal(packed.weight(outputs).dense(), weight.dense())
        for count in (1, 2, 3, 5, 8, 13, 40):
            x_TK = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)) * 10
            x_TK[:, 7] *= 50
            assert torch.equal(native(any_library, packed, x_TK)[:, :outputs], product(rows_of(x_TK), weight)), count


def test_all_threads_pack_their_tiles(library: ctypes.CDLL) -> None:
    weight = random_stored("Q4_1", 4112, 2048)  # more bytes than one thread packs alone
    assert torch.equal(packed_blocks(weight, library).data, coded_tiles(weight.decoded(), torch.float16).data)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K"])
def test_two_weights_in_turn_are_written_once(library: ctypes.CDLL, name: str) -> None:
    first, second = (random_stored(name, 48, 512, seed=seed) for seed in (1, 2))
    found = packed_in_turn(first, second, torch.float32, library)
    expected = alternating(*(packed_codes(each, library) for each in (first, second)))
    assert torch.equal(found.data, expected.data)
    assert found.form == expected.form


def decoded_rows(weight: StoredWeight, library: ctypes.CDLL) -> Tensor:
    """The weight that this is, float32 [O, K], as native forwards look up their embeddings."""
    outputs, inputs = weight.shape
    dense_OK, blocks_OR = torch.empty(outputs, inputs), weight.blocks_OR.contiguous()
    decode = numbers_and_addresses(library, "foretoken_decode_blocks", "qaqqqa")
    number, row_bytes = block_number(weight.kind.name), blocks_OR.shape[1]
    decode(number, blocks_OR.data_ptr(), outputs, row_bytes, inputs, dense_OK.data_ptr())
    return dense_OK


@pytest.mark.parametrize("name", [*SMALL, *LARGE, *TABLED])
def test_decoded_rows_have_the_bits_of_the_definition(library: ctypes.CDLL, name: str) -> None:
    weight = random_stored(name, 37, 768)
    assert torch.equal(decoded_rows(weight, library), weight.dense())
