"""Drawn drafts, proved: each drafter of the catalogue that draws, enumerated with a rule in the engine, to 1e-12.

Two tiny models of the same vocabulary stand for the pair: there q is far from p, and a branch takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.certify.on_models import draft_law
from foretoken.certify.recipe_law import Choosy, TextLaw, text_law
from foretoken.core.draft import Tabulated
from foretoken.core.protocols import Drafter, Verifier
from foretoken.core.siblings import draw_siblings
from foretoken.core.words import Words
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting.draft_runner import Rows, RunnerBuilder
from foretoken.engine.llm import LLM
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.verifiers.ratio import RatioVerifier
from helpers.adapters import shelf
from helpers.pairwise import in_pairs
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model, save_tokenizer
from helpers.variants import Case, cases
from helpers.zoo_llms import with_config

pytestmark = pytest.mark.statistical

PROMPT = [5, 40]
EXACT, CAUGHT = 1e-12, 1e-4
DRAWING = {case.label: case for case in cases() if any(issubclass(law, Tabulated) for law in case.laws)}


@cache
def model(seed: int) -> LanguageModel:
    """The target (0) and the draft (1)."""
    return load(save_model("llama", shelf() / f"pair-{seed}", seed=seed, num_hidden_layers=4), device="cpu")


def recipe(case: Case, rule: str | Verifier | None = None) -> LLM:
    declared, variant = case.entry.load().declared, case.variant
    pair = str(model(1).source)
    if declared.draft_model and variant.untrained is not None:  # a part that is learned for a pair must be for this one
        case = replace(case, variant=replace(variant, untrained={**variant.untrained, "draft": pair}))
    config = case.config(model(0), rule, "auto")
    if declared.draft_model:
        config["model"] = pair
    return with_config(config, target=model(0))


def law_of(llm: LLM, **options: Any) -> TextLaw:
    trees = llm.recipe.drafter.branches
    tokens, length, num_nodes = ([20, 57, 33], 3, 2) if trees else ([20, 57], 4, 3)
    return text_law(llm, PROMPT, tokens, length=length, num_nodes=num_nodes, **options)


@cache
def plain(trees: bool, rare: bool = False) -> TextLaw:
    tokens, length = ([20, 57, 33], 3) if trees else ([20, 57], 4)
    return text_law(with_config(None, target=model(0)), PROMPT, tokens, length=length, num_nodes=0, rare=rare)


def error_of(llm: LLM, **options: Any) -> float:
    return law_of(llm, **options).distance(plain(llm.recipe.drafter.branches))


def test_plain_sampling_gives_a_distribution_of_many_texts() -> None:
    for trees, count in ((False, 2**4), (True, 3**3)):
        chances = plain(trees).chances
        assert len(chances) == count
        assert sum(chances.values()) == pytest.approx(1.0, abs=1e-12)
        assert sum(chance > 1e-3 for chance in chances.values()) > 10


@pytest.mark.parametrize(
    "filters",
    [{"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"dry_multiplier": 1.5, "dry_allowed_length": 1}],
    ids=["xtc", "dry"],
)
def test_xtc_and_dry_hold_at_every_node(filters: dict[str, float]) -> None:
    alone = text_law(with_config(None, target=model(0)), PROMPT, [20, 57], length=4, num_nodes=0, filters=filters)
    assert alone.distance(plain(trees=False)) > CAUGHT
    assert law_of(recipe(DRAWING["draft_model-chain"]), filters=filters).distance(alone) < EXACT


@pytest.mark.parametrize("prediction", [[20, 57, 57], [57, 57, 20, 57]], ids=str)
def test_a_predicted_output_leaves_the_distribution_as_it_is(prediction: list[int]) -> None:
    case = DRAWING["draft_model-chain"]
    predicted = law_of(recipe(case), filters={"prediction": prediction})
    assert predicted.num_drafted != law_of(recipe(case)).num_drafted
    assert predicted.distance(plain(trees=False)) < EXACT


@pytest.mark.parametrize(
    "stopped",
    in_pairs(
        list(product(DRAWING, (0, 1))),
        lambda row: (DRAWING[row[0]].entry.name, DRAWING[row[0]].kind, row[1]),
        lambda row: row[:1],
    ),
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def test_texts_follow_the_target_s_distribution_wherever_drafts_stop(stopped: tuple[str, int]) -> None:
    name, stops = stopped
    llm = recipe(DRAWING[name])
    found = law_of(llm, stops=stops)
    assert sum(found.chances.values()) == pytest.approx(1.0, abs=1e-12)
    assert found.num_drafted
    assert found.distance(plain(llm.recipe.drafter.branches)) <= EXACT


@cache
def foreign() -> str:
    """The draft with another tokenizer: characters have other ids, and some tokens are two characters."""
    folder = save_model("llama", shelf() / "pair-foreign", seed=1, num_hidden_layers=4)

    def edit(vocab: dict[str, int]) -> None:
        first = 6  # after special tokens and those of layout
        for name, token in list(vocab.items()):
            if token >= first:
                vocab[name] = first + (token - first + 40) % (len(vocab) - first)
        for name in ("X", "Y", "Z"):
            vocab[f"{name}{name}"] = vocab.pop(name)

    save_tokenizer(folder, edit)
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [{"tree": tree} for tree in ("chain", "sampled", "sampled_without_replacement", "top_then_sampled", "hub")]
    + [{"vocabulary": "text"}],
    ids=str,
)
def test_a_draft_of_another_vocabulary_keeps_the_distribution(options: dict[str, str]) -> None:
    config = {"method": "draft_model", "model": foreign(), "num_speculative_tokens": "auto", **options}
    llm = with_config(config, target=model(0))
    assert "has another vocabulary" in llm.recipe.drafter.explanation
    found = law_of(llm)
    assert found.num_drafted
    assert found.distance(plain(llm.recipe.drafter.branches)) <= EXACT


DRAFTED = {name: case for name, case in DRAWING.items() if case.entry.name == "draft_model"}


@pytest.mark.parametrize("name", DRAFTED)
def test_a_rare_token_follows_its_distribution_too(name: str) -> None:
    llm = recipe(DRAFTED[name])
    found = law_of(llm, rare=True)
    assert found.num_drafted
    assert 0.0 < min(found.chances.values()) < 1e-8
    assert found.distance(plain(llm.recipe.drafter.branches, rare=True)) <= EXACT


def test_dropping_improbable_draws_is_seen_where_a_token_is_rare() -> None:
    assert error_of(thrifty()) <= EXACT  # where no token is so rare, nothing is dropped
    assert law_of(thrifty(), rare=True).distance(plain(False, rare=True)) > 1e-5


@pytest.mark.parametrize(
    "name", in_pairs(list(DRAWING), lambda name: (), lambda name: (DRAWING[name].entry.name, DRAWING[name].kind))
)
def test_choosing_among_the_draws_is_seen_in_every_drafter(name: str) -> None:
    assert (
        error_of(recipe(DRAWING[name], "recursive" if DRAWING[name].fits("recursive") else None), wrap=Choosy) > CAUGHT
    )


class Keeping(ModelDrafter):
    """Planted: the stop rule is asked with the drawn token's own probability, and what it does not want is dropped."""

    def _expand_sampled(self, draft: RunnerBuilder, rows: Rows) -> None:
        q_V = torch.softmax(self._law(draft, rows), dim=-1)[0]
        (token,) = draw_siblings(self.laws[0], q_V, 1, draft.context.streams)  # type: ignore[arg-type]
        parent = draft.frontier[0]
        if not draft.pays(draft.reach_of(parent), float(q_V[token])):
            draft.frontier = []
            return
        draft.q_rows.append(q_V)
        node = draft.add(token, parent, float(q_V[token]), len(draft.q_rows) - 1)
        draft.frontier = [node] if draft.has_room(node) else []


