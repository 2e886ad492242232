"""Drafters over the target's own states at temperature 1: the distribution of six tokens is the target's, by
chi-square.

All but two tokens of a tiny model are made impossible, so that a text is one of 64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.certify.statistics import ChiSquare, goodness_of_fit
from foretoken.core.draft import NO_DRAFT, Draft, ResumePoint, Sampled
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.draft_vocabulary import DraftVocabulary
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.dynamic_exit.drafter import DynamicExitDrafter
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.methods.kangaroo.drafter import KangarooDrafter
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.longspec.drafter import LongSpecDrafter
from foretoken.methods.longspec.network import LongSpec
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.ratio import RatioVerifier
from helpers.adapters import shelf
from helpers.golden import Session
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import with_config

pytestmark = pytest.mark.statistical

PROMPT = [5, 40, 17, 8]
LENGTH = 6
BIAS = {20: 60.0, 57: 60.0}
DRAWS = 350  # every planted mistake but one is far below PLAUSIBLE with these
MORE_DRAWS = 2000  # for that one: Kangaroo drops its last token where it is unsure of it
PLAUSIBLE = 1e-4


@cache
def model() -> LanguageModel:
    folder: Path = save_model("llama", shelf() / "statistical")
    found = load(folder, device="cpu")
    untrained(Adapter, found, folder / "kangaroo", exit_layer=1)
    untrained(Eagle, found, folder / "eagle")
    untrained(Scylla, found, folder / "scylla")
    untrained(Dovetail, found, folder / "dovetail")
    untrained(LongSpec, found, folder / "longspec", window=4)
    untrained(Eagle, found, folder / "half", draft_vocab_size=50)  # every other token, so that one of the two is out
    return found


def half() -> str:
    """The folder of a head that cannot propose one of the two tokens."""
    return str(Path(model().source, "half"))


@cache
def law() -> dict[tuple[int, ...], float]:
    """Of all texts of two tokens, by a plain forward of each."""
    found = {}
    for text in product(BIAS, repeat=LENGTH):
        session = Session(model())
        rows = session.chunk(session.cache.acquire(), [*PROMPT, *text])[len(PROMPT) - 1 : -1].double()
        rows[:, list(BIAS)] += 60.0
        p = torch.softmax(rows, dim=-1)
        found[text] = float(torch.stack([p[i, token] for i, token in enumerate(text)]).prod())
    return found


def fit(method: Any, *, draws: int = DRAWS, **options: Any) -> tuple[ChiSquare, float]:
    """How well texts fit the distribution, and the share of drafted tokens that stood."""
    config = {"method": method, **options}
    if isinstance(method, str):
        config.setdefault("num_speculative_tokens", 8)  # whether drafting pays here depends on the machine
    llm = with_config(config, target=model(), max_num_seqs=64)
    params = [
        SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, logit_bias=BIAS, seed=seed)
        for seed in range(draws)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * draws, params)
    assert all(output.error is None for output in outputs)
    counts = Counter(tuple(output.token_ids) for output in outputs)
    total = sum(law().values())
    assert total == pytest.approx(1.0, abs=1e-6)
    assert set(counts) <= set(law())
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return goodness_of_fit([counts[text] for text in law()], list(law().values())), accepted / drafted


def test_the_distribution_is_not_trivial() -> None:
    assert sum(p > 2e-3 for p in law().values()) > 20


@pytest.mark.parametrize(
    ("method", "verifier", "options"),
    [
        ("kangaroo", "ratio", {"threshold": 0.7, "max_depth": 4}),
        ("del", None, {}),
        ("del", "ratio", {"exit_layer": 2, "draft_length": 3}),
    ],
    ids=str,
)
def test_sampled_texts_follow_the_target_s_distribution(
    method: str, verifier: str | None, options: dict[str, Any]
) -> None:
    draws = MORE_DRAWS if method == "kangaroo" else DRAWS
    found, stood = fit(method, draws=draws, verifier=verifier, **options)
    assert found.p_value > PLAUSIBLE
    assert 0.1 < stood < 0.99


class _Dropping:
    """Planted: a draft's last token is dropped, not verified, if it is not the most probable one."""

    def propose(self, contexts: Any, budgets: Any) -> list[Draft]:
        return [self._drop(draft) for draft in super().propose(contexts, budgets)]  # type: ignore[misc]

    def _drop(self, draft: Draft) -> Draft:
        law = draft.law
        if not len(draft) or not isinstance(law, Sampled) or draft.resume is None:
            return draft
        count = len(draft) - 1
        q_V = law.q_at(count)
        if float(q_V[draft.tree.tokens[-1]]) == float(q_V.max()):
            return draft
        if not count:
            return NO_DRAFT
        return replace(
            draft,
            tree=TokenTree(draft.tree.tokens[:-1]),
            law=Sampled(law.q_KV[:-1], law.row_of[:-1]),
            confidence=draft.confidence[:-1],
            resume=ResumePoint(draft.resume.depth, draft.resume.hidden_TD[:-1]),
        )


