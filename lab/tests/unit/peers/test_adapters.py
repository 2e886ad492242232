"""What the peers are given of a model."""

from __future__ import annotations

from pathlib import Path

from foretoken_lab.peers import adapters


def test_a_gguf_file_is_given_to_every_engine_as_it_is(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert adapters.gguf_file_of(str(folder)) is None
    assert adapters.gguf_file_of(str(file)) == file
    assert adapters.kept_gguf(str(file), adapters.FILE) == file
    assert adapters.dense(adapters.FILE) == "bfloat16"
