"""GGUF files in pieces: read as the whole file is, and refused by the name of the piece that is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken.core.errors import ModelError  # noqa: E402
from foretoken.models.fingerprint import fingerprint  # noqa: E402
from foretoken.models.load import load_as_is, load_config, load_tokenizer  # noqa: E402
from helpers import gguf_files  # noqa: E402
from helpers.tiny_models import randomise  # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    return gguf_files.save(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind="Q8_0")


@pytest.fixture
def pieces(whole: Path, tmp_path: Path) -> list[Path]:
    """Three files of at most twelve tensors."""
    gguf_files.rewrite(whole, tmp_path / "tiny.gguf", split_max_tensors=12)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def test_pieces_are_one_model(pieces: list[Path], whole: Path) -> None:
    expected, found = load_as_is(whole).model, load_as_is(pieces[0]).model
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)
    assert load_tokenizer(pieces[0])("hello").input_ids == load_tokenizer(whole)("hello").input_ids


def test_the_fingerprint_covers_every_piece(pieces: list[Path]) -> None:
    before = fingerprint(pieces[0])
    content = bytearray(pieces[2].read_bytes())
    content[-40] ^= 1
    pieces[2].write_bytes(content)
    assert fingerprint(pieces[0]) != before


def test_a_missing_piece_is_named(pieces: list[Path]) -> None:
    pieces[1].unlink()
    with pytest.raises(ModelError, match=r"its piece tiny-00002-of-00003.gguf is missing \(1 of 3 in all\)"):
        load_config(pieces[0])


def test_another_piece_than_the_first_is_refused(pieces: list[Path]) -> None:
    with pytest.raises(ModelError, match=r"is not the first of its 3 pieces: name .*tiny-00001-of-00003.gguf"):
        load_config(pieces[1])


def test_a_piece_in_the_place_of_another_is_refused(pieces: list[Path]) -> None:
    shutil.copy(pieces[1], pieces[2])
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003.gguf is not its piece 3 of 3"):
        load_config(pieces[0])


def test_a_piece_under_another_name_is_refused(pieces: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="one of 3 pieces, which its name does not say"):
        load_config(pieces[0].rename(tmp_path / "tiny.gguf"))


def test_a_piece_that_is_cut_short_is_named(pieces: list[Path]) -> None:
    pieces[2].write_bytes(pieces[2].read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003.gguf' is cut short"):
        load_config(pieces[0])
