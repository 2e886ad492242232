"""The judge's head: its files, refusals, and its target."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import zoo
from foretoken.core.errors import MismatchError, ModelError
from foretoken.core.tree import TokenTree
from foretoken.drafting.learned_part import CONFIG, WEIGHTS
from foretoken.drafting.logistic import Logistic
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken.train.roc import auc
from foretoken_lab.judge.labels import Marked, read_states
from foretoken_lab.judge.train import best_without_head
from helpers.heads import head as sprinter_head
from helpers.tiny_models import save_model
from helpers.zoo_llms import base, target

WIDTH = 8
NAMES = ("Tom", "Ben", "Dan", "Max", "Sam")
ORIGINAL = JudgeConfig(width=WIDTH, threshold=0.875, target="zoo:base", target_fingerprint="ab" * 32)


def head(config: JudgeConfig = ORIGINAL) -> JudgeHead:
    weight_D = torch.randn(config.width, generator=torch.Generator().manual_seed(0))
    return JudgeHead(config, Logistic(weight_D, -0.5))


def test_the_score_is_the_sigmoid_of_w_e_plus_b() -> None:
    judge, hidden_MD = head(), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    weight = judge.unit.weight_D.tolist()
    scores = [sum(w * e for w, e in zip(weight, row, strict=True)) - 0.5 for row in hidden_MD.tolist()]
    wanted = [1 / (1 + math.exp(-score)) for score in scores]
    assert judge.judge(hidden_MD).tolist() == pytest.approx(wanted, abs=1e-6)
    assert judge.judge(hidden_MD).dtype == judge.judge(hidden_MD.bfloat16()).dtype == torch.float32


def test_the_score_of_a_row_does_not_depend_on_other_rows() -> None:
    judge = head(replace(ORIGINAL, width=256))
    hidden_MD = torch.randn(33, 256, generator=torch.Generator().manual_seed(1))
    together = judge.judge(hidden_MD)
    assert together.tolist() == [float(judge.judge(row[None])[0]) for row in hidden_MD]


@pytest.mark.parametrize("normed", [True, False])
def test_a_saved_head_is_the_same(tmp_path: Path, normed: bool) -> None:
    original = head(replace(ORIGINAL, normed=normed))
    original.save(tmp_path)
    loaded = JudgeHead.load(tmp_path)
    assert loaded.config == original.config
    assert torch.equal(loaded.unit.weight_D, original.unit.weight_D)
    assert loaded.unit.bias == original.unit.bias
    settings = json.loads((tmp_path / CONFIG).read_text())
    assert settings["speculators_model_type"] == settings["speculators_config"]["algorithm"] == "judge"


def change(**settings: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**found, **settings}))

    return damage


def weights(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file({**load_file(folder / WEIGHTS), **tensors}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "has no judge"),
        (lambda folder: (folder / WEIGHTS).unlink(), "has no judge"),
        (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read"),
        (lambda folder: (folder / CONFIG).write_text("[1]"), "is not of a judge"),
        (lambda folder: (folder / CONFIG).write_text("{}"), "is not of a judge"),
        (change(speculators_model_type="eagle3"), "is not of a judge"),
        (change(speculators_config={"verifier": {}}), "cannot be read"),
        (change(speculators_config=3), "cannot be read"),
        (change(width=WIDTH + 1), "width=9 with weights"),
        (change(width="8"), "width='8'"),
        (change(threshold=1.5), "threshold=1.5 is no probability"),
        (change(threshold=float("nan")), "threshold=nan"),
        (change(threshold=True), "threshold=True"),
        (change(normed="yes"), "normed='yes'"),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20]), "cannot be read"),
        (weights(weight=torch.full((WIDTH,), torch.nan)), "NaN or infinite"),
        (weights(bias=torch.tensor([torch.inf])), "NaN or infinite"),
        (weights(bias=torch.zeros(2)), "cannot be read"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    head().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        JudgeHead.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_folders_of_other_things_are_refused(tmp_path: Path) -> None:
    sprinter_head().save(tmp_path / "sprinter")
    with pytest.raises(ModelError, match="is not of a judge"):
        JudgeHead.load(tmp_path / "sprinter")
    with pytest.raises(ModelError, match="is not of a judge"):
        JudgeHead.load(zoo.path("base"))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    target = load(save_model("llama", tmp_path), device="cpu")
    own = replace(ORIGINAL, width=64, target_fingerprint=fingerprint(tmp_path))
    head(own).check_target(target)
    with pytest.raises(MismatchError, match=r"trained for the target 'zoo:base' .*foretoken train judge --target"):
        head(replace(own, target_fingerprint="ab" * 32)).check_target(target)
    with pytest.raises(MismatchError, match=r"the judge reads 8 numbers, but .* has states of 64"):
        head(replace(own, width=8)).check_target(target)


def test_the_bundled_head_is_for_the_bundled_target() -> None:
    judge = JudgeHead.load(zoo.path("base") / "judge")
    judge.check_target(target())
    record = json.loads((zoo.path("base") / "judge" / "training.json").read_text())
    assert judge.config.threshold == record["threshold"]
    assert judge.config.target_fingerprint == record["target_fingerprint"]
    assert 0.5 < judge.config.threshold < 1.0


def test_the_bundled_head_s_record_compares_it_within_each_task_with_what_needs_no_head() -> None:
    record = json.loads((zoo.path("base") / "judge" / "training.json").read_text())
    command = record["provenance"]["command"]
    assert command.startswith("foretoken train judge --target zoo:base --draft-model zoo:draft --task ")
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", record["provenance"]["commit"])
    assert record["labels"]["fine"] >= 5000
    told = {name: each for name, each in record["held_out"]["by_source"].items() if each["fine"] >= 20}
    assert set(told) == {"arithmetic", "keys", "code", "profiles"}  # nothing is fine in json but what the target says
    for name, each in told.items():
        best = best_without_head(each)
        assert set(each["auc_of"]) == {"p", "p_over_largest", "entropy", "q", "draft_entropy", "chance"}
        assert best is not None
        assert each["auc"] > best[1] + 0.05 > 0.6, name


def test_the_bundled_head_refuses_nonsense_and_not_everything() -> None:
    """Random tokens in the target's own answers, next to its own tokens."""
    judge = JudgeHead.load(zoo.path("base") / "judge")
    generator = torch.Generator().manual_seed(0)
    questions = []
    for prompt in (f"{name} has 12 marbles. He buys {n} more. How many has he?" for n, name in enumerate(NAMES, 20)):
        (output,) = base().chat([{"role": "user", "content": prompt}], SamplingParams(max_tokens=24, temperature=0.0))
        said = [token for token in output.token_ids if token > 6]
        nonsense = torch.randint(7, 8192, (8 * len(said),), generator=generator).tolist()
        parents = [*range(-1, len(said) - 1)] * 9
        labels = [("own", True)] * len(said) + [("nonsense", False)] * len(nonsense)
        questions.append(Marked(output.prompt_token_ids, TokenTree([*said, *nonsense], parents), labels))
    found = read_states(target(), questions)
    score_N = judge.judge(found.hidden_ND)
    nonsense, own = ((score_N[found.fine_N == fine] > judge.config.threshold).float().mean() for fine in (False, True))
    assert nonsense < 0.08
    assert own > 2 * nonsense
    assert auc(score_N, found.fine_N) > 0.6  # type: ignore[operator]
