"""Sources of documents: a user's files, generated tasks, and tasks made from passages."""

from __future__ import annotations

import pytest

from foretoken.core.errors import ConfigError, InputError
from foretoken.train import sources


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "x"}\n')
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text('{"text": "y"}\n')
    return tmp_path


def test_files_of_the_user(folder):
    found = sources.parse_all(["a.jsonl", "b.txt=0.5", "other/a.jsonl=2"])
    assert [(source.name, source.share) for source in found] == [("a", 1.0), ("b", 0.5), ("a_2", 2.0)]
    assert [str(path) for source in found for path in source.files] == ["a.jsonl", "b.txt", "other/a.jsonl"]
    assert [next(source.documents()) for source in found] == [
        "<|bos|>x<|eos|>", '<|bos|>{"text": "x"}\n<|eos|>', "<|bos|>y<|eos|>",
    ]  # fmt: skip


@pytest.mark.parametrize("share", ["0", "-1", "nan", "inf", "much", ""])
def test_a_share_that_is_none(folder, share):
    with pytest.raises(ConfigError, match=f"the share after '=' must be a positive number, not '{share}'"):
        sources.parse(f"a.jsonl={share}")


def test_a_file_that_is_none(folder):
    with pytest.raises(InputError, match="--corpus none: no such file"):
        sources.parse("none")
    with pytest.raises(InputError, match="--corpus other: this is a folder"):
        sources.parse("other=3")


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"\n", "is empty"), (b"{", "not valid JSON")])
def test_a_file_without_a_document_is_refused_before_anything_is_made(folder, content, words):
    (folder / "odd.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=words):
        sources.parse("odd.jsonl")
