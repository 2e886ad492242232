"""The folder of a draft vocabulary: it is read as it was written, and a damaged one is refused by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.drafting.draft_vocabulary import CONFIG, MAPS_FILE, DraftVocabulary, find
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.load import load
from helpers.adapters import shelf
from helpers.tiny_models import VOCAB_SIZE, save_model


def model() -> Any:
    return load(save_model("llama", shelf() / "draft-vocabulary"), device="cpu")


def kept(**changes: Any) -> DraftVocabulary:
    return DraftVocabulary(**{"ids": [2, 5, 6, 90], "vocab_size": VOCAB_SIZE, "tokenizer": "", **changes})


def test_a_written_vocabulary_is_read_back(tmp_path: Path) -> None:
    before = kept(tokenizer="abc", target="zoo:base", context_rows=7, counted={"coverage": 0.5})
    before.save(tmp_path / "new" / "folder")
    assert DraftVocabulary.load(tmp_path / "new" / "folder") == before
    maps = load_file(tmp_path / "new" / "folder" / MAPS_FILE)
    assert (torch.arange(4) + maps["d2t"]).tolist() == [2, 5, 6, 90]
    assert maps["t2d"].nonzero()[:, 0].tolist() == [2, 5, 6, 90]


@pytest.mark.parametrize("owner", [{"verifier": {"name_or_path": None}}, {"verifier": None}, "me"], ids=str)
def test_the_maps_of_an_eagle_3_head_are_a_vocabulary(owner: Any, tmp_path: Path) -> None:
    """Its folder says nothing of a tokenizer, its config nests the model's, and there are weights next to the maps."""
    kept().save(tmp_path)
    tensors = {**load_file(tmp_path / MAPS_FILE), "fc.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / MAPS_FILE)
    settings = {"speculators_model_type": "eagle3", "draft_vocab_size": 4, "speculators_config": owner}
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    found = find(tmp_path, model())
    assert found is not None
    assert list(found.ids) == [2, 5, 6, 90]


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        settings = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**settings, **changes}))

    return spoil


def spoil_maps(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = {**load_file(folder / MAPS_FILE), **{name: torch.tensor(value) for name, value in changes.items()}}
        save_file({name: value for name, value in tensors.items() if value.numel()}, folder / MAPS_FILE)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "has no config.json; make one with 'foretoken calibrate vocab"),
        (lambda folder: (folder / MAPS_FILE).unlink(), "has no model.safetensors"),
        (lambda folder: (folder / CONFIG).write_text("[1]"), "config.json is no object"),
        (lambda folder: (folder / CONFIG).write_text("{"), "draft_vocab="),
        (lambda folder: (folder / MAPS_FILE).write_bytes(b"\0" * 20), "draft_vocab="),
        (spoil_maps(d2t=[]), "has no 'd2t'"),
        (spoil_maps(t2d=[]), "has no 't2d'"),
        (spoil_maps(d2t=[0.5, 1.0]), r"d2t is \[2\] of torch.float32"),
        (spoil_maps(t2d=[True] * VOCAB_SIZE), "t2d marks other tokens than those that d2t leads to"),
        (spoil_maps(d2t=[5, 1, 3, 87]), "d2t leads to tokens that do not increase"),
        (spoil_maps(d2t=[2, 4, 4, 200]), f"d2t leads to tokens 2 to 203, of {VOCAB_SIZE}"),
        (spoil_maps(d2t=[2, 4, 5, 87]), "t2d marks other tokens than those that d2t leads to"),
        (spoil_config(draft_vocab_size=5), r"d2t is \[4\] of torch.int64: integers, \[5\]"),
        (spoil_config(vocab_size=77), rf"t2d is \[{VOCAB_SIZE}\] of torch.bool: bool, \[77\]"),
        (spoil_config(context_rows=-1), "context_rows=-1 must be"),
    ],
)
def test_a_damaged_folder_is_refused_by_field(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    kept().save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        find(tmp_path, model())


def test_more_tokens_than_there_are_is_refused_by_field(tmp_path: Path) -> None:
    kept().save(tmp_path)
    spoil_maps(d2t=[0] * 5, t2d=[True] * 4)(tmp_path)
    spoil_config(draft_vocab_size=5, vocab_size=4)(tmp_path)
    with pytest.raises(ModelError, match="d2t leads to tokens 0 to 4, of 4"):
        DraftVocabulary.load(tmp_path)


def test_another_tokenizer_s_ids_are_refused(tmp_path: Path) -> None:
    kept(tokenizer="0123456789abcdef").save(tmp_path / "other")
    with pytest.raises(MismatchError, match="the field tokenizer=0123456789ab"):
        find(tmp_path / "other", model())
    kept(tokenizer=vocabulary_fingerprint(model().tokenizer)).save(tmp_path / "own")
    assert find(tmp_path / "own", model()) is not None
    kept(vocab_size=VOCAB_SIZE + 1).save(tmp_path / "unknown")
    with pytest.raises(MismatchError, match=f"vocab_size={VOCAB_SIZE + 1}, but"):
        find(tmp_path / "unknown", model())


def test_another_model_s_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="another model lies there"):
        kept().save(tmp_path)
    assert not (tmp_path / MAPS_FILE).exists()
