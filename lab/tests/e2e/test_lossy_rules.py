"""Every lossy rule at the command line: its budget, its promise in every output, and what it is refused for."""

from __future__ import annotations

import json

import pytest

from foretoken import catalog
from foretoken.cli.main import main
from foretoken_lab.studies.tradeoff.points import knobs_of_rules
from helpers.judges import shelved_judge
from helpers.zoo_llms import PROMPTS, greedy, with_config

RULES = knobs_of_rules()

BUDGET = 0.02
PROMPT = PROMPTS[1]  # every rule strays on it: target and draft are often unsure, and sure now and then
LOSSY = [entry.name for entry in catalog.entries("verifier") if entry.promise == "approximate"]
UNBOUNDED = ("reflective",)  # its divergence is infinite where exact verification of a drawn token is certain
EXACT_AT_0 = ("diffuspec",)  # its bias is of draws only
FEW = (*UNBOUNDED, *EXACT_AT_0, "typical")  # one of each kind, for what takes seconds
every_rule = pytest.mark.parametrize("rule", LOSSY)
more = pytest.mark.full_product


def recipe(rule, *, loose=True):
    """The options that choose a rule, loose enough that it strays."""
    entry = RULES[rule]
    method = ["--method", "draft_model", "--set", f"verifier={rule}", "--set", "num_speculative_tokens=4"]
    if entry.drafter is not None:
        method = ["--method", entry.drafter, "--set", f"verifier={rule}"]
    if rule == "judge":
        method += ["--set", f"head={shelved_judge(bias=8.0)}"]  # it says yes to all; a trained one may be anything
    return [*method, "--set", f"{entry.option}={entry.values[-1]}"] if loose else method


@pytest.fixture
def loaded(monkeypatch):
    """The commands' engine is the one that the other tests have loaded."""
    import foretoken

    monkeypatch.setattr(
        foretoken, "LLM", lambda model, speculative_config=None, **options: with_config(speculative_config)
    )


@pytest.fixture
def nothing_loads(monkeypatch):
    from foretoken.engine import llm

    def refuse(*args, **options):
        raise AssertionError("the model was loaded before the recipe was checked")

    monkeypatch.setattr(llm, "LLM", refuse)


def generate(capsys, rule, *more):
    typed = ["generate", PROMPT, "--raw", "--max-tokens", "24", "--ignore-eos", "--seed", "1", "--json"]
    assert main([*typed, *recipe(rule), *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.covering(1)
@every_rule
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_budget_holds_and_binds(loaded, capsys, rule, temperature):
    free = generate(capsys, rule, "--temperature", temperature)
    held = generate(capsys, rule, "--temperature", temperature, "--set", f"max_distortion={BUDGET}")
    none = generate(capsys, rule, "--temperature", temperature, "--set", "max_distortion=0")
    assert {each["promise"] for each in (free, held, none)} == {"approximate"}
    assert 0.0 <= held["distortion"] <= BUDGET + 1e-9
    if temperature == "0" and rule in EXACT_AT_0:
        assert (free["distortion"], free["token_ids"]) == (0.0, greedy(PROMPT, 24))
        return
    assert free["distortion"] > BUDGET
    assert (none["distortion"], none["kl"]) == (0.0, 0.0)
    assert free["kl"] is None if temperature == "0" or rule in UNBOUNDED else free["kl"] > 0.0
    if temperature == "0":
        plain = greedy(PROMPT, 24)
        assert none["token_ids"] == plain
        assert free["token_ids"] != plain


@pytest.mark.parametrize("rule", [rule if rule in FEW else pytest.param(rule, marks=more) for rule in LOSSY])
def test_eval_says_approximate_and_how_far(loaded, capsys, rule):
    limit = "8" if rule in UNBOUNDED else "4"  # enough that every rule strays
    task = ["--task", "keys", "--limit", limit, "--max-tokens", "32"]
    assert main(["eval", *task, *recipe(rule), "--temperature", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["promise"] == "approximate"
    assert report["distortion"] > 0.0
    assert report["kl"] is None if rule in UNBOUNDED else report["kl"] > 0.0
    task[3] = limit if rule in UNBOUNDED else "2"
    assert main(["eval", *task, *recipe(rule)]) == 0
    out = capsys.readouterr().out
    assert "approximate" in out
    strays = rule not in EXACT_AT_0  # at temperature 0
    assert ("distortion" in out) == strays
    assert ("and KL inf per token" in out) == strays


@every_rule
def test_what_only_the_target_can_say_is_refused(loaded, capsys, rule):
    assert main(["generate", "x", *recipe(rule), "--logprobs", "2", "--json"]) == 2
    err = capsys.readouterr().err
    assert f"logprobs=2 with verifier='{rule}'" in err
    assert "leave one of them out" in err


@every_rule
@pytest.mark.parametrize("method", [None, "draft_model", "suffix"])
def test_there_is_no_certificate(nothing_loads, capsys, rule, method):
    typed = recipe(rule, loose=False) if method is None else ["--method", method, "--set", f"verifier={rule}"]
    assert main(["certify", *typed, "--quick"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"verifier='{rule}' is approximate by design" in err
    drafter = RULES[rule].drafter if method is None else method
    own = drafter is not None and catalog.find(drafter, "drafter").load().declared.own_verifier == rule
    assert ("use verifier='auto'" if own else "leave the verifier out") in err
