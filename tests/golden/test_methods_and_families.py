"""Every method over every kind of model: it works, or it is refused by name before the first step.

Models are tiny, with random weights; learned parts are untrained ones of these models. A soak found an AttributeError
where `kangaroo` met a Mamba-2: nothing that a user composes may end in an error of Python's.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretoken import catalog
from foretoken.core.errors import ForetokenError, UnsupportedArchitecture
from foretoken.engine.llm import LLM
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.tiny_models import FAMILIES, STATE_SPACE, Family, save_model
from helpers.variants import Case, cases, untrained
from helpers.zoo_llms import with_config

# a Mamba-2 as it is published: its config says nothing of attention
_PURE = {name: value for name, value in STATE_SPACE["mamba2"].options.items() if name != "num_attention_heads"}
KINDS = {
    "dense": FAMILIES["llama"],
    "learned positions": FAMILIES["gpt2"],
    "experts": FAMILIES["qwen3_moe"],
    "window in every layer": FAMILIES["mistral"],
    "layers of two kinds": FAMILIES["gemma3n_text"],
    "latent attention": FAMILIES["deepseek_v3"],
    "states": Family("mamba2", _PURE),
    "states and attention": STATE_SPACE["bamba"],
    "shared attention": STATE_SPACE["zamba2"],
    "linear attention": STATE_SPACE["qwen3_next"],
}
FEW = ("dense", "window in every layer", "states", "states and attention")  # for rules, and for trees
REMEDY = re.compile(r"\b(use|train|make|makes|give|leave)\b")
LENGTH = 6
PROMPT = [1, 40, 41, 42, 40, 41, 42, 40, 41]


def _shapes() -> list[Case]:
    """Of every drafter the first declared variant of chains, and of trees."""
    found: dict[tuple[str, bool], Case] = {}
    for case in [*cases(), *cases(brought=True)]:
        found.setdefault((case.entry.name, case.branches), case)
    return list(found.values())


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@cache
def _folder(shelf: Path, kind: str) -> str:
    return str(save_model(KINDS[kind], shelf / kind.replace(" ", "-")))


@cache
def _target(shelf: Path, kind: str) -> LanguageModel:
    return load(_folder(shelf, kind))


def _options(case: Case, shelf: Path, target: LanguageModel) -> dict[str, Any]:
    """A drafter's options, with a tiny draft model, and with the head of this very pair."""
    declared, variant, small = case.entry.load().declared, case.variant, _folder(shelf, "dense")
    if not declared.draft_model:
        return case.options(target)
    options = {"model": small, **variant.options}
    if variant.untrained is not None:
        options["head"] = untrained(declared.learned_part, target, draft=small, **variant.untrained)
    return options


def _refusal(target: LanguageModel, config: dict[str, Any], temperature: float) -> str:
    """Generate a few tokens; how that was refused at construction, or ""."""
    try:
        llm = with_config(config, target=target)  # small draft models are loaded once
    except ForetokenError as error:
        return str(error)
    try:
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=0, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
        assert output.error is None, output.error
        assert len(output.token_ids) == LENGTH
    finally:
        llm.close()
    return ""


@pytest.mark.parametrize("case", _shapes(), ids=lambda case: case.label)
def test_a_drafter_works_or_is_refused(case: Case, shelf: Path) -> None:
    served = []
    for kind in FEW if case.branches else KINDS:
        target = _target(shelf, kind)
        count = {} if case.entry.name == "none" else {"num_speculative_tokens": 3}
        try:
            options = _options(case, shelf, target)
        except ForetokenError as error:  # no part can be made for such a model
            refusal = str(error)
        else:
            refusal = _refusal(target, {"method": case.entry.name, "verifier": "auto", **options, **count}, 0.0)
        assert not refusal or REMEDY.search(refusal), f"{kind}: {refusal}"
        if not refusal:
            served.append(kind)
    needs = case.entry.load().declared
    if needs.learned_part is None and not needs.brought and not needs.datastore and case.entry.name != "diffuspec":
        assert "dense" in served


@pytest.mark.parametrize("rule", [entry.name for entry in catalog.entries("verifier")])
def test_a_rule_works_or_is_refused(rule: str, shelf: Path) -> None:
    theirs = [each for each in catalog.entries("drafter") if each.load().declared.own_verifier == rule]
    method = theirs[0].name if theirs else "draft_model"
    for kind in FEW:
        target = _target(shelf, kind)
        options: dict[str, Any] = {"model": _folder(shelf, "dense")}
        if method == "sprinter":
            options["stop"] = "confidence"
        refusal = _refusal(target, {"method": method, **options, "verifier": rule}, float(rule != "greedy"))
        assert not refusal or REMEDY.search(refusal), f"{kind}: {refusal}"


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_kangaroo_on_a_model_without_attention_is_refused_by_name(exit_layer: int, shelf: Path) -> None:
    """Found by a soak: AttributeError, num_attention_heads."""
    dense, states = _target(shelf, "dense"), _target(shelf, "states")
    adapter = untrained("foretoken.methods.kangaroo.network:Adapter", dense, exit_layer=exit_layer)
    with pytest.raises(ForetokenError, match=r"use|train"):
        LLM.from_target(states, speculative_config={"method": "kangaroo", "adapter": adapter})
    with pytest.raises(UnsupportedArchitecture, match=r"has no attention: no Kangaroo adapter fits it.*use method="):
        untrained("foretoken.methods.kangaroo.network:Adapter", states, exit_layer=exit_layer)
