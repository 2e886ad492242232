"""``foretoken analyze tradeoff`` as a person runs it: figures that fit together, and mistakes told in one line."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main
from foretoken.planner import costs
from foretoken_lab.studies.tradeoff import modelled

SMALL = ("--dtype", "float32", "--threads", "1", "--max-tokens", "16", "--set", "num_speculative_tokens=4")


@pytest.fixture(autouse=True)
def costs_are_measured_quickly(monkeypatch):
    """Only their place among the figures is looked at."""
    monkeypatch.setattr(modelled, "_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(costs, "STEPS", 1)


def test_figures_picture_and_advice(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    code = main(
        [
            *("analyze", "tradeoff", *SMALL, "--task", "code,profiles", "--limit", "2", "--repeats", "2"),
            *("--rules", "exact,typical,mixture,sprinter", "--knob", "typical.epsilon=0.3,0.02"),
            *("--knob", "mixture.lam=0.5", "--knob", "sprinter.threshold=1,0.3"),
            *("--budget", "0", "--out", str(out), "--picture", str(picture)),
        ]
    )
    text, err = capsys.readouterr()
    assert code == 0, err
    assert "zoo:base with draft_model zoo:draft, float32, temperature 0; 2 code, 2 profiles" in text
    assert "Exact verification is " in text
    assert max(map(len, text.split("Exact verification")[0].splitlines()[1:])) <= 100
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    assert report["provenance"]["command"].startswith("foretoken analyze tradeoff")
    assert report["provenance"]["tasks"]["code"] == {"num_questions": 2, "max_tokens": 16}
    (setting,) = report["settings"]
    assert setting["advice"] in text
    points = {point["label"]: point for point in setting["points"]}
    assert list(points) == [
        *("plain", "draft", "exact", "typical epsilon=0.3", "typical epsilon=0.02", "typical max_distortion=0"),
        *("mixture lam=0.5", "mixture max_distortion=0"),
        *("sprinter threshold=1", "sprinter threshold=0.3", "sprinter max_distortion=0"),
    ]
    for point in points.values():
        assert point["num_questions"] == point["num_judged"] == 4
        assert point["failed"] == 0
        assert point["interval"][0] <= point["accuracy"] <= point["interval"][1]
        for name in ("tokens_per_second", "speed_against_plain", "speed_against_exact"):
            assert 0 < point[name]["low"] <= point[name]["median"] <= point[name]["high"]
            assert point[name]["num_repeats"] == 2
        by_costs = point["speed_against_plain_by_costs"]
        assert (by_costs is None) == (point["label"] == "draft")
        assert by_costs is None or 0.1 < by_costs < 10
    plain, exact, loose = points["plain"], points["exact"], points["mixture lam=0.5"]
    assert plain["tokens_per_step"] == 1.0 < exact["tokens_per_step"] <= loose["tokens_per_step"]
    assert plain["target_calls_per_100_tokens"] == 100.0
    assert points["draft"]["tokens_per_step"] is None
    assert exact["difference"] is None
    # greedy text is the same: plain decoding, exact verification, and every rule that may not stray
    same = (
        "plain",
        *(f"{rule} max_distortion=0" for rule in ("typical", "mixture", "sprinter")),
        "sprinter threshold=1",
    )
    for label in same:
        assert points[label]["difference"]["mean"] == 0.0
        assert points[label]["nll_difference"]["mean"] == pytest.approx(0.0, abs=1e-6)
        assert points[label]["distortion"] == 0.0
    assert loose["distortion"] > 0.0
    assert loose["kl"] is None  # infinite
    # a drafter of its own, at the same target in the same run, with cap and length of its own
    sprint = points["sprinter threshold=0.3"]
    assert sprint["drafter"] == {"method": "sprinter", "model": "zoo:draft"}
    assert exact["drafter"] is None
    assert sprint["target_calls_per_100_tokens"] < points["sprinter threshold=1"]["target_calls_per_100_tokens"]
    assert sprint["distortion"] > 0.0
    # a row through 8 layers of 1,572,864 parameters and a head of 3,145,728, two operations each
    assert plain["flops_per_token"] == 2 * (8 * 1572864 + 3145728)
    assert points["draft"]["flops_per_token"] == 2 * (2 * 405504 + 1572864)
    assert exact["flops_per_token"] > plain["flops_per_token"]
    for front in setting["pareto"].values():
        assert set(front) <= set(points)
        assert front


def test_a_rule_that_does_not_fit_is_left_out_unless_it_was_named(capsys):
    command = ["analyze", "tradeoff", "--method", "suffix", "--threads", "1", "--task", "code", "--limit", "1"]
    command += ["--max-tokens", "4", "--repeats", "1"]
    assert main([*command, "--rules", "tolerance"]) == 2
    assert "verifies chains" in capsys.readouterr().err
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "tolerance tolerance=0.3 left out: verifier='tolerance' verifies chains" in err
    assert "mixture lam" in out
    assert "tolerance" not in out
    assert "draft" not in out.replace("drafts", "")  # there is no model that could stand alone


def test_an_interruption_keeps_complete_rounds(monkeypatch, capsys):
    from foretoken_lab.studies.tradeoff import run as tradeoff_run

    real, calls = tradeoff_run.evaluate, []

    def cut_short(llm, task, examples, *rest, **options):
        calls.append(len(examples))
        if len(calls) == 12:  # 4 of warm-up, a round of 4, and a part of the next repeat
            raise KeyboardInterrupt
        return real(llm, task, examples, *rest, **options)

    monkeypatch.setattr(tradeoff_run, "evaluate", cut_short)
    command = ["analyze", "tradeoff", *SMALL, "--task", "code", "--limit", "1", "--temperature", "1"]
    assert main([*command, "--rules", "mixture", "--knob", "mixture.lam=0.5"]) == 130
    out, err = capsys.readouterr()
    assert "interrupted: only what every point had answered is counted" in out
    assert "One repeat has no range" in out
    assert "Traceback" not in err


@pytest.fixture
def nothing_loads(tmp_path, monkeypatch):
    """An engine that must not be reached."""
    import foretoken

    def refuse(*args, **options):
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(foretoken, "LLM", refuse)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rules typcal", "did you mean 'typical'"),
        ("--rules typical,", "--rules 'typical,': write names"),
        ("--rules typical,typical", "names 'typical' twice"),
        (
            "--rules sprinter+stop=confidnce",
            "stop='confidnce' must be one of 'head', 'confidence': did you mean 'confidence'",
        ),
        ("--rules sprinter+stop=confidence+stop=head", "--rules sprinter+ gives 'stop' twice"),
        ("--rules +stop=head", "write names with commas"),
        ("--rules block", "'block' is lossless"),
        ("--rules sprinter --knob sprinter.threshold=0.5,1.5", "threshold=1.5 must be a number in [0, 1]"),
        ("--rules sprinter --method suffix --model ./x", "--knob sprinter.model=PATH"),
        ("--knob typical=0.1", "write RULE.OPTION=A,B"),
        ("--knob typical.epsilon", "write RULE.OPTION=A,B"),
        ("--knob typical.epsilon=0.1,", "write values with commas"),
        ("--knob typical.epsilon=0.1,0.1", "names a value twice"),
        ("--knob typical.epsilon=0.1 --knob typical.epsilon=0.2", "gives 'typical.epsilon' twice"),
        ("--knob typical.epsilom=0.1", "did you mean 'epsilon'"),
        ("--knob typical.epsilon=1.5", "must be a number in [0, 1]"),
        ("--knob typical.epsilon=0.1,0.2 --knob typical.delta=0.1,0.2", "varies epsilon and delta"),
        ("--knob block.x=1", "not among --rules"),
        ("--rules typical --knob mixture.lam=0.1", "not among --rules"),
        ("--budget much", "--budget 'much': write numbers"),
        ("--budget 2", "--budget: max_distortion=2.0"),
        ("--set verifier=typical", "name lossy rules with --rules"),
        ("--set novalue", "key=value"),
        ("--method none", "drafts nothing"),
        ("--method ngrm", "did you mean 'ngram'"),
        ("--method suffix --draft-model zoo:draft", "does not apply to method 'suffix'"),
        ("--model ./nowhere --draft-model zoo:draft", "no such folder"),
        ("--draft-model zoo:drft", "did you mean 'draft'"),
        ("--task poetry", "unknown task"),
        ("--task code,code", "twice"),
        ("--task gsm8k", "FORETOKEN_DATA"),
        ("--limit 0", "--limit 0"),
        ("--temperature -1", "temperature=-1.0"),
        ("--temperature warm", "--temperature 'warm'"),
        ("--repeats 0", "--repeats"),
        ("--max-tokens 0", "max_tokens=0"),
        ("--seed -1", "seed=-1"),
        ("--dtype float99", "dtype='float99' is unknown"),
        ("--out no/out.json", "there is no folder no"),
        ("--picture no/out.png", "there is no folder no"),
        ("--picture out.pdf", "ends in .png"),
        ("--out a.png --picture a.png", "choose two files"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_loaded(nothing_loads, capsys, arguments, message):
    code = main(["analyze", "tradeoff", *arguments.split()])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2