def with_instance(drafter: Drafter, target: LanguageModel) -> LLM:
    return with_config({"method": drafter, "num_speculative_tokens": "auto"}, target=target)


def keeping() -> LLM:
    return with_instance(Keeping(Keeping.Config(model=str(model(1).source), tree="chain"), model(0)), model(0))


class Thrifty(ModelDrafter):
    """Planted: a drawn token that is hardly ever drawn is not worth a row, and is dropped."""

    def _expand_sampled(self, draft: RunnerBuilder, rows: Rows) -> None:
        before = len(draft.tokens)
        super()._expand_sampled(draft, rows)
        if len(draft.tokens) > before and float(draft.q_rows[-1][draft.tokens[-1]]) < 1e-3:
            for column in (draft.tokens, draft.parents, draft.depths, draft.reach, draft.confidence, draft.row_of):
                del column[before:]
            draft.frontier = []


def thrifty() -> LLM:
    return with_instance(Thrifty(Thrifty.Config(model=str(model(1).source), tree="chain"), model(0)), model(0))


def test_a_token_dropped_by_the_stop_rule_for_its_value_is_seen() -> None:
    assert error_of(keeping()) <= EXACT  # without a stop rule the bug sleeps
    assert max(error_of(keeping(), stops=stops) for stops in (0, 1)) > CAUGHT


