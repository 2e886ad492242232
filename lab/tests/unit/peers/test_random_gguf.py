from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.models.gguf.checkpoint import GGUFCheckpoint
from foretoken_lab.models import shapes
from foretoken_lab.peers.random_gguf import write

pytest.importorskip("gguf", reason="needs the package gguf (extra 'peers')")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.Shape(256, 2, 256, 4, 2, 8192, tied=False))
    return "tiny"


def test_a_random_file_answers_and_has_the_kinds_of_its_name(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    assert write(tiny, "Q4_K_M", path) == path.stat().st_size
    stored = {name: entry.kind for name, entry in GGUFCheckpoint(path)._file.entries.items()}
    q4_k, q6_k = 12, 14  # ggml's numbers
    assert stored["blk.0.ffn_down.weight"] == stored["blk.0.attn_q.weight"] == q4_k
    assert stored["blk.1.ffn_down.weight"] == stored["output.weight"] == q6_k
    (out,) = LLM(str(path), max_model_len=64, speculative_config=None).generate(
        ["1 2 3"], SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert len(out.token_ids) == 4


def test_rows_of_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="384"):
        write("16m", "Q4_K_M", tmp_path / "random.gguf")
