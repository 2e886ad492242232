"""Tokenizers of GGUF files that need no llama.cpp to judge them: the library's table of splits, and Gemma's spaces."""

from __future__ import annotations

from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")

from foretoken.models.gguf.container import GGUFFile  # noqa: E402
from foretoken.models.gguf.tokenizer import _SPLITS, tokenizer_of  # noqa: E402
from helpers import gguf_files  # noqa: E402


def test_every_split_that_the_library_knows_is_the_same_here() -> None:
    mapping = pytest.importorskip(
        "transformers.integrations.gguf.gguf_tokenizer_mapping", reason="needs a newer transformers"
    )
    library = mapping.GGUF_PRE_TOKENIZER_SPLITS
    assert {name: _SPLITS[name].pattern for name in library} == library


def test_gemma_merges_spaces_in_the_order_of_its_tokens(tmp_path: Path) -> None:
    """Four spaces are twice ▁▁ then; the longest token first, as for others of their kind, gives other ids."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "a", "▁", "▁a"]
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * 6 + [-2.0, -1.0, 0.0])
    writer.add_token_types([3, 3, 3, 3, 4, 4, 1, 1, 1])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    gguf_files.finish(writer, tmp_path / "x.gguf")
    tokenizer = tokenizer_of(GGUFFile(tmp_path / "x.gguf"))
    expected = {"a": [6], " a": [8], "  a": [4, 6], "a   ": [6, 5], "a    ": [6, 4, 4], "     a": [4, 5, 6]}
    for text, ids in expected.items():
        assert tokenizer(text).input_ids == [2, *ids], repr(text)
        assert tokenizer.decode(ids) == text