def test_the_certificate_fails_for_a_token_dropped_by_the_stop_rule() -> None:
    plain_llm = with_config(None, target=model(0))
    sound = draft_law(plain_llm, recipe(DRAWING["draft_model-chain"]), quick=True)
    assert sound.passed, sound
    section = draft_law(plain_llm, keeping(), quick=True)
    assert not section.passed
    assert section.details["errors"][0] <= EXACT < CAUGHT < max(section.details["errors"])


def test_the_certificate_asks_that_choosing_leaves_a_stream_as_it_is() -> None:
    plain_llm = with_config(None, target=model(0))
    section = draft_law(plain_llm, recipe(DRAWING["draft_model-chain"], "match"), quick=True)
    assert section.passed, section
    assert section.details["bias"] <= EXACT


class Believing(RatioVerifier):
    """Planted: it promises a stream and believes the draft's distribution."""

    promise = "same stream"


def test_the_certificate_fails_a_stream_that_choosing_moves() -> None:
    section = draft_law(
        with_config(None, target=model(0)), recipe(DRAWING["draft_model-chain"], Believing()), quick=True
    )
    assert not section.passed
    assert section.details["bias"] > CAUGHT


def test_the_certificate_refuses_draws_that_it_cannot_replay() -> None:
    class Raw(Keeping):
        def _law(self, draft: RunnerBuilder, rows: Rows) -> Tensor:
            draft.context.streams.uniform("draft", 1)
            return super()._law(draft, rows)

    raw = with_instance(Raw(Raw.Config(model=str(model(1).source), tree="chain"), model(0)), model(0))
    section = draft_law(with_config(None, target=model(0)), raw, quick=True)
    assert not section.passed
    assert "use bernoulli, categorical or distinct" in section.summary


def test_every_kind_of_drawn_draft_is_enumerated() -> None:
    kinds: Sequence[Any] = Tabulated.__args__  # type: ignore[attr-defined]
    assert {law for case in DRAWING.values() for law in case.laws} >= set(kinds)


FILTERED = [name for name, case in DRAWING.items() if case.entry.name in ("draft_model", "eagle", "kangaroo")]


def forbidden(trees: bool) -> dict[str, Any]:
    """Words of tokens that texts are made of; of two where there are three of them."""
    sequences = [[20, 57], [57, 33, 20]] if trees else [[20, 57, 57], [57, 20, 20]]
    words = [model(0).tokenizer.decode(ids) for ids in sequences]
    assert [model(0).tokenizer(word, add_special_tokens=False)["input_ids"] for word in words] == sequences
    return {"bad_words": words}


@cache
def plain_without_words(trees: bool) -> TextLaw:
    tokens, length = ([20, 57, 33], 3) if trees else ([20, 57], 4)
    llm = with_config(None, target=model(0))
    return text_law(llm, PROMPT, tokens, length=length, num_nodes=0, filters=forbidden(trees))


@pytest.mark.parametrize("name", FILTERED)
def test_the_distribution_without_some_words_is_the_target_s(name: str) -> None:
    llm = recipe(DRAWING[name])
    trees = llm.recipe.drafter.branches
    wanted = plain_without_words(trees)
    assert 2 <= len(wanted.chances) < len(plain(trees).chances)
    assert law_of(llm, filters=forbidden(trees)).distance(wanted) <= EXACT


def test_checking_words_in_committed_tokens_only_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = recipe(DRAWING["draft_model-chain"])
    wanted = plain_without_words(False)
    allowed = Words.allowed
    monkeypatch.setattr(Words, "allowed", lambda words, path: allowed(words, []))
    assert law_of(llm, filters=forbidden(False)).distance(wanted) > CAUGHT
