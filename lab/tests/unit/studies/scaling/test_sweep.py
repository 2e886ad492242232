"""The sweep over scripted heads: which are made, what survives a kill, and what the study makes of known points."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from foretoken.core.errors import ForetokenError
from foretoken_lab.studies.scaling import points, speed, sweep
from foretoken_lab.studies.scaling.laws import contradictions
from foretoken_lab.studies.scaling.pictures import draw
from foretoken_lab.studies.scaling.points import Point, Timed
from foretoken_lab.studies.scaling.study import study
from foretoken_lab.studies.scaling.sweep import Sweep

TOKENS, LAYERS, BATCHES, NODES = (1000, 2000, 4000, 8000), (1, 2, 3, 4), (1, 2, 4, 8), (2, 8)


def accepted(layers, trained, nodes):
    """The distributions that are planted."""
    return 0.3 * math.log(trained / 1e9) + 0.7 * math.log(layers) + 6 + 0.1 * nodes


def seconds(layers, batch, nodes):
    """Drafting, and the whole step."""
    draft = nodes and 0.001 * batch + 0.002 * layers
    return draft, draft + 0.01 + 0.001 * batch * nodes


def swept(**changes):
    fields = {
        "target": "it", "target_fingerprint": "0", "tokens": TOKENS, "layers": LAYERS, "batches": BATCHES,
        "nodes": NODES, "max_depth": 6, "width": 8, "draft_vocab_size": None, "mlp_width": None, "prompts": "3",
        "answer": 8, "repeats": 2, "text": ("mine",), "seed": 0, "dtype": "float32", "threads": 1,
    }  # fmt: skip
    return Sweep(**{**fields, **changes})


@pytest.fixture
def script(monkeypatch):
    """Untrained heads, and invented drafts; every call is counted."""
    calls = SimpleNamespace(trained=[], measured=[], fail=None)

    def train(shape, sources, folder, *, bounds, **options):
        if calls.fail == (shape.layers, bounds.tokens):
            raise KeyboardInterrupt
        calls.trained.append((shape.layers, bounds.tokens))
        folder.mkdir(exist_ok=True)
        return {"parameters": 1000 * shape.layers, "tokens": bounds.tokens + 24}

    def measure(llm, config, prompts, *, batches, nodes, tokens, repeats):
        layers, trained = (int(each[1:]) for each in str(config.head).rpartition("/")[2].split("-"))
        calls.measured.append((layers, trained, batches, nodes))
        timed = []
        for batch in batches:
            for k in (0, *nodes):
                draft, step = seconds(layers, batch, k)
                rate = batch * (accepted(layers, trained + 24, k) if k else 1.0) / step
                steps = {"step_seconds": step, "draft_seconds": draft, "tokens_per_second": rate}
                timed.append({"batch": batch, "nodes": k, **steps})
        gains = {"0": 1.0, **{str(k): accepted(layers, trained + 24, k) for k in nodes}}
        return {"accepted": gains, "recorded_tokens": 50, "measured": timed}

    monkeypatch.setattr(sweep, "training", lambda options: options)
    monkeypatch.setattr(sweep, "train", train)
    monkeypatch.setattr(sweep, "measure", measure)
    return calls


def run(out, **changes):
    return sweep.run(swept(**changes), None, [[1]], [], out)


def test_heads_that_are_made(script, tmp_path):
    found = run(tmp_path)
    assert [(each.layers, each.tokens) for each in found] == [
        (1, 1000), (1, 2000), (1, 4000), (1, 8000), (2, 8000), (3, 8000), (4, 8000),
    ]  # fmt: skip
    assert script.measured[0] == (1, 1000, (1,), (8,))  # timed are those of the most tokens
    assert script.measured[3] == (1, 8000, BATCHES, NODES)
    assert {each.most for each in found} == {8}


def test_a_killed_sweep_goes_on(script, tmp_path):
    script.fail = (2, 8000)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(script.trained) == 4
    script.fail = None
    again = run(tmp_path)
    assert len(script.trained) == 7  # none twice
    script.trained.clear()
    assert run(tmp_path) == again
    assert script.trained == []
    with pytest.raises(ForetokenError, match="holds a sweep with another batches, seed"):
        run(tmp_path, seed=1, batches=(1,))
    point = tmp_path / "points" / "D2-T8000.json"
    whole = point.read_text()
    for damaged in ('{"layers": 2}', whole.replace('"layers": 2', '"layers": 3'), whole.replace("50", "NaN")):
        point.write_text(damaged)
        with pytest.raises(ForetokenError, match=r"D2-T8000\.json: cannot be read .*; remove it, it is measured again"):
            run(tmp_path)
    point.unlink()
    assert run(tmp_path) == again
    for damaged in ("{", "[]", "\xff"):
        (tmp_path / points.SWEEP).write_text(damaged, encoding="latin-1")
        with pytest.raises(ForetokenError, match=r"sweep\.json: cannot be read .*; name another --out"):
            run(tmp_path)


def test_a_sweep_that_was_killed_before_it_began(script, tmp_path, monkeypatch):
    """Nothing lies in its folder that would make it another's."""

    def killed(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(points, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "sweep")
    assert len(run(tmp_path / "sweep")) == 7


def test_planted_scaling_laws_are_found_from_the_raw_points(script, tmp_path):
    found = study(run(tmp_path), 1, 8000)
    assert found.fits["data"].a == pytest.approx(0.3)
    assert found.fits["data"].xs == tuple(each + 24 for each in TOKENS)  # what was really read
    assert found.fits["data"].b == pytest.approx(6.8)
    assert found.fits["capacity"].a == pytest.approx(0.7)
    assert set(found.fits) == {"data", "capacity", "batch"}
    assert not found.left_out
    stored = json.loads(json.dumps(found.fields()))
    assert all(contradictions(fit) == [] for fit in stored["fits"].values())
    raw = study([points.point_of(each) for each in stored["points"]], 1, 8000)
    assert raw.fits == found.fits
    # of eight requests two nodes are the fastest: 8 A / t
    draft, step = seconds(1, 8, 2)
    assert found.fits["batch"].ys[-1] == pytest.approx(8 * accepted(1, 8024, 2) / step)
    assert draft < step


def test_the_speed_model(script, tmp_path):
    """Times that are linear in D are met; the deepest head accepts most, and is not the fastest everywhere."""
    found = study(run(tmp_path), 1, 8000).speed
    assert found.error == pytest.approx(0, abs=1e-9)
    assert len(found.settings) == 4 * len(BATCHES) * len(NODES)
    for each in found.best:
        assert each["predicted"]["layers"] == each["measured"]["layers"]
        assert each["plain"] == pytest.approx(each["batch"] / seconds(1, each["batch"], 0)[1])
    crooked = []
    for layers in (1, 2, 3):
        draft = 0.01 * (layers == 2)
        timed = Timed(
            batch=1, nodes=4, step_seconds=0.02 + draft, draft_seconds=draft, tokens_per_second=2 / (0.02 + draft)
        )
        crooked.append(Point(layers, 1, 1, 1, {4: 2.0}, 1, (timed,)))
    assert speed.model(crooked).error > 0.05  # planted: no line goes through these


def test_too_few_points_give_no_scaling_law(script, tmp_path):
    found = study(run(tmp_path, layers=(1, 2), batches=(1,)), 1, 8000)
    assert set(found.fits) == {"data"}
    assert found.left_out == {
        "capacity": "2 different points of 2: 4 at least are needed",
        "batch": "1 different points of 1: 4 at least are needed",
    }


def test_pictures(script, tmp_path):
    pytest.importorskip("matplotlib")
    five = run(tmp_path / "a", tokens=(500, *TOKENS))
    assert draw(study(five, 1, 8000), "it").startswith(b"\x89PNG")
    few = run(tmp_path / "b", layers=(1,), tokens=(8000,))
    assert draw(study(few, 1, 8000), "it").startswith(b"\x89PNG")
