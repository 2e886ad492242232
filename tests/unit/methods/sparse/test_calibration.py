"""A calibration: a file that is read as it was written, and that fits one model only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foretoken import zoo
from foretoken.core.errors import ConfigError, MismatchError, ModelError
from foretoken.methods.sparse import calibration
from foretoken.methods.sparse.calibration import Anchors, Calibration, Sparsity, Thresholds
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.load import load
from helpers.tiny_models import save_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return load(save_model("llama", tmp_path_factory.mktemp("dense")), dtype="float32")


def full(target, **changes):
    fields = {
        "model": "m",
        "fingerprint": fingerprint_of(target.source),
        "num_tokens": 7,
        "ffn": (Sparsity(tau=0.1, row=0.2, union={1: 0.2, 8: 0.1}, tiles={1: 0.0, 8: 0.0}),),
        "moe": Thresholds(num_chosen=3, beta={0: (0.1, 0.2), 2: (0.3, 0.4)}),
        "attention": Anchors(
            layers=(0, 1),
            theta=0.7,
            jaccard=((1.0, 0.5), (0.5, 1.0)),
            jaccard_of_layers=((1.0, 0.8), (0.8, 1.0)),
            settings={"block": 64},
            caught={"exact": {"root": 0.9, "draft": 0.5}},
        ),
        "provenance": {"command": "c"},
    }
    return Calibration(**{**fields, **changes})


def test_the_file_comes_back_as_it_went(dense, tmp_path):
    path = tmp_path / "sparse.json"
    for written in (full(dense), full(dense, ffn=(), moe=None, attention=None)):
        written.save(path)
        assert Calibration.load(path) == written
        assert calibration.find(dense, path) == written


def test_a_calibration_next_to_the_weights_is_found(dense, tmp_path):
    assert calibration.find(dense, None) is None
    place = calibration.default_path(dense)
    full(dense).save(place)
    try:
        assert calibration.find(dense, None) == full(dense)
        full(dense, fingerprint="0" * 64).save(place)
        with pytest.raises(MismatchError, match=r"made for 'm' \(fingerprint 0000.*as it is now: make one with"):
            calibration.find(dense, None)
    finally:
        place.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"fingerprint"', '"fingrprint"'),
        lambda text: text.replace('"row": 0.2', '"row": 2'),
        lambda text: text.replace('"row": 0.2', '"row": null'),
        lambda text: text.replace("0.3,", "-0.3,"),
        lambda text: text.replace("0.3,", "NaN,"),
        lambda text: text.replace('"layers": [\n   0,\n   1', '"layers": [\n   1,\n   0'),
        lambda text: text.replace("0.8,\n    1.0", "0.8"),
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_refused(damage, dense, tmp_path):
    path = tmp_path / "sparse.json"
    full(dense).save(path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ModelError, match=r"sparse\.json: the calibration cannot be read"):
        Calibration.load(path)


def test_a_missing_file_is_reported(dense, tmp_path):
    with pytest.raises(ModelError, match="there is no such calibration file"):
        calibration.find(dense, str(tmp_path / "none.json"))


def test_the_speedup_is_that_of_the_weights_read():
    each = Sparsity(tau=1.0, row=0.5, union={1: 0.5}, tiles={1: 0.25})
    assert each.speedup(1) == pytest.approx(3 / (1 + 0.75 + 0.5))
    assert math.isclose(Sparsity(tau=1.0, row=0, union={1: 0.0}, tiles={1: 0.0}).speedup(1), 1.0)


def test_a_threshold_is_swept_over_what_the_file_says_of_such_sets(dense):
    """Layers 1 and 2 agree as layers and not head by head; layer 3 has a window, and picks nothing."""
    heads = ((1.0, 0.2, 0.3, 0.0), (0.2, 1.0, 0.4, 0.0), (0.3, 0.4, 1.0, 0.0), (0.0,) * 4)
    layers = ((1.0, 0.6, 0.5, 0.0), (0.6, 1.0, 0.8, 0.0), (0.5, 0.8, 1.0, 0.0), (0.0,) * 4)
    known = Anchors(layers=(0, 1, 2), theta=0.7, jaccard=heads, jaccard_of_layers=layers, settings={})
    found = full(dense, attention=known)
    assert list(found.anchors_for(4)) == [0, 1, 2]
    assert found.anchors_for(4, "global", 0.4) == [0, 1]
    assert found.anchors_for(4, "per_layer") == [0, 1]
    assert found.anchors_for(4, "per_layer", 0.9) == [0, 1, 2]
    assert found.anchors_for(4, "per_layer", 0.0) == [0, 1]  # the first two in any case
    older = full(dense, attention=replace(known, jaccard_of_layers=()))
    with pytest.raises(ConfigError, match=r"older than attention=per_layer.*make one with 'foretoken calibrate sparse"):
        older.anchors_for(4, "per_layer")


@pytest.mark.parametrize("name", ["moe", "long"])
def test_the_zoos_own_calibrations_fit_their_models(name):
    folder = zoo.path(name)
    found = Calibration.load(folder / calibration.FILE)
    assert found.fingerprint == fingerprint(folder), "the weights are newer: run foretoken calibrate sparse again"
    assert found.model == f"zoo:{name}"
    assert (found.moe is not None) == (name == "moe")
    assert (found.attention is not None) == (name == "long")
    assert found.num_tokens >= 40_000
    assert "/" not in found.provenance["files"][0]
