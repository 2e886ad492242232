"""The judge's fit: the optimum, the classes' weights, folding, the choice by area; splits, and what stops a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.engine.llm import LLM
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint
from foretoken.options.sampling import SamplingParams
from foretoken.train.grouped_split import grouped_split
from foretoken.train.regression import Standard, regress
from foretoken.train.roc import auc
from foretoken_lab.judge import fit as fitting
from foretoken_lab.judge import train as training
from foretoken_lab.judge.fit import GRID, fit, macro_auc
from foretoken_lab.judge.labels import Labels, read_states
from foretoken_lab.judge.mining import Mining
from foretoken_lab.judge.train import best_without_head, quality, smallest_threshold, threshold_of, without_head
from foretoken_lab.judge.triples import read_triples
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

WIDTH = 12


def labels(count: int = 1200, *, bad: float = 0.3, seed: int = 0, noise: float = 0.7, shared: float = 0.0) -> Labels:
    """Tokens that two of twelve dimensions separate, on scales that differ by a million, five to a question.

    Args:
        shared: what the tokens of a question have in common next to, and their labels with it.
    """
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(count, WIDTH, generator=generator)
    question_N = torch.arange(count) // 5
    common_N = torch.randn(count // 5 + 1, generator=generator)[question_N]
    score_N = x_ND[:, 0] - x_ND[:, 3] + noise * torch.randn(count, generator=generator) + shared * common_N
    x_ND[:, 5] += 100 * shared * common_N
    fine_N = score_N > score_N.quantile(bad)
    hidden_ND = (x_ND + torch.linspace(-20, 20, WIDTH)) * torch.logspace(-3, 3, WIDTH)
    source_N = torch.arange(count) % 2
    law_N3 = torch.stack([-torch.arange(count), torch.arange(count), torch.zeros(count)], -1).float()
    return Labels(hidden_ND, fine_N, torch.ones(count).bool(), question_N, source_N, ("one", "two"), law_N3)


def split(found: Labels) -> torch.Tensor:
    return grouped_split(found.question_N, 0.9, torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------- arithmetic


def test_a_saved_head_gives_what_the_standardised_pipeline_gives(tmp_path: Path) -> None:
    found = labels()
    x_ND = found.hidden_ND.clone()
    x_ND[:, 7] = 3.25  # a dimension that never changes
    standard = Standard.of(x_ND)
    generator = torch.Generator().manual_seed(1)
    weight_D, bias = torch.randn(WIDTH, generator=generator), 0.4
    pipeline = torch.sigmoid(standard(x_ND).double() @ weight_D.double() + bias).float()
    config = JudgeConfig(width=WIDTH, threshold=0.5, target="t", target_fingerprint="f")
    JudgeHead(config, standard.fold(weight_D, bias)).save(tmp_path)
    torch.testing.assert_close(JudgeHead.load(tmp_path).judge(x_ND), pipeline, rtol=0, atol=1e-5)
    torch.testing.assert_close(standard(x_ND).std(dim=0, correction=0)[:7], torch.ones(7), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 100.0])
def test_the_optimum_is_that_of_another_optimiser(strength: float) -> None:
    """In the letters of scikit-learn: |w|^2 / 2 + C sum of weight times loss."""
    found = labels(300)
    x_ND, y_N = Standard.of(found.hidden_ND)(found.hidden_ND), found.fine_N.float()
    weight_N = torch.where(found.fine_N, 1.0, 2.5)
    x, y, weight = x_ND.double().numpy(), y_N.double().numpy(), weight_N.double().numpy()

    def loss(numbers: Any) -> float:
        score = x @ numbers[:-1] + numbers[-1]
        losses = np.logaddexp(0, score) - y * score
        return float(strength * (weight * losses).sum() + numbers[:-1] @ numbers[:-1] / 2)

    wanted = minimize(loss, np.zeros(WIDTH + 1), method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-14}).x
    total = weight_N.sum()
    penalty_D = torch.full((WIDTH,), 1.0 / (strength * float(total)))
    ours = regress(x_ND, y_N, weight_N / total, penalty_D, torch.zeros(WIDTH + 1))
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize(("bad", "wanted"), [(0.5, 1.0), (0.25, 3.0), (0.8, 0.25), (0.02, 20.0)])
def test_within_each_task_the_bad_tokens_weigh_as_much_as_the_fine_ones_up_to_twenty_times(
    bad: float, wanted: float
) -> None:
    found = labels(bad=bad)
    everything = torch.ones(len(found)).bool()
    everything[-5:] = False
    weights = fit(found, everything, ~everything).bad_weights
    assert weights["one"] == pytest.approx(wanted, rel=0.25)
    assert weights["two"] == pytest.approx(wanted, rel=0.25)


def test_a_task_of_four_times_as_many_tokens_weighs_twice_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    found = labels()
    found = replace(found, source_N=(torch.arange(len(found)) % 5 == 0).long())
    everything, seen = torch.ones(len(found)).bool(), list[list[float]]()

    def noting(x_ND: Any, y_N: Any, weight_N: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append([float(weight_N[found.source_N == place].sum()) for place in (0, 1)])
        return regress(x_ND, y_N, weight_N, *rest)

    monkeypatch.setattr(fitting, "regress", noting)
    fit(found, everything, ~everything)
    assert seen[0][0] / seen[0][1] == pytest.approx(2.0, rel=0.03)
    assert sum(seen[0]) == pytest.approx(1.0)


def test_a_task_of_one_kind_teaches_nothing_about_itself() -> None:
    """Half of the tokens are of a task without a fine one, and a number says which task: it must count for nothing."""
    found = labels()
    other_N = found.source_N == 1
    hidden_ND = found.hidden_ND.clone()
    hidden_ND[:, 9] = other_N.float() + 0.01 * torch.randn(len(found), generator=torch.Generator().manual_seed(2))
    spoilt = replace(found, hidden_ND=hidden_ND, fine_N=found.fine_N & ~other_N)
    train_N = split(found)
    fitted = fit(spoilt, train_N, ~train_N)
    assert set(fitted.bad_weights) == {"one"}
    moved_ND = hidden_ND.clone()
    moved_ND[:, 9] += 1.0  # as if of the other task
    shift = fitted.unit.probabilities(moved_ND) - fitted.unit.probabilities(hidden_ND)
    pooled = fit(replace(spoilt, source_N=torch.zeros_like(other_N).long(), sources=("one",)), train_N, ~train_N)
    there = pooled.unit.probabilities(moved_ND) - pooled.unit.probabilities(hidden_ND)
    assert float(shift.abs().mean()) < 0.25 * float(there.abs().mean())  # the control learns the task
    with pytest.raises(InputError, match="no task has both fine and bad tokens"):
        fit(replace(found, fine_N=torch.zeros(len(found)).bool()), train_N, ~train_N)


def test_random_tokens_weigh_like_the_tasks_bad_ones() -> None:
    found = labels()
    strange = replace(found, fine_N=found.fine_N & (found.source_N == 0), sources=("one", "random"))
    train_N = split(found)
    weights = fit(strange, train_N, ~train_N, anywhere=("random",)).bad_weights
    assert weights["random"] == weights["one"]


def test_the_mean_within_tasks_does_not_reward_telling_them_apart() -> None:
    found = labels(400)
    apart_N = (found.source_N == 0).float()
    easy = replace(found, fine_N=(found.source_N == 0) ^ (torch.arange(400) % 20 < 2))
    assert macro_auc(easy, apart_N) == 0.5
    whole = auc(apart_N, easy.fine_N)
    assert whole is not None
    assert whole > 0.85
    assert macro_auc(replace(easy, fine_N=found.source_N == 0), apart_N) is None


def test_the_strength_with_the_largest_area_is_kept_and_the_area_is_that_of_the_head() -> None:
    found = labels(400, noise=3.0)
    train_N = split(found)
    fitted = fit(found, train_N, ~train_N)
    assert list(fitted.areas) == list(GRID)
    known = [area for area in fitted.areas.values() if area is not None]
    assert fitted.areas[fitted.strength] == max(known) > min(known)
    held = found.of(~train_N)
    assert macro_auc(held, fitted.unit.probabilities(held.hidden_ND)) == max(known)


def test_a_fit_finds_what_there_is_and_nothing_where_there_is_nothing() -> None:
    found = labels(3000)
    train_N = split(found)
    area = fit(found, train_N, ~train_N).areas[1.0]
    assert area is not None
    assert area > 0.9
    shuffled = found.fine_N[torch.randperm(len(found), generator=torch.Generator().manual_seed(1))]
    area = fit(replace(found, fine_N=shuffled), train_N, ~train_N).areas[1.0]
    assert area == pytest.approx(0.5, abs=0.09)


# ---------------------------------------------------------------------- splits and figures


def test_a_split_keeps_questions_together() -> None:
    question_N = torch.arange(1000) // 5
    train_N = grouped_split(question_N, 0.9, torch.Generator().manual_seed(3))
    assert int(train_N.sum()) == 900
    assert not set(question_N[train_N].tolist()) & set(question_N[~train_N].tolist())
    again = grouped_split(question_N, 0.9, torch.Generator().manual_seed(3))
    other = grouped_split(question_N, 0.9, torch.Generator().manual_seed(4))
    assert torch.equal(train_N, again)
    assert not torch.equal(train_N, other)


def test_a_head_is_not_judged_by_questions_that_it_was_fitted_on() -> None:
    """The tokens of a question share a dimension with their labels: a split by tokens would take that for skill."""
    found = labels(noise=0.0, shared=3.0)
    torch.manual_seed(0)
    train_N, choose_N = training._split(found, torch.ones(len(found)).bool(), 0)
    parts = [set(found.question_N[part].tolist()) for part in (train_N, choose_N, ~train_N & ~choose_N)]
    assert [len(part) / 240 for part in parts] == pytest.approx([0.7, 0.15, 0.15], abs=0.01)
    assert len(set.union(*parts)) == sum(map(len, parts))


def test_quality_by_hand() -> None:
    found = labels(5).of(torch.ones(5).bool())
    found = replace(found, fine_N=torch.tensor([True, True, False, False, False]))
    draft_N3 = torch.tensor([[-1.0, 0.0, 3.0], [-2.0, 0.0, 1.0], [-1.5, 0.0, 2.0], [-3.0, 0.0, 2.0], [-4.0, 0.0, 4.0]])
    score_N, without = torch.tensor([0.9, 0.4, 0.6, 0.5, 0.1]), without_head(found, draft_N3)
    got = quality(found, score_N, 0.5, without)
    chance = got["auc_of"].pop("chance")
    assert chance == round(auc(without["chance"], found.fine_N) or 0.0, 4)
    assert best_without_head(got) == ("p", 1.0)  # over the largest it predicts as much in the other direction
    low, high = got.pop("false_accepts_interval")
    assert low < 1 / 3 < high
    assert got == {
        "fine": 2, "bad": 3, "auc": 0.6667,
        "auc_of": {"p": 1.0, "p_over_largest": 0.0, "entropy": 0.5, "q": 0.8333, "draft_entropy": 0.6667},
        "accepted": 0.4, "fine_accepted": 0.5, "false_accepts": 0.3333,
    }  # fmt: skip
    nothing = quality(found.of(torch.zeros(5).bool()), torch.zeros(0), 0.5)
    assert (nothing["accepted"], best_without_head(nothing)) == (None, None)
    one = found.source_N == 0
    assert quality(found, score_N, 0.5, without, "one") == quality(
        found.of(one), score_N[one], 0.5, {name: each_N[one] for name, each_N in without.items()}
    )
    assert nothing["false_accepts_interval"] is None


@pytest.mark.parametrize(
    ("false_accepts", "wanted"),
    [(0.0, 0.9), (0.24, 0.9), (0.25, 0.7), (0.5, 0.7), (0.75, 0.1), (0.99, 0.1), (1.0, 0.0)],
)
def test_the_smallest_threshold_by_hand(false_accepts: float, wanted: float) -> None:
    score_N, good_N = torch.tensor([0.9, 0.1, 0.95, 0.7, 0.7, 0.2]), torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    found = smallest_threshold(score_N, good_N, false_accepts)
    assert found == pytest.approx(wanted)
    above = [float((score_N[~good_N] > level).float().mean()) for level in (found, found - 1e-6)]
    assert above[0] <= false_accepts
    assert above[1] > false_accepts or found == 0.0  # no smaller one would do


def test_a_share_of_the_bad_ones_is_counted_exactly() -> None:
    score_N = torch.linspace(0.01, 0.5, 50)
    assert int((score_N > smallest_threshold(score_N, torch.zeros(50).bool(), 0.02)).sum()) == 1


def test_the_threshold_holds_within_every_source_that_has_bad_tokens() -> None:
    found = labels(400)
    score_N = torch.rand(400, generator=torch.Generator().manual_seed(2)) ** (1 + 3 * found.source_N)
    places = [found.source_N == place for place in (0, 1)]
    alone = [smallest_threshold(score_N[here_N], found.fine_N[here_N], 0.1) for here_N in places]
    assert alone[0] > alone[1] + 0.1
    assert threshold_of(found, score_N, 0.1) == alone[0]
    fine = replace(found, fine_N=found.fine_N | places[0])
    assert threshold_of(fine, score_N, 0.1) == alone[1]


# ---------------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of characters, and annotations: an error is a digit."""
    place = tmp_path_factory.mktemp("judge")
    save_model("llama", place / "target")
    lines = [
        {"question": f"{n}?", "correct": f"so {chr(97 + n % 26)} it", "wrong": f"so {n % 10} it", "error": [3, 4]}
        for n in range(400)
    ]
    llm = LLM(place / "target", device="cpu", speculative_config=None)
    for line in lines[:10]:  # a correct answer in the target's own words
        line["correct"] = llm.generate([line["question"]], SamplingParams(max_tokens=4, temperature=0))[0].text or "so"
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:30]))
    one = [{**line, "question": "1?"} for line in lines]
    (place / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in one))
    return place


