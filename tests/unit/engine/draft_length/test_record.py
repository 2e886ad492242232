"""The file of what `auto` has learned: read, written, bounded, and done without where it cannot be had."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.core.needs import Declared
from foretoken.engine.draft_length import record as records
from foretoken.engine.draft_length.controller import Controller
from foretoken.engine.draft_length.record import Record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FORETOKEN_KEPT_GB")
    monkeypatch.setattr(records, "fingerprint_of", lambda source: f"fingerprint of {source}")
    return tmp_path / "foretoken"


def record(source: str = "here", *, finds_model: bool = True) -> Record:
    target: Any = SimpleNamespace(source=source, precision="int8", kv_cache_dtype=None, native_decoder=None)
    drafter = SimpleNamespace(declared=Declared(finds_model=finds_model), sources=("suffix",), config=None)
    recipe: Any = SimpleNamespace(drafter=drafter, may_skip_drafting=True, verifier=None)
    return Record(target, recipe)


def practised() -> Controller:
    controller = Controller()
    for nodes in (0, 0, 0, 4, 0, 4):
        controller.measure(num_requests=1, nodes=nodes, draft=0.0, total=1.0 + 0.2 * nodes)
    controller.ended(40)
    return controller


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("auto-*.json")) if folder.is_dir() else []


def test_a_record_serves_the_same_model_and_no_other(folder: Path) -> None:
    first, controller = record(), practised()
    first.write(controller)
    assert not files(folder), "no answer has ended: there is nothing new"
    first.keep(controller)
    first.write(controller)
    (file,) = files(folder)
    assert file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0
    again = record().taught(Controller)
    assert again._regime(1).costs.row == pytest.approx(0.2, abs=0.02)
    assert not again._regime(1).costs.row_known, "one step of this run decides"
    assert record("elsewhere").taught(Controller)._regimes == {}
    assert record(finds_model=False).taught(Controller)._regimes == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"learned": {"stands": [2.0], "answer": 1, "regimes": {}}}', "nonsense", "\x00"]
)
def test_a_damaged_file_is_one_line(text: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = record()
    assert made._path is not None
    made._path.write_text(text)
    with caplog.at_level(logging.WARNING):
        found = made.taught(Controller)
    assert found.learned() == Controller().learned()
    (line,) = caplog.messages
    assert "damaged" in line


def test_a_folder_that_cannot_be_written_is_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record()
    folder.rename(folder.with_name("gone"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            made.keep(practised())
            made.write(practised())
    (line,) = caplog.messages
    assert "not kept" in line
    monkeypatch.setattr(records, "own_cache_folder", lambda: None)
    record().taught(Controller)
    assert len(caplog.messages) == 2


def test_the_number_of_files_is_bounded_and_0_keeps_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MOST_FILES", 2)
    for number in range(4):
        made = record(str(number))
        made.keep(practised())
        made.write(practised())
        assert made._path is not None
        os.utime(made._path, (number, number))
    names = {json.loads(each.read_text())["key"]["model"][0] for each in files(folder)}
    assert names == {"fingerprint of 2", "fingerprint of 3"}
    assert len(files(folder)) == 2
    monkeypatch.setenv("FORETOKEN_KEPT_GB", "0")
    unkept = record("5")
    unkept.keep(practised())
    unkept.write(practised())
    assert len(files(folder)) == 2
