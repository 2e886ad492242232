"""Every kind of block against the package ``gguf``, bit for bit, on random bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ModelError
from foretoken.forward.quantised_weight import rounded
from foretoken.models.gguf.blocks import dense, packed_bytes, quantised
from foretoken.models.gguf.container import GGUFFile
from foretoken.native.quantised import can_join, coded_tiles

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")
np = pytest.importorskip("numpy")

KINDS = {  # groups and bits
    "Q4_0": (32, 4), "Q4_1": (32, 4), "Q5_0": (32, 8), "Q5_1": (32, 8), "Q8_0": (32, 8), "Q2_K": (16, 4),
    "Q3_K": (16, 4), "Q4_K": (32, 4), "Q5_K": (32, 8), "Q6_K": (16, 8), "IQ4_NL": (32, 8), "IQ4_XS": (32, 8),
    "MXFP4": (32, 8),
}  # fmt: skip
HALVES = {  # bytes of float16
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "MXFP4": [],
}  # fmt: skip


def random_blocks(kind, rows=5, blocks=3, seed=0):
    """Every bit random, but for the float16 numbers, which are finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for begin in HALVES[kind.name]:
        numbers = generator.standard_normal(len(data)).astype(np.float16)
        data[:, begin : begin + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, blocks * size)


def write(path: Path, data, kind, name: str = "blk.0.ffn_up.weight") -> GGUFFile:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_block_is_what_ggml_says(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind)
    file = write(tmp_path / "x.gguf", data, kind)
    (entry,) = file.entries.values()
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    found = quantised(file, entry)
    assert torch.equal(found.dense(), expected)
    assert torch.equal(dense(file, entry), expected)
    assert (found.group, found.bits, found.name) == (*KINDS[name], "blk.0.ffn_up.weight")
    # files mix kinds, and the native decoder packs queries, keys and values as one
    assert can_join([found, rounded(torch.ones(4, 256), 4, 32)])


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_that_stays_in_the_file_is_described_as_it_is_read(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    file = write(tmp_path / "x.gguf", random_blocks(kind, rows=70, blocks=16), kind)
    (entry,) = file.entries.values()
    stored = quantised(file, entry)
    read = stored.decoded()
    for fact in ("shape", "bits", "group", "signed", "minimum", "kept_in", "name", "order_K"):
        assert getattr(stored, fact) == getattr(read, fact), fact
    if stored.for_modules() is not stored:
        assert stored.num_bytes == read.num_bytes
    assert packed_bytes(entry, torch.float32) == stored.num_bytes
    assert torch.equal(stored.dense(), read.dense())
    which_O = torch.tensor([3, 0, 69])
    assert torch.equal(stored.rows(which_O).codes_OK, read.codes_OK[which_O])
    assert torch.equal(stored.rows(which_O).dense(), read.dense()[which_O])
    file.leave(entry)
    assert torch.equal(stored.decoded().dense(), read.dense())


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_packed_by_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType[name]
    file = write(tmp_path / "x.gguf", random_blocks(kind, rows=70, blocks=16), kind)
    (entry,) = file.entries.values()
    stored = quantised(file, entry)
    whole = coded_tiles(stored.decoded())
    monkeypatch.setattr("foretoken.native.quantised._ROWS", 16)
    parts = coded_tiles(stored)
    assert parts.form == whole.form
    assert torch.equal(parts.data, whole.data)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_unquantised_tensors_keep_their_bits(name: str, tmp_path: Path) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    values = values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name])
    raw = values.view(torch.uint8).numpy()
    data = {"F32": raw.view(np.float32), "F16": raw.view(np.float16), "BF16": raw}[name]
    file = write(tmp_path / "x.gguf", data, gguf.GGMLQuantizationType[name])
    found = dense(file, file.entries["blk.0.ffn_up.weight"])
    assert found.dtype == values.dtype
    assert torch.equal(found, values)


@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_XXS", "TQ1_0"])
def test_other_kinds_are_refused_with_the_tensors_name(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    file = write(tmp_path / "x.gguf", data, kind, "blk.3.attn_v.weight")
    with pytest.raises(ModelError, match=rf"'blk.3.attn_v.weight' is of kind {name}, .* Q5_K, Q6_K, IQ4_XS, F32"):
        dense(file, file.entries["blk.3.attn_v.weight"])


@pytest.mark.parametrize("name", [name for name, halves in HALVES.items() if halves])
def test_scales_that_are_not_numbers_are_refused(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind)
    begin = HALVES[name][-1]
    data[0, begin : begin + 2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    file = write(tmp_path / "x.gguf", data, kind)
    with pytest.raises(ModelError, match=r"'blk.0.ffn_up.weight' has (scales|minimums) that are not finite"):
        quantised(file, file.entries["blk.0.ffn_up.weight"])


def test_three_dimensions_are_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write(tmp_path / "x.gguf", random_blocks(kind, rows=4).reshape(2, 2, -1), kind, "blk.0.ffn_up_exps.weight")
    with pytest.raises(ModelError, match=r"'blk.0.ffn_up_exps.weight' of Q8_0 has the shape \[2, 2, 96\]"):
        dense(file, file.entries["blk.0.ffn_up_exps.weight"])
