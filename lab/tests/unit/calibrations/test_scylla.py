"""The measurements of the tree's size by the number of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InputError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken_lab.calibrations import scylla
from foretoken_lab.calibrations.scylla import Watched, accepted, by_reach, choose, measure, roofline
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


@pytest.fixture
def head(model: LanguageModel, tmp_path: Path) -> Path:
    return Path(Scylla.untrained(model, tmp_path / "head", layers=2))


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": tokens_of(seed, 6 + seed, 100)} for seed in range(count)]


def test_smaller_trees_are_nested_in_a_larger_one() -> None:
    """The accepted path's nodes among the best k, against drafting k."""
    tree = TokenTree([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])
    draft = Draft(tree, PointMass(), (0.6, 0.3, 0.5, 0.9, 0.8))
    assert by_reach(draft) == [0, 1, 2, 3, 4]  # 0.6, 0.3, 0.3, 0.27, 0.24
    paths = [([0, 2, 3], 5), ([1, 4], 5), ([], 5)]
    assert [accepted(paths, k) for k in (1, 2, 3, 4, 5)] == pytest.approx(
        [1 + 1 / 3, 1 + 2 / 3, 1 + 3 / 3, 1 + 4 / 3, 1 + 5 / 3]
    )


def test_the_best_rate_is_chosen_and_never_more_than_before() -> None:
    rates = {
        (1, 0): 10.0, (1, 4): 12.0, (1, 16): 15.0,
        (2, 0): 20.0, (2, 4): 26.0, (2, 16): 26.0,
        (4, 0): 40.0, (4, 4): 41.0, (4, 16): 45.0,
        (8, 0): 80.0, (8, 4): 70.0, (8, 16): 60.0,
    }  # fmt: skip
    assert choose([1, 2, 4, 8], rates).table == ((1, 16), (2, 4), (4, 4), (8, 0))


def test_measure_times_every_batch_and_width(model: LanguageModel, head: Path) -> None:
    llm = LLM.from_target(model)
    seen: list[int] = []
    found = measure(
        llm,
        ScyllaDrafter.Config(head=str(head), width=4, max_depth=4),
        [each["prompt_token_ids"] for each in prompts(3)],
        batches=[1, 3],
        nodes=[1, 4],
        tokens=12,
        repeats=1,
        progress=lambda: seen.append(1),
    )
    assert len(seen) == 1 + 2 * 3
    assert {(each["batch"], each["nodes"]) for each in found["measured"]} == {(b, k) for b in (1, 3) for k in (0, 1, 4)}
    assert 1 == found["accepted"]["0"] <= found["accepted"]["1"] <= found["accepted"]["4"] <= 5
    for each in found["measured"]:
        gain = found["accepted"][str(each["nodes"])]
        assert each["tokens_per_second"] == pytest.approx(each["batch"] * gain / each["step_seconds"])
        assert 0 <= each["draft_seconds"] < each["step_seconds"]
        assert each["served"] >= 1
    rates = {(each["batch"], each["nodes"]): each["tokens_per_second"] for each in found["measured"]}
    assert tuple(map(tuple, found["widths"])) == choose([1, 3], rates).table
    with pytest.raises(InputError, match="too few steps of 1 requests"):
        measure(llm, ScyllaDrafter.Config(head=str(head)), [[5, 6]], batches=[1], nodes=[1], tokens=3, repeats=1)


def test_the_recording_and_every_batch_answer_the_same_prompts(
    model: LanguageModel, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of different batches were those of different prompts, with the acceptance of others still."""
    asked: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    generate = LLM.generate

    def noting(self: LLM, prompts: Any, params: Any) -> Any:
        drafter = self.recipe.drafter
        assert isinstance(drafter, Watched)
        texts = [tuple(each["prompt_token_ids"]) for each in prompts]
        asked.setdefault((len(texts), drafter.nodes), []).extend(texts)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", noting)
    given = [each["prompt_token_ids"] for each in prompts(7)]
    config = ScyllaDrafter.Config(head=str(head), width=4, max_depth=4)
    measure(LLM.from_target(model), config, given, batches=[1, 2, 4], nodes=[2, 4], tokens=10, repeats=2)
    first_eight = sorted(tuple(given[number % 7]) for number in range(8))
    for (batch, nodes), texts in asked.items():
        twice = (batch, nodes) == (4, 4)  # the recording, and a timed run
        assert sorted(texts) == sorted(first_eight * (2 if twice else 1))
    assert set(asked) == {(batch, nodes) for batch in (1, 2, 4) for nodes in (0, 2, 4)}


def test_one_thread_is_timed_by_its_processor(model: LanguageModel, head: Path) -> None:
    """Whoever else runs would count otherwise; several threads' time is the wall's."""
    config, before = ScyllaDrafter.Config(head=str(head)), torch.get_num_threads()
    try:
        for threads, clock in ((1, time.thread_time), (2, time.perf_counter)):
            torch.set_num_threads(threads)
            assert Watched(config, model).clock is clock
    finally:
        torch.set_num_threads(before)


def test_free_verification_width_shrinks_with_the_batch(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scylla, "machine_balance", lambda *given: (8.0, 1.0))

    def roof(batches: Sequence[int]) -> list[int]:
        return [nodes for _, nodes in roofline(model, batches, 1, 256)["k_roof"]]

    found = roof([1, 2, 4, 8])
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] > 0
    assert found[0] == pytest.approx(2 * found[1], rel=0.2)  # weights are read once for all
