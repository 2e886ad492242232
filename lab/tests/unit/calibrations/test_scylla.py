"""The measurements of the tree's size by the number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.core.errors import InputError
from foretoken.engine.llm import LLM
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab.calibrations import scylla
from foretoken_lab.calibrations.scylla import choose, measure, roofline
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


@pytest.fixture
def head(model: LanguageModel, tmp_path: Path) -> Path:
    return Path(untrained(Scylla, model, tmp_path / "head", layers=2))


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": tokens_of(seed, 6 + seed, 100)} for seed in range(count)]


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
    config = ScyllaDrafter.Config(head=str(head), width=4, max_depth=4)
    asked = prompts(3)
    ids = [each["prompt_token_ids"] for each in asked]
    found = measure(
        llm, config, ids, batches=[1, 3], nodes=[1, 4], tokens=12, repeats=1, progress=lambda: seen.append(1)
    )
    assert len(seen) == 2 + 2
    assert {(each["batch"], each["nodes"]) for each in found["measured"]} == {(b, k) for b in (1, 3) for k in (0, 1, 4)}
    for each in found["measured"]:
        gain = found["accepted"][str(each["nodes"])]
        assert each["tokens_per_second"] == pytest.approx(each["batch"] * gain / each["step_seconds"])
        assert 0 <= each["draft_seconds"] < each["step_seconds"]
    rates = {(each["batch"], each["nodes"]): each["tokens_per_second"] for each in found["measured"]}
    assert tuple(map(tuple, found["widths"])) == choose([1, 3], rates).table
    with pytest.raises(InputError, match="--max-tokens 3: too few steps"):
        measure(llm, ScyllaDrafter.Config(head=str(head)), [[5, 6]], batches=[1], nodes=[1], tokens=3, repeats=1)


def test_accepted_tokens_are_those_of_real_runs(model: LanguageModel, head: Path) -> None:
    llm, asked = LLM.from_target(model), prompts(4)
    config = ScyllaDrafter.Config(head=str(head), width=4, max_depth=4)
    ids = [each["prompt_token_ids"] for each in asked]
    found = measure(llm, config, ids, batches=[1], nodes=[2, 8], tokens=24, repeats=1)
    assert found["accepted"]["0"] == 1
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for nodes in (2, 8):
        settings = {"method": ScyllaDrafter(config, model), "num_speculative_tokens": nodes}
        real = LLM.from_target(model, speculative_config=settings, max_num_seqs=1).generate(asked, params)
        steps = sum(each.metrics.num_steps - 1 for each in real)  # the first one ends the prompt
        assert found["accepted"][str(nodes)] == pytest.approx(4 * 23 / steps)


def test_free_verification_width_shrinks_with_the_batch(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scylla, "machine_balance", lambda *given: (8.0, 1.0))

    def roof(batches: Sequence[int]) -> list[int]:
        return [nodes for _, nodes in roofline(model, batches, 1, 256)["k_roof"]]

    found = roof([1, 2, 4, 8])
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] > 0
    assert found[0] == pytest.approx(2 * found[1], rel=0.2)  # weights are read once for all
