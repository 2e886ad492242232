"""``foretoken analyze acceptance`` as a person runs it: figures that fit together, and mistakes told in one line."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main

MODELS = ("--model", "zoo:draft", "--draft-model", "zoo:draft", "--dtype", "float32", "--threads", "1")


@pytest.fixture
def suite(tmp_path):
    lines = [{"id": f"q{i}", "prompt": text} for i, text in enumerate(("Once upon a time", "2 + 2 =", "The sea is"))]
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_figures_pictures_and_advice(tmp_path, suite, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    arguments = ["analyze", "acceptance", "--threads", "1", "--suite", str(suite), "--temperature", "0.7,1.0"]
    arguments += ["--top-p", "1,0.9", "--num-drafts", "1,2", "--positions", "2", "--max-tokens", "4", "--samples", "4"]
    assert main([*arguments, "--out", "out.json", "--pictures", "."]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "What accepts most" in out
    assert "T=0.7, top_p=0.9, 2 drafts: " in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["provenance"]["command"].startswith("foretoken analyze acceptance")
    assert report["provenance"]["suite"]["num_used"] == 3
    grid = [(each["temperature"], each["top_p"], each["num_drafts"]) for each in report["settings"]]
    assert grid == [(t, p, n) for t in (0.7, 1.0) for p in (1.0, 0.9) for n in (1, 2)]
    for setting in report["settings"]:
        assert setting["num_prompts"] == 3
        assert 3 <= setting["num_positions"] <= 6
        rules = {(row["rule"], row["scheme"]): row for row in setting["rules"]}
        assert (("spechub", "hub") in rules) == (setting["num_drafts"] == 2)
        for row in rules.values():
            assert 0.0 <= row["acceptance"] <= 1.0
            assert row["gap"] == pytest.approx(row["bound"] - row["acceptance"], abs=1e-9)
            assert row["gap"] > (-1e-7 if not row["sampled"] else -0.1)
            assert row["interval"][0] <= row["acceptance"] <= row["interval"][1]
        top = max(row["acceptance"] for name, row in rules.items() if name[0] != "transport")
        assert rules[setting["best"][0]["rule"], setting["best"][0]["scheme"]]["acceptance"] == pytest.approx(
            top, abs=1e-6
        )
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {
        f"{kind}_T{t}_p{p}.png" for kind in ("acceptance", "gap") for t in ("0.7", "1") for p in ("1", "0.9")
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_a_model_that_drafts_for_itself_is_always_accepted_and_a_seed_repeats(tmp_path, suite, capsys):
    arguments = ["analyze", "acceptance", *MODELS, "--suite", str(suite), "--temperature", "1", "--top-p", "1"]
    arguments += ["--num-drafts", "1", "--positions", "2", "--max-tokens", "3", "--out"]
    reports = []
    for name in ("a.json", "b.json"):
        assert main([*arguments, str(tmp_path / name)]) == 0
        reports.append(json.loads((tmp_path / name).read_text()))
    assert reports[0]["settings"] == reports[1]["settings"]
    (setting,) = reports[0]["settings"]
    rows = {row["rule"]: row for row in setting["rules"] if row["scheme"] == "iid"}
    for rule in ("ratio", "recursive", "kseq", "transport"):
        assert rows[rule]["acceptance"] == pytest.approx(1.0, abs=1e-4)
    assert rows["naive"]["acceptance"] < 0.999
    assert "accepts most" in capsys.readouterr().out


@pytest.fixture
def nothing_loads(tmp_path, monkeypatch):
    """An engine that must not be reached."""
    import foretoken

    def refuse(*args, **options):
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(foretoken, "LLM", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temperature 0", "--temperature 0: greedy decoding has nothing to choose"),
        ("--temperature -1", "temperature=-1.0"),
        ("--temperature warm", "--temperature 'warm': write numbers"),
        ("--temperature 1,1.0", "--temperature names 1.0 twice"),
        ("--temperature nan", "temperature=nan"),
        ("--top-p 0", "top_p=0.0"),
        ("--top-p 1.5", "top_p=1.5"),
        ("--num-drafts 0", "--num-drafts 0: give numbers from 1 to 64"),
        ("--num-drafts 65", "--num-drafts 65"),
        ("--num-drafts 1.5", "--num-drafts '1.5': write whole numbers"),
        ("--num-drafts 1,", "--num-drafts '1,'"),
        ("--positions 0", "--positions"),
        ("--samples 0", "--samples"),
        ("--max-tokens 0", "max_tokens=0"),
        ("--seed -1", "seed=-1"),
        ("--model zoo:bse", "did you mean 'base'"),
        ("--draft-model ./nowhere", "there is no such folder"),
        ("--dtype float99", "dtype='float99' is unknown"),
        ("--suite missing.jsonl", "missing.jsonl"),
        ("--suite bad.jsonl", "needs 'prompt' or 'turns'"),
        ("--out nowhere/out.json", "there is no folder nowhere"),
        ("--pictures nowhere", "--pictures nowhere: there is no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_loaded(nothing_loads, capsys, arguments, message):
    code = main(["analyze", "acceptance", *arguments.split()])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2
