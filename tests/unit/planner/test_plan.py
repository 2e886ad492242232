"""A whole plan on the bundled model, in a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import zoo
from foretoken.core.errors import InputError
from foretoken.data.prompts import Prompt
from foretoken.options.sampling import SamplingParams
from foretoken.planner import costs as cost_model
from foretoken.planner.candidates import NO_PART, Candidate, candidates
from foretoken.planner.plan import Wanted, make
from foretoken.planner.trace import TRACE_FILE
from helpers import zoo_llms

_PROMPTS = [Prompt("0", "The cat sat on the mat. The cat sat"), Prompt("1", "one two one two one", "counting")]


def test_a_plan_measures_plain_decoding_and_what_may_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "REPEATS", 4)
    states: list[str] = []
    wanted = Wanted(
        prompts=_PROMPTS,
        params=SamplingParams(max_tokens=24, ignore_eos=True),
        chat=False,
        minutes=0.05,
        methods=["ngram", "rest", "scylla"],
        contexts=(32,),
        requests=(1, 2),
    )
    plan, trace = make(zoo_llms.base(), wanted, lambda state, share: states.append(state))
    found = {each.config["method"]: each for each in plan.candidates}
    assert [len(each.tokens) for each in trace.answers] == [24, 24]
    assert found["ngram"].measured is not None
    assert found["ngram"].by_length.keys() == set(range(1, 17))
    assert found["ngram"].by_requests.keys() == {1, 2}
    assert "datastore" in found["rest"].reason
    assert found["scylla"].reason == NO_PART
    assert any(state.startswith("replaying ngram") for state in states)
    record = json.loads(json.dumps(plan.record()))
    assert not any("plain_form" in each for each in record["candidates"])
    assert record["workload"]["prompts"] == 2
    assert record["target"]["name"] == "zoo:base"
    assert record["chosen"]["method"] in ("none", "ngram")
    trace.save(tmp_path)
    assert len((tmp_path / TRACE_FILE).read_text().splitlines()) == 3


def test_a_prompt_that_does_not_fit_is_refused_by_its_place() -> None:
    long = Prompt("0", "one " * zoo_llms.target().max_length, place="mine.jsonl:1")
    wanted = Wanted(prompts=[long], params=SamplingParams(), chat=False, methods=["ngram"])
    with pytest.raises(InputError, match=r"mine\.jsonl:1 has .* tokens; the context is"):
        make(zoo_llms.base(), wanted)


def test_every_drafter_of_the_catalogue_is_a_candidate_or_has_a_reason() -> None:
    found = candidates(zoo_llms.target(), (), None, greedy=True)
    by_method: dict[str, list[Candidate]] = {}
    for each in found:
        by_method.setdefault(each.config["method"], []).append(each)
    usable = {name for name, its in by_method.items() if not its[0].reason}
    assert {"ngram", "suffix", "suffix_first", "draft_model", "eagle", "kangaroo", "diffuspec", "del"} <= usable
    assert {"tree": "topk"}.items() <= by_method["draft_model"][1].config.items()
    assert by_method["suffix"][1].config == {"method": "suffix", "tree": False}
    assert all(each.config["verifier"] == "auto" for each in by_method["sprinter"])


def test_a_draft_model_is_offered_to_drafters_of_its_kind() -> None:
    found = candidates(zoo_llms.target(), ["zoo:draft"], ["draft_model", "eagle"], greedy=True)
    assert {"method": "draft_model", "model": "zoo:draft"} in [each.config for each in found]
    assert not any("model" in each.config for each in found if each.config["method"] == "eagle")
    head = str(zoo.path("base") / "eagle")
    found = candidates(zoo_llms.target(), [head], ["draft_model", "eagle", "suffix_first", "auto"], greedy=True)
    offered = {each.config["method"] for each in found if each.config.get("model") == head}
    assert offered == {"eagle", "suffix_first", "auto"}
