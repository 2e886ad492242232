"""Files that the program writes carry a format number: another one is refused with the remedy, none is the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import MANIFEST, Manifest, read_manifest
from foretoken.drafting.draft_vocabulary import DraftVocabulary
from foretoken.drafting.learned_part import CONFIG
from foretoken.engine import plan_file
from foretoken.methods.judge.network import JudgeHead
from foretoken.methods.scylla.width import KIND, Widths
from foretoken.methods.sparse.calibration import Calibration
from foretoken.train.run_folder import refuse_another, write_claim
from helpers.untrained import random_unit

Case = tuple[Path, str, Callable[[], Any]]  # a written file, the key of its number, and what reads it


def head(folder: Path) -> Case:
    fields = {"width": 4, "normed": True, "threshold": 0.5}
    config = JudgeHead.Config(target="zoo:base", target_fingerprint="0" * 64, **fields)
    JudgeHead(config, random_unit(4, bias=0.0, spread=0.3, seed=5)).save(folder)
    return folder / CONFIG, "foretoken_format", lambda: JudgeHead.load(folder)


def vocabulary(folder: Path) -> Case:
    DraftVocabulary(ids=(0, 2), vocab_size=4, target="zoo:base", tokenizer="t", counted={}).save(folder)
    return folder / CONFIG, "foretoken_format", lambda: DraftVocabulary.load(folder)


def datastore(folder: Path) -> Case:
    build([[1, 2, 3]], folder, Manifest(8, "v", "zoo:base"))
    return folder / MANIFEST, "version", lambda: read_manifest(folder)


def calibration(folder: Path) -> Case:
    folder.mkdir()
    path = folder / "sparse.json"
    Calibration(model="zoo:base", fingerprint="0" * 64, num_tokens=1).save(path)
    return path, "format", lambda: Calibration.load(path)


def widths(folder: Path) -> Case:
    folder.mkdir()
    path = folder / "widths.json"
    record = {"format": 1, "algorithm": KIND, "target_fingerprint": "f", "widths": [[1, 2]]}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path, "format", lambda: Widths.load(path, "f")


def plan(folder: Path) -> Case:
    folder.mkdir()
    path = folder / "plan.json"
    record = {"version": plan_file.VERSION, "target": {"name": "n", "fingerprint": "f"}, "chosen": {"method": "none"}}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path, "version", lambda: plan_file._read(path)


def run(folder: Path) -> Case:
    write_claim(folder, {"seed": 1})
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)  # else the run gives way
    return folder / "claim.json", "format", lambda: refuse_another(folder, {"seed": 1})


KINDS = (head, vocabulary, datastore, calibration, widths, plan, run)
FIRST_HAD_NONE = (head, vocabulary, widths, run)


def renumbered(path: Path, key: str, number: int | None) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    del content[key]
    path.write_text(json.dumps(content | ({} if number is None else {key: number})), encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_format_is_refused_with_the_remedy(tmp_path: Path, kind: Callable[[Path], Case]) -> None:
    path, key, read = kind(tmp_path / "it")
    read()
    for number, remedy in ((99, "update foretoken|another format"), (0, "again|another format")):
        renumbered(path, key, number)
        with pytest.raises(ForetokenError, match=remedy) as refused:
            read()
        assert str(tmp_path / "it") in str(refused.value)


@pytest.mark.parametrize("kind", FIRST_HAD_NONE)
def test_a_file_from_before_the_numbers_is_read(tmp_path: Path, kind: Callable[[Path], Case]) -> None:
    path, key, read = kind(tmp_path / "it")
    numbered = path.read_text(encoding="utf-8")
    renumbered(path, key, 99)
    with pytest.raises(ForetokenError):
        read()
    path.write_text(numbered, encoding="utf-8")
    renumbered(path, key, None)
    assert key not in json.loads(path.read_text(encoding="utf-8"))
    read()
