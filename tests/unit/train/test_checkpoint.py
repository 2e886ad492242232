"""Checkpoints: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import sys

import pytest
import torch
from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError
from foretoken.train import checkpoint
from helpers import warm

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 2).T}
OPTIMISER = {"a/step": torch.tensor(3.0)}


def save(folder, step, **state):
    return checkpoint.save(folder, step, WEIGHTS, OPTIMISER, {"step": step, **state})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_round_trip_and_only_the_last_is_kept(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (9, 10, 100):
        place = save(tmp_path / "c", step)
        assert checkpoint.latest(tmp_path / "c") == place
    assert names(tmp_path / "c") == ["step-00000100"]
    weights, optimiser, state = checkpoint.load(place)
    assert all(torch.equal(weights[name], tensor) for name, tensor in WEIGHTS.items())
    assert optimiser == OPTIMISER
    assert state == {"step": 100}


def test_an_unfinished_checkpoint_is_ignored_and_overwritten(tmp_path):
    """A run that is killed leaves a folder under another name."""
    first = save(tmp_path, 1)
    part = tmp_path / "step-00000002.part"
    part.mkdir()
    (part / "weights.safetensors").write_bytes(b"half")
    (part / "left over").write_bytes(b"")
    assert checkpoint.latest(tmp_path) == first
    second = save(tmp_path, 2)
    assert names(tmp_path) == [second.name]
    assert names(second) == ["optimiser.safetensors", "state.json", "weights.safetensors"]


def test_a_checkpoint_that_stands_is_never_taken_away_to_be_written_again(tmp_path):
    save(tmp_path, 1, version="first")
    save(tmp_path, 1, version="second")
    assert checkpoint.load(checkpoint.latest(tmp_path))[2]["version"] == "first"


@pytest.mark.parametrize("moment", ["weights", "optimiser", "state", "flush", "rename"])
@pytest.mark.parametrize("earlier", [True, False], ids=["one before", "none before"])
def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch, moment, earlier):
    before = save(tmp_path, 1) if earlier else None
    real = {"save_file": checkpoint.save_file, "replace": os.replace, "fsync": os.fsync}
    full = OSError(errno.ENOSPC, "No space left on device")

    def save_file(tensors, path):
        real["save_file"](tensors, path)
        if path.stem == moment:
            path.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def fail(*arguments, **options):
        raise full

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    if moment == "state":
        monkeypatch.setattr(checkpoint.Path, "write_text", fail)
    elif moment == "flush":
        monkeypatch.setattr(os, "fsync", fail)
    elif moment == "rename":
        monkeypatch.setattr(os, "replace", fail)
    kept = "the last checkpoint, step-00000001, is kept" if earlier else "no earlier checkpoint exists"
    with pytest.raises(ForetokenError, match=rf"cannot be written \(the disk is full\); {kept}; free space and run"):
        save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == before
    assert names(tmp_path) == ([before.name] if before else [])
    if before:
        checkpoint.load(before)  # whole


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from pathlib import Path
import torch
from foretoken.train import checkpoint
checkpoint.save(Path(sys.argv[1]), 2, {"a": torch.zeros(100_000)}, {}, {"step": 2})
"""


def test_a_real_write_that_fails_leaves_the_one_before(tmp_path):
    before = save(tmp_path, 1)

    done = warm.run([sys.executable, "-c", LIMITED, str(tmp_path)])
    assert done.returncode == 1
    assert "ForetokenError" in done.stderr
    assert "step-00000001, is kept" in done.stderr
    assert checkpoint.latest(tmp_path) == before
    assert names(tmp_path) == [before.name]


@pytest.mark.parametrize("file", ["weights.safetensors", "optimiser.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_says_so(tmp_path, file, damage):
    place = save(tmp_path, 1)
    if damage == "gone":
        (place / file).unlink()
    else:
        with (place / file).open("rb+") as handle:
            handle.truncate(5)
    with pytest.raises(ForetokenError, match=r"step-00000001: damaged checkpoint \(.*\); remove it to go on"):
        checkpoint.load(place)
