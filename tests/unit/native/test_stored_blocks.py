"""Blocks of a GGUF file in native code: packed as the definition packs them, and decoded to the same bits."""

from __future__ import annotations

import ctypes

import pytest
import torch

from foretoken.native import build
from foretoken.native.packing import alternating, packed_in_turn
from foretoken.native.quantised import coded_tiles
from foretoken.native.stored_blocks import decoded_rows, packed_blocks
from foretoken.native.superblocks import packed_codes
from helpers.stored_weights import random_stored

SMALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
LARGE = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


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


@pytest.mark.parametrize("name", SMALL + LARGE)
def test_decoded_rows_have_the_bits_of_the_definition(library: ctypes.CDLL, name: str) -> None:
    weight = random_stored(name, 37, 768)
    assert torch.equal(decoded_rows(weight, library), weight.dense())
