"""SPRINTER on a real pair: what its head knows, tokens per target call against the closed form, and its identity.

    python benchmarks/sprinter.py [--target zoo:base --draft zoo:draft] [--thresholds 0.8,0.7,0.6,0.5] [--json OUT]

At every draft token that the rule looks at, p and q are known: the chance a that an exact test accepts it, and what the
head said, v. Over the tokens, alpha = mean a, eta_TP = sum v a / sum a, eta_FP = sum v (1 - a) / sum (1 - a).

Closed form. Drafting goes on with chance c = alpha eta_TP + (1 - alpha) eta_FP; without a cap a call gives

    (1 + alpha (1 - eta_TP)) / (1 - c)        tokens, and with drafts of G tokens at most
    (1 - c^G) (1 + alpha (1 - eta_TP)) / (1 - c) + c^(G-1) alpha eta_TP

On the very tokens that its rates are taken from, the first would be an identity whatever the text is like. So rates are
taken from one half of the prompts and predict the other half. Drafts that their request's end has cut are left out.

Identity. d_TV of an emitted token's law = eta_FP d_TV(p, q). On the left stands the meter, per draft token. On the
right eta_FP is a share of events: of the tokens that an exact test with random numbers of its own would refuse, those
that stood untested; it knows nothing of the meter. Tokens are independent by prompt only, hence the interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.bench.workloads import BUNDLED_SUITE, read_prompts
from foretoken.core.distortion import total_variation
from foretoken.core.files import write_whole
from foretoken.core.intervals import mean_interval
from foretoken.core.provenance import provenance


@dataclass
class Step:
    """One draft and its verdict; a value per draft token in the lists.

    Attributes:
        emitted: tokens that the call gave.
        said: whether the head approved.
        trusted: whether the token stood untested.
        accepts: chance that an exact test accepts it.
        refused: whether one with numbers of its own did not.
        charged: what the meter says of it.
        cut: the request's end, not the head or the cap, ended the draft.
    """

    emitted: int
    said: list[bool]
    trusted: list[bool]
    accepts: list[float]
    refused: list[bool]
    charged: list[float]
    cut: bool


class Watch:
    """The rule `sprinter`, taking notes."""

    def __init__(self, rule: Any, most: int) -> None:
        self._rule, self._most = rule, most
        self.name, self.promise, self.laws, self.trees = rule.name, rule.promise, rule.laws, rule.trees
        self._coin = torch.Generator().manual_seed(1)
        self.steps: list[Step] = []

    def verify(self, draft: Any, target: Any, rng: Any) -> Any:
        return self.verify_within(draft, target, rng, None)

    def verify_within(self, draft: Any, target: Any, rng: Any, spent: Any) -> Any:
        verdict = self._rule.verify_within(draft, target, rng, spent)
        if not len(draft):
            return verdict
        said = [each is True for each in draft.judged.approved]
        accepts, refused = [], []
        for node, token in enumerate(draft.tree.tokens):
            if target.greedy:
                accepts.append(float(token == target.best[node]))
                refused.append(token != target.best[node])
            else:
                p_V, q_V = target.p_at(node), draft.law.q_at(node)
                accepts.append(1.0 - total_variation(p_V, q_V))
                u = float(torch.rand((), generator=self._coin))
                refused.append(u * float(q_V[token]) > float(p_V[token]))
        last = len(draft) - 1
        self.steps.append(
            Step(
                len(verdict.path) + 1,
                said,
                [yes and node < last for node, yes in enumerate(said)],
                accepts,
                refused,
                list(verdict.distortions[: len(draft)]),
                len(draft) < self._most and said[-1],
            )
        )
        return verdict


@dataclass
class Rates:
    alpha: float
    eta_fp: float
    eta_tp: float

    @classmethod
    def of(cls, prompts: Sequence[Sequence[Step]]) -> Rates:
        pairs = [pair for steps in prompts for step in steps for pair in zip(step.said, step.accepts, strict=True)]
        accepted = sum(a for _, a in pairs)
        approved = sum(a for v, a in pairs if v)
        wrongly = sum(1.0 - a for v, a in pairs if v)
        refused = len(pairs) - accepted
        return cls(accepted / len(pairs), wrongly / refused if refused else 0.0, approved / accepted)

    def tokens_per_call(self, most: int | None) -> float:
        goes_on = self.alpha * self.eta_tp + (1.0 - self.alpha) * self.eta_fp
        endless = (1.0 + self.alpha * (1.0 - self.eta_tp)) / (1.0 - goes_on)
        if most is None:
            return endless
        return (1.0 - goes_on**most) * endless + goes_on ** (most - 1) * self.alpha * self.eta_tp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--suite", type=Path, default=BUNDLED_SUITE)
    parser.add_argument("--thresholds", default="0.8,0.7,0.6,0.5")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-draft", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM(options.target, dtype=options.dtype, max_num_seqs=1)
    prompts = [prompt.text for prompt in read_prompts(options.suite)]
    results = [
        _measure(llm, prompts, float(temperature), float(threshold), options)
        for temperature in options.temperatures.split(",")
        for threshold in options.thresholds.split(",")
    ]
    _show(results)
    if options.json is not None:
        facts = provenance(sys.argv, **{key: str(value) for key, value in vars(options).items()})
        write_whole(options.json, json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


def _measure(llm: LLM, texts: Sequence[str], temperature: float, threshold: float, options: Any) -> dict[str, Any]:
    engine = llm.with_method(
        {"method": "sprinter", "model": options.draft, "threshold": threshold, "max_draft": options.max_draft}
    )
    watch = Watch(engine.recipe.verifier, options.max_draft)
    engine.engine.recipe = replace(engine.recipe, verifier=watch)
    prompts = []
    for seed, text in enumerate(texts):
        watch.steps = []
        params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        (output,) = engine.chat([{"role": "user", "content": text}], params)
        assert output.error is None, output.error
        prompts.append([step for step in watch.steps if not step.cut])
    rates = Rates.of(prompts)
    halves = prompts[0::2], prompts[1::2]
    predicted = [
        {
            "measured": _mean([float(step.emitted) for steps in half for step in steps]),
            "closed_form": Rates.of(other).tokens_per_call(None),
            "closed_form_with_cap": Rates.of(other).tokens_per_call(options.max_draft),
        }
        for half, other in (halves, halves[::-1])
    ]
    return {
        "temperature": temperature,
        "threshold": threshold,
        "alpha": rates.alpha,
        "eta_fp": rates.eta_fp,
        "eta_tp": rates.eta_tp,
        "drafts": sum(len(steps) for steps in prompts),
        "draft_tokens": sum(len(step.said) for steps in prompts for step in steps),
        "tokens_per_call": _mean([float(step.emitted) for steps in prompts for step in steps]),
        "halves": predicted,
        "identity": _identity(prompts),
    }


def _identity(prompts: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Both sides, and their difference with its interval by prompt (ratios of sums, linearised)."""
    steps = [step for each in prompts for step in each]
    num_tokens = sum(len(step.said) for step in steps)
    distance = sum(1.0 - a for step in steps for a in step.accepts) / num_tokens
    refused = sum(sum(step.refused) for step in steps)
    passed = sum(r and t for step in steps for r, t in zip(step.refused, step.trusted, strict=True))
    eta_fp = passed / refused if refused else 0.0
    meter = sum(sum(step.charged) for step in steps) / num_tokens
    terms = []
    for each in prompts:
        own = sum(len(step.said) for step in each)
        charged = sum(sum(step.charged) for step in each)
        apart = sum(1.0 - a for step in each for a in step.accepts)
        off = sum(sum(step.refused) for step in each)
        through = sum(r and t for step in each for r, t in zip(step.refused, step.trusted, strict=True))
        # d(meter) - d(eta * distance), each a ratio of sums over prompts
        share = len(prompts) / num_tokens
        terms.append(
            meter
            - eta_fp * distance
            + share * (charged - meter * own)
            - eta_fp * share * (apart - distance * own)
            - (distance * len(prompts) / refused * (through - eta_fp * off) if refused else 0.0)
        )
    mean, interval = mean_interval(terms)
    return {
        "meter": meter,
        "eta_fp_of_events": eta_fp,
        "distance": distance,
        "product": eta_fp * distance,
        "difference": mean,
        "interval": interval,
        "refused": refused,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="SPRINTER; predictions of each half of the prompts from the other")
    for name in (
        "T",
        "threshold",
        "alpha",
        "eta_FP",
        "eta_TP",
        "tokens/call",
        "half: measured",
        "closed form",
        "capped",
    ):
        table.add_column(name, justify="right")
    for name in ("meter", "eta_FP x TV", "difference, 95 %"):
        table.add_column(name, justify="right")
    for each in results:
        identity = each["identity"]
        low, high = identity["interval"]
        table.add_row(
            f"{each['temperature']:g}",
            f"{each['threshold']:g}",
            *(f"{each[name]:.2f}" for name in ("alpha", "eta_fp", "eta_tp", "tokens_per_call")),
            *(
                " ".join(f"{half[name]:.2f}" for half in each["halves"])
                for name in ("measured", "closed_form", "closed_form_with_cap")
            ),
            f"{identity['meter']:.4f}",
            f"{identity['product']:.4f}",
            f"{identity['difference']:+.4f} ({low:+.4f} to {high:+.4f})",
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