def run(folder: Path, out: str, file: str = "mine.jsonl", **options: Any) -> dict[str, Any]:
    triples = folder / file
    return training.run(str(folder / "target"), None, folder / out, None, **{"triples": triples, **options})


def test_a_run_leaves_a_whole_folder(folder: Path) -> None:
    record = run(folder, "head")
    assert record == json.loads((folder / "head" / "training.json").read_text())
    assert sorted(path.name for path in (folder / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    head = JudgeHead.load(folder / "head")
    assert head.config.threshold == record["threshold"]
    assert head.config.target_fingerprint == record["target_fingerprint"] == fingerprint(folder / "target")
    assert (head.config.width, head.config.normed, record["parameters"]) == (64, True, 65)
    held = record["held_out"]
    assert set(held["by_source"]) == {"mine"}
    own = held["by_source"]["mine"]
    assert held["macro_auc"] == own["auc"] > 0.9  # a digit is easily separated from letters
    assert own["false_accepts"] <= 0.15  # of questions that the threshold has not seen
    assert own["fine_accepted"] > 0.5
    assert record["triples"] == {"file": "mine.jsonl", "texts": 800, "tail": "mask"}
    llm = LLM(folder / "target", device="cpu", speculative_config=None)
    found = read_states(llm.target, read_triples(folder / "mine.jsonl", llm))
    asked_N = found.asked_N
    assert record["labels"] == {
        "tokens": len(found),
        "not_the_targets_own": int(asked_N.sum()),
        "fine": int((found.fine_N & asked_N).sum()),
        "random": 0,
    }
    assert int(asked_N.sum()) < len(found) - 10  # the target's own words are left out
    again = run(folder, "again")
    assert again["held_out"] == held
    assert run(folder, "negative", tail="negative")["labels"]["tokens"] == record["labels"]["tokens"] + 3 * 400


def test_more_false_accepts_lower_the_threshold(folder: Path) -> None:
    strict, loose = (run(folder, f"at{share}", false_accepts=share)["threshold"] for share in (0.0, 0.5))
    assert loose < strict


def test_what_stops_a_run_leaves_nothing(folder: Path) -> None:
    with pytest.raises(InputError, match=r"only \d+ tokens were found that are not fine .*50 are needed: use more"):
        run(folder, "none", "few.jsonl")
    with pytest.raises(InputError, match="the labels come from too few questions"):
        run(folder, "none", "one.jsonl")
    with pytest.raises(ConfigError, match=r"--false-accepts 1.0: must be a share"):
        run(folder, "none", false_accepts=1.0)
    with pytest.raises(ConfigError, match="--tail all"):
        run(folder, "none", tail="all")
    with pytest.raises(ConfigError, match="this is a file"):
        run(folder, "mine.jsonl")
    with pytest.raises(ConfigError, match="there is nothing to train on"):
        run(folder, "none", triples=None)
    (folder / "questions.jsonl").write_text('{"question": "What is 1 + 1?", "answer": 2}\n')
    mining = Mining(tasks=(str(folder / "questions.jsonl"),))
    with pytest.raises(ConfigError, match="--draft-model is needed for --task"):
        training.run(str(folder / "target"), None, folder / "none", mining)
    with pytest.raises(MismatchError, match="has another vocabulary"):
        training.run(str(folder / "target"), "zoo:draft", folder / "none", mining)
    assert not (folder / "none").exists()