class DroppingKangaroo(_Dropping, KangarooDrafter):
    pass


class DroppingExits(_Dropping, DynamicExitDrafter):
    pass


@pytest.mark.parametrize(
    ("method", "options"),
    [(DroppingKangaroo, {"threshold": 1.0}), (DroppingExits, {"exit_layer": 2, "draft_length": 1})],
)
def test_dropping_the_unsure_token_is_seen(method: Any, options: dict[str, Any]) -> None:
    """With one token a draft, which shows it soonest."""
    drafter = method(method.Config(**options), model())
    draws = MORE_DRAWS if method is DroppingKangaroo else DRAWS
    found, _ = fit(drafter, draws=draws, num_speculative_tokens=drafter.offers.length, verifier="ratio")
    assert found.p_value < PLAUSIBLE / 100


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {}),
        ("eagle", {"tree": True, "width": 2, "max_depth": 3}),
        ("scylla", {"width": 2, "max_depth": 3}),
        pytest.param("scylla", {"tree": False}, marks=pytest.mark.full_product),
        ("dovetail", {"width": 2, "max_depth": 3, "budget": "fixed", "place": "thread", "dtype": "bfloat16"}),
        pytest.param("dovetail", {"tree": False, "budget": "fixed"}, marks=pytest.mark.full_product),
        pytest.param("longspec", {}, marks=pytest.mark.full_product),
        ("longspec", {"tree": True, "width": 8, "max_depth": 3}),
    ],
    ids=str,
)
def test_heads_over_the_target_s_states_and_keys_keep_its_distribution(method: str, options: dict[str, Any]) -> None:
    found, stood = fit(method, **options)
    assert found.p_value > PLAUSIBLE
    assert 0.1 < stood < 0.99


def test_a_token_outside_of_the_draft_vocabulary_is_still_emitted() -> None:
    found, _ = fit("eagle", head=half(), verifier="ratio", num_speculative_tokens=3)
    assert found.p_value > PLAUSIBLE


class _CalledSampled:
    """Planted: a tree of deterministic children that says they were drawn, as LongSpec's released code takes them."""

    def propose(self, contexts: Any, budgets: Any) -> list[Draft]:
        drafts = super().propose(contexts, budgets)  # type: ignore[misc]
        q_V = torch.zeros(101)
        q_V[list(BIAS)] = 0.5
        return [replace(each, law=Sampled(q_V[None], (0,) * len(each))) if len(each) else each for each in drafts]


class SampledEagle(_CalledSampled, EagleDrafter):
    pass


class SampledLongSpec(_CalledSampled, LongSpecDrafter):
    pass


class SampledDovetail(_CalledSampled, DovetailDrafter):
    pass


@pytest.mark.parametrize("method", [SampledEagle, SampledLongSpec, SampledDovetail])
def test_a_tree_that_is_called_sampled_is_seen(method: Any) -> None:
    options = {"budget": "fixed"} if method is SampledDovetail else {}
    drafter = method(method.Config(tree=True, width=1, max_depth=3, **options), model())
    drafter.laws = (Sampled,)
    found, _ = fit(drafter, num_speculative_tokens=3, verifier="recursive")
    assert found.p_value < PLAUSIBLE / 100


