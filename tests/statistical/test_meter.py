"""The meter against the truth on the real pair: distributions of both models computed again, by the library, over the
output.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import PROMPTS, with_config

CONFIG = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4}
TEMPERATURE = 0.9


def typical(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    entropy = -(p * p.clamp_min(1e-300).log()).sum()
    stands = q * (p > min(0.09, 0.3 * float(torch.exp(-entropy))))
    return stands + (1 - stands.sum()) * p


def topk_relaxed(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    tenth = p.sort(descending=True).values[9]
    stands = q * ((p >= tenth) & (p >= p.max() - 0.1))
    return stands + (1 - stands.sum()) * p


def mixture(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return 0.9 * p + 0.1 * q


def tolerance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    stands = torch.minimum(q, 1.1 * p)
    left = (p - q).clamp(min=0)
    return stands + (1 - stands.sum()) * left / left.sum()


def exact_or_member(p: torch.Tensor, q: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    stands = torch.where(members, q, torch.minimum(p, q))
    left = (p - q).clamp(min=0)
    return stands + (1 - stands.sum()) * left / left.sum()


def p_threshold(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return exact_or_member(p, q, p >= 0.1)


def kl_threshold(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    kl = float(torch.xlogy(p, p / q).sum())
    return exact_or_member(p, q, torch.full_like(p, kl <= 0.3 and float(p.max()) <= 0.9, dtype=torch.bool))


RULES = [typical, topk_relaxed, mixture, tolerance, p_threshold, kl_threshold]


@pytest.mark.parametrize("closed_form", RULES, ids=lambda law: law.__name__)
def test_the_meter_is_the_truth_along_the_emitted_path(closed_form: Any) -> None:
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(zoo.path(name), dtype=torch.float32).eval() for name in ("base", "draft")
    )
    llm = with_config({**CONFIG, "verifier": closed_form.__name__})
    rule: Any = llm.recipe.verifier
    judge, steps = rule.verify_within, []

    def noting(draft: Any, laws: Any, rng: Any, spent: Any) -> Any:
        steps.append((laws.positions[0], len(draft), judge(draft, laws, rng, spent)))
        return steps[-1][-1]

    rule.verify_within = noting
    sums = torch.zeros(4, dtype=torch.float64)  # meter and truth, of total variation and of KL
    for prompt in PROMPTS[:3]:
        steps.clear()
        (output,) = llm.generate(
            prompt, SamplingParams(max_tokens=32, temperature=TEMPERATURE, seed=7, ignore_eos=True)
        )
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            p_MV, q_MV = (torch.softmax(each(ids).logits[0].double() / TEMPERATURE, -1) for each in (target, drafter))
        for begin, num_nodes, verdict in steps:
            for number, (tv, kl) in enumerate(zip(verdict.distortions, verdict.divergences, strict=True)):
                p = p_MV[begin + number - 1]
                e = closed_form(p, q_MV[begin + number - 1]) if number < num_nodes else p
                truth = float((e - p).clamp(min=0).sum()), float(torch.xlogy(e, e / p).nan_to_num(0.0).sum())
                assert (tv, kl) == pytest.approx(truth, abs=1e-4)
                sums += torch.tensor([tv, truth[0], kl, truth[1]])
    meter, truth, meter_kl, truth_kl = sums.tolist()
    assert truth > 0.2
    assert meter == pytest.approx(truth, rel=1e-3)
    assert meter_kl == pytest.approx(truth_kl, rel=1e-2)
