"""Prefixes on disk: the same text after a restart, and never those of another model or salt, or of a damaged file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.engine import prefix_files
from foretoken.engine.request import Request
from foretoken.models.load import load
from foretoken.options.model import EngineOptions
from helpers.zoo_llms import target

PROMPT = [7 + number % 90 for number in range(150)]
LONG = SamplingParams(max_tokens=8, ignore_eos=True)


def started(folder: Path, model: Any = None, **options: Any) -> LLM:
    """As after a restart: the weights are shared, the cache is new."""
    llm = LLM.__new__(LLM)
    settings = EngineOptions(**{"max_num_seqs": 1, "prefix_cache_dir": str(folder), **options})
    llm._build(model or target(), {"method": "suffix"}, settings, SamplingParams())
    return llm


def run(llm: LLM, prompt: list[int], salt: str | None = None) -> Request:
    (request,) = llm.new_requests(prompt, LONG, cache_salt=salt)
    llm.engine.add(request)
    while not request.finished:
        llm.engine.step()
    return request


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


def rows(llm: LLM, count: int) -> list[torch.Tensor]:
    cache = llm.engine.cache
    return [each[0, :, :count].clone() for each in (*cache.keys, *cache.values) if each is not None]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_restart_goes_on_with_the_same_bits(dtype: str, tmp_path: Path) -> None:
    model = target() if dtype == "auto" else load("zoo:base", kv_cache_dtype="int8", device="cpu")
    first = started(tmp_path, model)
    whole = run(first, PROMPT)
    kept = rows(first, len(PROMPT))
    first.close()
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = started(tmp_path, model)
    request = run(again, PROMPT)
    assert request.num_cached == len(PROMPT) - 1
    assert request.output_ids == whole.output_ids
    assert all(map(torch.equal, kept, rows(again, len(PROMPT))))
    other = run(again, [*PROMPT[:100], 3])  # memory is reused, and no file is lost
    assert other.num_cached == 100


def test_what_leaves_memory_is_written_and_read_where_it_is_longer(tmp_path: Path) -> None:
    llm = started(tmp_path)
    first = run(llm, PROMPT)
    assert files(tmp_path) == []
    run(llm, PROMPT[::-1])  # the only slot
    assert len(files(tmp_path)) == 1
    assert run(llm, [*first.tokens, 5, 6]).num_cached == len(first.tokens) - 1
    assert len(files(tmp_path)) == 2
    llm.close()
    assert len(files(tmp_path)) == 2  # the longer one has replaced the one that it begins with


def test_nothing_is_shared_with_another_model_dtype_build_or_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = started(tmp_path)
    run(llm, PROMPT, salt="a")
    llm.close()
    assert run(started(tmp_path), PROMPT).num_cached == 0
    assert run(started(tmp_path), PROMPT, salt="b").num_cached == 0
    assert run(started(tmp_path, load("zoo:draft", device="cpu")), PROMPT, salt="a").num_cached == 0
    assert run(started(tmp_path, load("zoo:base", kv_cache_dtype="int8", device="cpu")), PROMPT, "a").num_cached == 0
    assert run(started(tmp_path), PROMPT, salt="a").num_cached == len(PROMPT) - 1
    monkeypatch.setattr(prefix_files, "version", lambda name: "0")
    assert run(started(tmp_path), PROMPT, salt="a").num_cached == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def rename(path: Path) -> None:
    """A file of another model under this one's name."""
    llm = started(path.parent / "other", load("zoo:draft", device="cpu"))
    run(llm, PROMPT)
    llm.close()
    os.replace(files(path.parent / "other")[0], path)


@pytest.mark.parametrize("damage", [cut, flip, rename])
def test_a_damaged_file_is_removed(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = started(tmp_path)
    expected = run(llm, PROMPT).output_ids
    llm.close()
    (path,) = files(tmp_path)
    damage(path)
    request = run(started(tmp_path), PROMPT)
    assert (request.num_cached, request.output_ids) == (0, expected)
    assert not path.exists()
    assert [record.levelname for record in caplog.records if "stored prefix" in record.message] == ["WARNING"]


def test_files_that_were_used_longest_ago_leave_first(tmp_path: Path) -> None:
    llm = started(tmp_path)
    prompts = [[token + number for token in PROMPT] for number in range(4)]
    run(llm, prompts[0])
    run(llm, prompts[1])
    size = files(tmp_path)[0].stat().st_size
    llm = started(tmp_path, prefix_cache_gb=2.5 * size / 1e9)
    for number, prompt in enumerate((prompts[0], prompts[1], prompts[0], prompts[2], prompts[3])):
        run(llm, prompt)
        for path in files(tmp_path):  # clocks of file systems are coarse
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9 * (5 - number)))
    assert len(files(tmp_path)) == 2
    small = started(tmp_path / "small", prefix_cache_gb=0.5 * size / 1e9)
    run(small, prompts[0])
    small.close()
    assert files(tmp_path / "small") == []


def test_a_disk_that_takes_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    llm = started(tmp_path)
    for number in range(3):
        run(llm, [token + number for token in PROMPT])
    llm.close()
    said = [record.message for record in caplog.records if "not written" in record.message]
    assert said == [f"prefixes are not written to {tmp_path}: No space left on device"]


def test_folders_and_recipes_that_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"prefix_cache_dir=.*/file.*: no folder can be made there"):
        started(tmp_path / "file")
    states = load("zoo:mamba", device="cpu")
    llm = started(tmp_path / "states", states)
    run(llm, PROMPT)
    llm.close()
    assert files(tmp_path / "states") == []
    assert "prefixes stay in memory: a cache that has states is not stored on disk" in caplog.text