def test_a_wrong_distribution_of_a_draft_is_detected() -> None:
    """Planted: the distribution of another row."""

    class Shuffled(DynamicExitDrafter):
        def propose(self, contexts: Any, budgets: Any) -> list[Draft]:
            return [
                replace(draft, law=Sampled(draft.law.q_KV.roll(1, 0), draft.law.row_of))
                if isinstance(draft.law, Sampled)
                else draft
                for draft in super().propose(contexts, budgets)
            ]

    drafter = Shuffled(Shuffled.Config(exit_layer=2, draft_length=3), model())
    found, _ = fit(drafter, num_speculative_tokens=3, verifier="ratio")
    assert found.p_value < PLAUSIBLE / 100


# ------------------------------------------------------------------ some tokens are scored only


def kept(place: Path, *tokens: int) -> str:
    """A draft vocabulary without context rows: a token outside of it is never drafted."""
    DraftVocabulary(ids=tokens, vocab_size=model().vocab_size, context_rows=0).save(place)
    return str(place)


@pytest.mark.parametrize(
    ("method", "options", "tokens"),
    [
        ("kangaroo", {"threshold": 0.0, "max_depth": 3}, (20, 57)),  # both
        ("del", {"exit_layer": 2, "draft_length": 3}, (20, 33)),  # one of the two
        ("eagle", {"max_depth": 3}, (20, 33)),
        ("eagle", {"tree": True, "width": 2, "max_depth": 3, "num_speculative_tokens": 4}, (20, 57)),
        pytest.param("scylla", {"tree": False, "max_depth": 3}, (33, 57), marks=pytest.mark.full_product),
    ],
    ids=str,
)
def test_texts_follow_the_target_s_distribution_whatever_tokens_are_drafted(
    method: str, options: dict[str, Any], tokens: tuple[int, ...], tmp_path: Path
) -> None:
    verifier = None if options.get("tree") else "ratio"
    found, stood = fit(method, verifier=verifier, draft_vocab=kept(tmp_path, *tokens), **options)
    assert found.p_value > PLAUSIBLE
    assert 0.1 < stood < 0.99


class _Epsilon:
    """Planted: the token that is not scored is given a little q, and the drawn one less than it had."""

    def propose(self, contexts: Any, budgets: Any) -> list[Draft]:
        return [self._spread(draft) for draft in super().propose(contexts, budgets)]  # type: ignore[misc]

    def _spread(self, draft: Draft) -> Draft:
        law = draft.law
        if not isinstance(law, Sampled) or law.columns is None:
            return draft
        q_KV = law.columns.spread(law.q_KV)
        q_KV[:, 57] += 0.3
        return replace(draft, law=Sampled(q_KV / 1.3, law.row_of))


class EpsilonExits(_Epsilon, DynamicExitDrafter):
    pass


class EpsilonEagle(_Epsilon, EagleDrafter):
    pass


@pytest.mark.parametrize(
    ("method", "options"), [(EpsilonExits, {"exit_layer": 2, "draft_length": 3}), (EpsilonEagle, {"max_depth": 3})]
)
def test_a_little_q_where_it_is_0_is_seen(method: Any, options: dict[str, Any], tmp_path: Path) -> None:
    config = method.Config(draft_vocab=kept(tmp_path, 20, 33), **options)
    found, _ = fit(method(config, model()), num_speculative_tokens=3, verifier="ratio")
    assert found.p_value < PLAUSIBLE / 100


class InsideOnly(RatioVerifier):
    """Planted: after a refusal, only tokens that are scored may be emitted."""

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        verdict = super().verify(draft, target, rng)
        law = draft.law
        refused = isinstance(law, Sampled) and len(verdict.path) < len(draft)
        return replace(verdict, extra=20) if refused else verdict

    verify_batch = Verifier.verify_batch


def test_a_residual_over_the_scored_tokens_only_is_seen(tmp_path: Path) -> None:
    drafter = DynamicExitDrafter(
        DynamicExitDrafter.Config(exit_layer=2, draft_length=3, draft_vocab=kept(tmp_path, 20, 33)), model()
    )
    found, _ = fit(drafter, num_speculative_tokens=3, verifier=InsideOnly())
    assert found.p_value < PLAUSIBLE / 100
