"""Verification and training compute the judge's forward pass over the library's own states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.protocols import Budget, Context
from foretoken.core.tree import TokenTree
from foretoken.forward import anatomy
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab.judge.labels import Marked, read_states
from foretoken_lab.testing import Stub
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_unit
from helpers.zoo_llms import ids, with_config

PROMPT, DRAFTED = [1, 7, 30, 12], [11, 52, 33, 74, 25]
every_state = pytest.mark.parametrize("normed", [True, False])


@pytest.fixture(scope="module", params=["llama", "stablelm"])  # with a native decoder, and without
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp("target"))


def head_of(folder: Path, *, normed: bool = True) -> JudgeHead:
    config = JudgeConfig(
        width=64, threshold=0.5, normed=normed, target=str(folder), target_fingerprint=fingerprint(folder)
    )
    return JudgeHead(config, random_unit(64, bias=0.0, spread=0.3, seed=5))


def paper(folder: Path, judge: JudgeHead, tokens: Sequence[int]) -> Tensor:
    """P(token is fine) of every token of a text, by the plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[Tensor] = []
    norm = anatomy.find(model).final_norm
    norm.register_forward_hook(lambda module, args, out: found.append((out if judge.config.normed else args[0])[0]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(tokens)]))
    return judge.forward(found[0])


class Fixed(Stub):
    """Proposes ``DRAFTED`` after the first token of every request, then nothing."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        return Draft(TokenTree(DRAFTED)) if len(context.tokens) - context.num_prompt == 1 else NO_DRAFT


def verified_difference(folder: Path, judge: JudgeHead, place: Path) -> float:
    """Largest difference between the probabilities of a draft's tokens in the engine and the plain forward pass."""
    judge.save(place)
    model = load(folder, device="cpu")
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    root = ids(with_config(None, target=model).generate([{"prompt_token_ids": PROMPT}], greedy))[0][0]
    settings = {"method": Fixed(), "verifier": "judge", "head": str(place), "num_speculative_tokens": len(DRAFTED)}
    llm = with_config(settings, target=model)
    rule: Any = llm.recipe.verifier
    found: list[Tensor] = []
    inner = rule.head.judge

    def watched(hidden_MD: Tensor) -> Tensor:
        found.append(inner(hidden_MD))
        return found[-1]

    rule.head.judge = watched
    prompts = [{"prompt_token_ids": each} for each in (PROMPT, [1, 9, 9, 40, 41])]  # two requests in one batch
    llm.generate(prompts, greedy)
    expected = paper(folder, judge, [*PROMPT, root, *DRAFTED])[-len(DRAFTED) :]
    return min(float((each - expected).abs().max()) for each in found)


def trained_difference(folder: Path, judge: JudgeHead) -> float:
    """Largest difference between the head on the states that training collects and the plain forward pass."""
    tree = TokenTree([*DRAFTED, 60, 61, 62], [-1, 0, 1, 2, 3, 1, 5, -1])
    labels = [("mine", bool(node % 2)) for node in range(len(tree))]
    found = judge.judge(read_states(load(folder, device="cpu"), [Marked(PROMPT, tree, labels)]).hidden_ND)
    worst = 0.0
    for node in range(len(tree)):
        path, above = [tree.tokens[node]], tree.parents[node]
        while above >= 0:
            path, above = [tree.tokens[above], *path], tree.parents[above]
        worst = max(worst, abs(float(found[node] - paper(folder, judge, [*PROMPT, *path])[-1])))
    return worst


@every_state
def test_a_verification_judges_by_the_paper_s_forward(normed: bool, folder: Path, tmp_path: Path) -> None:
    assert verified_difference(folder, head_of(folder, normed=normed), tmp_path) < 1e-5


def test_training_reads_the_states_of_the_paper_s_forward(folder: Path) -> None:
    assert trained_difference(folder, head_of(folder)) < 1e-5


def test_states_of_neighbouring_tokens_are_far_from_the_paper_s_forward(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = JudgeHead.judge
    monkeypatch.setattr(JudgeHead, "judge", lambda head, hidden_MD: judge(head, hidden_MD.roll(1, 0)))
    assert verified_difference(folder, head_of(folder), tmp_path) > 1e-3
    assert trained_difference(folder, head_of(folder)) > 1e-3
