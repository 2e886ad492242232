"""A recipe is refused at construction, with the remedy, or it runs."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import zoo
from foretoken.core.draft import Approvals, Draft, GreedyLaws, PointMass, Sampled
from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.needs import Needs, Offers
from foretoken.core.protocols import PlanMaker, Verifier
from foretoken.core.tree import EMPTY_TREE, TokenTree
from foretoken.engine import compose
from foretoken.engine.recipe import Recipe
from foretoken.forward.dense import DensePlans
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.match import MatchVerifier
from foretoken_lab import testing as stubs
from helpers.variants import cases
from helpers.zoo_llms import target, with_config

GREEDY, SAMPLING = SamplingParams(), SamplingParams(temperature=1.0)
DRAFT = {"method": "draft_model", "model": "zoo:draft"}


def build(**settings):
    return with_config(settings).recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ngram", "odd": 1}, "unknown option 'odd' for method 'ngram'(?!.*an option of verifier)"),
        ({"method": "ngram", "ngram.prompt_lookup_max": 3, "prompt_lookup_max": 3}, "are one option: keep one"),
        (
            {"method": "ngram", "epsilon": 0.1},
            r"method 'ngram' \(an option of verifier 'typical'.*: add verifier=\.\.\.\)",
        ),
        ({"method": "ngrm"}, "unknown method 'ngrm': did you mean 'ngram'"),
        ({"method": "greedy"}, "unknown method 'greedy'"),
        ({"method": ""}, "unknown method ''"),
        ({"method": "NGRAM"}, "did you mean 'ngram'"),
        ({"method": 3}, r"method=3 is neither a name nor a drafter \(Config, adapt, attach, branches, …\): give"),
        ({"method": stubs.Empty}, "it is a class"),
        ({"method": stubs.Empty(), "length": 3}, "unknown option 'length'"),
        ({"method": "ngram", "verifier": "blck"}, "unknown verifier 'blck': did you mean 'block'"),
        ({"method": "ngram", "verifier": "suffix"}, "unknown verifier 'suffix': that is a method: write method=suffix"),
        ({"method": "typical"}, "unknown method 'typical': that is a verifier: write verifier=typical"),
        ({"method": "ngram", "verifier": 7}, "verifier=7 is neither a name nor a verifier"),
        ({"method": "ngram", "prompt_lookup_mx": 3}, "did you mean 'prompt_lookup_max'"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "model": "zoo:draft"}, "unknown option 'model' for method 'ngram'"),
        ({"method": "none", "prompt_lookup_max": 3}, "unknown option 'prompt_lookup_max'"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "lower one or raise the other"),
        ({"method": "suffix", "min_match": 9, "max_match": 3}, "lower one or raise the other"),
        ({"method": "draft_model", "model": ""}, "name the draft checkpoint"),
        ({**DRAFT, "tree": "binary"}, "tree='binary' must be one of 'chain', 'coupled', 'topk'"),
        ({**DRAFT, "num_drafts": 0}, "num_drafts=0"),
        ({**DRAFT, "tree": "topk", "verifier": "ratio"}, "verifies chains, but method 'draft_model'"),
        ({"method": "suffix", "verifier": "block"}, "use verifier='recursive' or 'match'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)


@pytest.mark.parametrize("count", [-1, 257, 2.5, "six", True, [3]])
def test_num_speculative_tokens_must_be_a_sensible_integer(count):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=.* between 0 and 256"):
        build(method="ngram", num_speculative_tokens=count)


@pytest.mark.parametrize(
    ("settings", "message"), [({"method": "none"}, "with method 'none'.*'suffix'"), ({}, "without a method.*'suffix'")]
)
def test_a_draft_length_without_a_drafter_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings, num_speculative_tokens=4)


@pytest.mark.parametrize("settings", ["ngram", [("method", "ngram")], 5])
def test_a_config_that_is_no_mapping_is_refused(settings):
    with pytest.raises(ConfigError, match="must be a mapping"):
        compose.build(settings, target())


@pytest.mark.parametrize(
    ("settings", "method", "num_nodes", "adaptive"),
    [
        ({}, "none", 0, False),
        ({"model": "zoo:draft"}, "auto", 16, True),
        ({"model": "zoo:draft", "num_speculative_tokens": 4}, "auto", 4, False),
        ({"model": "zoo:draft", "dtype": "int8"}, "draft_model", 16, True),
        ({"model": "zoo:draft", "verifier": "kseq"}, "draft_model", 16, True),
        ({"method": "ngram", "num_speculative_tokens": 0}, "ngram", 0, False),
        ({"method": "ngram", "num_speculative_tokens": 256}, "ngram", 256, False),
        ({"method": "ngram", "num_speculative_tokens": "auto"}, "ngram", 16, True),
        ({"method": "none", "num_speculative_tokens": 0}, "none", 0, False),
        ({"method": "none", "num_speculative_tokens": "auto"}, "none", 0, False),
    ],
)
def test_lengths_and_defaults(settings, method, num_nodes, adaptive):
    recipe = build(**settings)
    assert (recipe.method, recipe.num_nodes, recipe.adaptive) == (method, num_nodes, adaptive)


@pytest.mark.parametrize("method", ["draft_model", "suffix_first", "rasd"])
def test_the_bundled_draft_is_found_for_the_bundled_target_and_for_no_other(method, monkeypatch):
    found = build(method=method).drafter
    assert getattr(found, "_inner", found).config.model == "zoo:draft"
    monkeypatch.setattr(target(), "name", "zoo:moe")
    with pytest.raises(ConfigError, match=r"needs a (draft )?checkpoint"):
        build(method=method)


def test_every_drafter_of_the_catalogue_can_be_an_instance():
    for case in {case.entry.name: case for case in cases()}.values():
        drafter_class = case.entry.load()
        config = drafter_class.Config(**case.options(target()))
        recipe = compose.build({"method": drafter_class(config, target()), "verifier": MatchVerifier()}, target())
        assert recipe.method == case.entry.name


def test_a_rule_that_is_not_valid_for_the_drafts_is_refused():
    class PointsOnly(MatchVerifier):
        laws = (PointMass,)

    with pytest.raises(ConfigError, match="not valid for drafts of kind Sampled"):
        compose.build({"method": with_config(DRAFT).recipe.drafter, "verifier": PointsOnly()}, target())


def test_the_default_rule_is_the_strongest_that_fits():
    recipe = build(method="ngram")
    chain, tree = TokenTree([1]), TokenTree([1, 2], [-1, -1])
    drawn = Sampled(torch.full((1, 4), 0.25), (0, 0))
    assert recipe.verifier_for(Draft(chain), GREEDY).name == "greedy"
    assert recipe.verifier_for(Draft(chain), SAMPLING).name == "match"
    assert recipe.verifier_for(Draft(EMPTY_TREE), SAMPLING).name == "match"
    assert recipe.verifier_for(Draft(chain, drawn), SAMPLING).name == "block"
    assert recipe.verifier_for(Draft(tree, drawn), SAMPLING).name == "kseq"
    assert recipe.verifier_for(Draft(chain), GREEDY) is recipe.verifier_for(Draft(tree), GREEDY)  # made once
    assert build(method="ngram", verifier="ratio").verifier_for(Draft(chain), SAMPLING).name == "ratio"


@pytest.mark.parametrize(
    ("settings", "greedy", "sampling"),
    [
        ({}, "same text", "same stream"),
        ({"method": "ngram"}, "same text", "same stream"),
        ({"method": "ngram", "verifier": "block"}, "same text", "same distribution"),
        (DRAFT, "same text", "same distribution"),
        ({**DRAFT, "tree": "topk"}, "same text", "same stream"),
        ({**DRAFT, "verifier": "match"}, "same text", "same stream"),
    ],
)
def test_promises(settings, greedy, sampling):
    recipe = build(**settings)
    assert recipe.promise_for(GREEDY) == greedy
    assert recipe.promise_for(SAMPLING) == sampling


def test_the_greedy_rule_refuses_to_sample():
    llm = with_config({"method": "ngram", "verifier": "greedy"})
    with pytest.raises(ConfigError, match=r"cannot honour temperature=0\.7"):
        llm.generate("x", SamplingParams(temperature=0.7))
    assert not llm.engine.busy


def test_a_draft_with_another_vocabulary_is_refused(tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(zoo.path("draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[500:502]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(MismatchError, match=r"has another vocabulary than .*zoo:base"):
        build(method="draft_model", model=str(folder), vocabulary="same")
    assert "shared" in build(method="draft_model", model=str(folder)).drafter.explanation


# ---------------------------------------------------------------- what a recipe says of a request, without a model


class Rule(MatchVerifier):
    """A rule that says of itself what a test wants."""

    def __init__(self, promise: str = "same distribution", **said: Any) -> None:
        self.name, self.promise = "rule", promise
        self.needs = Needs(evidence=said.pop("evidence", None))
        self.offers = Offers(**said)


def of(verifier: Verifier | None, plan: PlanMaker | None = None) -> Recipe:
    return Recipe("stub", stubs.Stub(), verifier, 4, False, False, plan or DensePlans())


def test_evidence_is_required_where_the_rule_decides_by_it():
    assert of(None).evidence_for(GREEDY) is None
    assert of(Rule()).evidence_for(GREEDY) is None
    always, greedy = of(Rule(evidence=Approvals)), of(Rule(evidence=GreedyLaws))
    assert always.evidence_for(GREEDY) is always.evidence_for(SAMPLING) is Approvals
    assert greedy.evidence_for(GREEDY) is GreedyLaws
    assert greedy.evidence_for(SAMPLING) is None
    greedy.check(SAMPLING)
    with pytest.raises(ConfigError, match="cannot honour temperature=0"):
        greedy.check(GREEDY)


def test_drafts_follow_from_a_request_s_own_past_where_others_would_change_what_its_seed_gives():
    seeded = SamplingParams(temperature=1.0, seed=1)
    assert of(Rule()).history_only(seeded)
    assert not of(Rule()).history_only(SAMPLING)
    assert not of(Rule("same stream")).history_only(seeded)
    assert of(Rule("same stream", takes_turns=True)).history_only(GREEDY)


def test_an_approximate_recipe_gives_its_reason_and_no_log_probabilities():
    class Sparse(DensePlans):
        exact, reason = False, "verification.x=1"

    for recipe, why in ((of(Rule("approximate")), "verifier='rule'"), (of(Rule(), Sparse()), "verification.x=1")):
        assert recipe.promise_for(GREEDY) == recipe.promise_for(SAMPLING) == "approximate"
        assert recipe.why_approximate == why
        recipe.check(GREEDY)
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ConfigError, match=f"{name}=0 with {why}"):
                recipe.check(SamplingParams(**{name: 0}))
    assert of(Rule()).why_approximate == of(None).why_approximate == ""
    of(Rule()).check(SamplingParams(logprobs=0))
    assert of(Rule()).reuses_prefixes
    assert not of(Rule(), Sparse()).reuses_prefixes


def test_a_rule_gets_the_evidence_that_it_decides_by_or_is_refused():
    class Approving(stubs.Stub):
        offers = Offers(evidence=(Approvals,))

    asking = Rule(evidence=Approvals)
    assert compose.build({"method": Approving(), "verifier": asking}, target()).verifier is asking
    with pytest.raises(ConfigError, match=r"decides by what the drafter's own head approves of.*carry none"):
        compose.build({"method": stubs.Stub(), "verifier": asking}, target())
    asking.name = "sprinter"  # which a method of the catalogue brings
    with pytest.raises(ConfigError, match="carry none: use method='sprinter', or another verifier"):
        compose.build({"method": stubs.Stub(), "verifier": asking}, target())
    compose.build({"method": stubs.Stub(), "verifier": Rule(evidence=GreedyLaws)}, target())  # needed at 0 only


def test_a_drafter_that_takes_turns_is_given_one():
    settings = {"method": stubs.Stub(), "verifier": Rule(takes_turns=True)}
    assert compose.build({**settings, "num_speculative_tokens": 1}, target()).num_nodes == 1
    with pytest.raises(ConfigError, match="leaves no turn to the drafter"):
        compose.build({**settings, "num_speculative_tokens": 0}, target())
    assert compose.build({"method": stubs.Stub(), "verifier": Rule(), "num_speculative_tokens": 0}, target())
    assert with_config(settings).engine.scheduler.drafted_first  # the first token may be the drafter's
    assert not with_config({**settings, "verifier": Rule()}).engine.scheduler.drafted_first


def test_a_stop_rule_of_its_own_is_not_the_controller_s():
    """Nor may the controller leave a request without drafts where its text would be another one."""

    class Own(stubs.Stub):
        offers = Offers(length=7)

    class Always(stubs.Stub):
        offers = Offers(length=7, may_skip_drafting=False)

    for drafter, verifier, weighed in (
        (Own(), None, True),
        (Own(), Rule(), True),
        (Own(), Rule("approximate"), False),
        (Always(), None, False),
    ):
        recipe = compose.build({"method": drafter, "verifier": verifier}, target())
        assert (recipe.num_nodes, recipe.adaptive, recipe.may_skip_drafting) == (7, False, weighed)
    counted = compose.build({"method": Own(), "num_speculative_tokens": 3}, target())
    assert (counted.num_nodes, counted.adaptive, counted.may_skip_drafting) == (3, False, False)


class Maker(DensePlans):
    """A plan that records its arguments."""

    settings_key = ""

    def __init__(self, given: Any, base: Any = None) -> None:
        self.given, self.base = given, base

    @classmethod
    def arranged(cls, settings, target):
        return cls(dict(settings))

    def over(self, base):
        return type(self)(self.given, base)


class States(Maker):
    name = "states"

    @classmethod
    def suits(cls, target):
        return target.name == "hybrid"


class Wide(Maker):
    name = "wide"


class Sparse(Maker):
    name, settings_key = "sparse", "verification"


@pytest.fixture
def plans(monkeypatch):
    """A plan for one kind of target, one that is chosen by name, and one that is chosen by settings."""
    entries = [SimpleNamespace(name=each.name, load=lambda each=each: each) for each in (States, Wide, Sparse)]
    monkeypatch.setattr(compose.catalog, "entries", lambda kind: {"plan": entries}[kind])
    return lambda name, **settings: compose.plan_of(settings, SimpleNamespace(name=name))


def test_a_plan_is_the_target_s_or_the_requested_one(plans):
    assert type(plans("plain")) is type(plans("plain", plan="dense")) is DensePlans
    assert type(plans("hybrid")) is type(plans("hybrid", plan="states")) is States
    assert type(plans("plain", plan="wide")) is Wide
    for own in ("plain", "hybrid"):
        sparse = plans(own, verification={"ffn": 0.5})
        assert (type(sparse), sparse.given, sparse.base) == (Sparse, {"ffn": 0.5}, None)
    both = plans("plain", plan="wide", **{"verification.ffn": 0.5})
    assert (type(both), both.given, type(both.base)) == (Sparse, {"ffn": 0.5}, Wide)


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("hybrid", "dense", "plan='dense' lacks a part of model 'hybrid': leave it out for 'states'"),
        ("hybrid", "wide", "plan='wide' lacks a part of model 'hybrid'"),
        ("plain", "sparse", r"unknown plan 'sparse': it is switched on by its settings, verification\.\*"),
        ("plain", "wid", "unknown plan 'wid': did you mean 'wide'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plans, name, plan, message):
    with pytest.raises(ConfigError, match=message):
        plans(name, plan=plan)
