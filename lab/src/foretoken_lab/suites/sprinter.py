"""SPRINTER on a real pair: what its head knows, tokens per target call against the closed form, and its identity.

At every draft token that the rule looks at, p and q are known: the chance a that an exact test accepts it, and what the
head's output, v. Over the tokens, alpha = mean a, eta_TP = sum v a / sum a, eta_FP = sum v (1 - a) / sum (1 - a).

Closed form. Drafting goes on with chance c = alpha eta_TP + (1 - alpha) eta_FP; without a cap a call gives

    (1 + alpha (1 - eta_TP)) / (1 - c)        tokens, and with drafts of G tokens at most
    (1 - c^G) (1 + alpha (1 - eta_TP)) / (1 - c) + c^(G-1) alpha eta_TP

On the very tokens that its rates are taken from, the first would be an identity whatever the text is like. So rates are
taken from one half of the prompts and predict the other half. Drafts that their request's end has cut are left out.

Identity. d_TV of an emitted token's distribution = eta_FP d_TV(p, q). On the left stands the meter, per draft token. On
the right eta_FP is a share of events: of the tokens that an exact test with random numbers of its own would refuse,
those that stood untested; it knows nothing of the meter. Tokens are independent by prompt only, hence the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.core.distortion import Spent
from foretoken.core.draft import Approvals, Draft
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.methods.sprinter.train import acceptance
from foretoken.methods.sprinter.verifier import SprinterVerifier
from foretoken_lab.intervals import mean_interval

_CAP = 20


@dataclass
class Step:
    """One draft and its verdict; a value per draft token in the lists.

    Attributes:
        emitted: tokens that the call gave.
        approved: whether the head approved.
        trusted: whether the token stood untested.
        accepts: chance that an exact test accepts it.
        refused: whether one with numbers of its own did not.
        charged: what the meter says of it.
        cut: the request's end, not the head or the cap, ended the draft.
    """

    emitted: int
    approved: list[bool]
    trusted: list[bool]
    accepts: list[float]
    refused: list[bool]
    charged: list[float]
    cut: bool


class Watch(SprinterVerifier):
    """The rule, taking notes of every draft."""

    def __init__(self, config: Any, most: int) -> None:
        super().__init__(config)
        self._most = most
        self._coin = torch.Generator().manual_seed(1)
        self.steps: list[Step] = []

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        verdict = super().verify_within(draft, target, rng, spent)
        if not len(draft) or not isinstance(draft.evidence, Approvals):
            return verdict
        approved = [each is True for each in draft.evidence.approved]
        accepts, refused = [], []
        for node, token in enumerate(draft.tree.tokens):
            if target.greedy:
                accepts.append(float(token == target.best[node]))
                refused.append(token != target.best[node])
            else:
                p_V, q_V = target.p_at(node), draft.law.q_at(node)  # type: ignore[union-attr]
                accepts.append(acceptance(draft, target, node))
                u = float(torch.rand((), generator=self._coin))
                refused.append(u * float(q_V[token]) > float(p_V[token]))
        last = len(draft) - 1
        self.steps.append(
            Step(
                len(verdict.path) + 1,
                approved,
                [yes and node < last for node, yes in enumerate(approved)],
                accepts,
                refused,
                list(verdict.distortions[: len(draft)]),
                len(draft) < self._most and approved[-1],
            )
        )
        return verdict


@dataclass
class Rates:
    """What the head knows, over some prompts."""

    alpha: float
    eta_fp: float
    eta_tp: float

    @classmethod
    def of(cls, prompts: Sequence[Sequence[Step]]) -> Rates:
        """Rates of all draft tokens of these prompts."""
        pairs = [pair for steps in prompts for step in steps for pair in zip(step.approved, step.accepts, strict=True)]
        accepted = sum(a for _, a in pairs)
        approved = sum(a for v, a in pairs if v)
        wrongly = sum(1.0 - a for v, a in pairs if v)
        refused = len(pairs) - accepted
        return cls(
            accepted / len(pairs), wrongly / refused if refused else 0.0, approved / accepted if accepted else 0.0
        )

    def tokens_per_call(self, most: int | None) -> float:
        """The closed form; ``most`` draft tokens a call, None: no cap."""
        goes_on = self.alpha * self.eta_tp + (1.0 - self.alpha) * self.eta_fp
        endless = (1.0 + self.alpha * (1.0 - self.eta_tp)) / (1.0 - goes_on) if goes_on < 1.0 else float("inf")
        if most is None:
            return endless
        if goes_on >= 1.0:
            return most + self.alpha * self.eta_tp
        return (1.0 - goes_on**most) * endless + goes_on ** (most - 1) * self.alpha * self.eta_tp


def study(run: Run) -> list[Section]:
    """Formula and identity for every recipe of the run that drafts with ``sprinter``."""
    rows = [
        {"method": method.label, **_observe(run, method.label, method.config)}
        for method in run.methods
        if method.config["method"] == "sprinter"
    ]
    title = "SPRINTER; predictions of each half of the prompts from the other"
    return [Section("closed_form_and_identity", title, COLUMNS, rows)]


def _observe(run: Run, label: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = run.engines[label]
    most = engine.recipe.num_nodes
    watch = Watch(engine.recipe.verifier.config, most)
    watched = engine.with_method({**config, "verifier": watch})
    prompts = []
    for number, prompt in enumerate(run.prompts):
        watch.steps = []
        params = replace(run.params, seed=(run.params.seed or 0) + number)
        asked = watched.chat_prompt([{"role": "user", "content": prompt.text}]) if run.chat else prompt.text
        (output,) = watched.generate([asked], params)
        if output.error is not None:
            raise ForetokenError(f"{label}, {prompt.place}: {output.error}")
        prompts.append([step for step in watch.steps if not step.cut])
    rates = Rates.of(prompts)
    halves = prompts[0::2], prompts[1::2]
    predicted = [
        {
            "measured": _mean([float(step.emitted) for steps in half for step in steps]),
            "closed_form": Rates.of(other).tokens_per_call(None),
            "closed_form_with_cap": Rates.of(other).tokens_per_call(most),
        }
        for half, other in (halves, halves[::-1])
    ]
    return {
        "temperature": run.params.temperature,
        "alpha": rates.alpha,
        "eta_fp": rates.eta_fp,
        "eta_tp": rates.eta_tp,
        "drafts": sum(len(steps) for steps in prompts),
        "draft_tokens": sum(len(step.approved) for steps in prompts for step in steps),
        "tokens_per_call": _mean([float(step.emitted) for steps in prompts for step in steps]),
        "halves": predicted,
        "identity": _identity(prompts),
    }


def _identity(prompts: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Both sides, and their difference with its interval by prompt (ratios of sums, linearised)."""
    steps = [step for each in prompts for step in each]
    num_tokens = sum(len(step.approved) for step in steps)
    distance = sum(1.0 - a for step in steps for a in step.accepts) / num_tokens
    refused = sum(sum(step.refused) for step in steps)
    passed = sum(r and t for step in steps for r, t in zip(step.refused, step.trusted, strict=True))
    eta_fp = passed / refused if refused else 0.0
    meter = sum(sum(step.charged) for step in steps) / num_tokens
    terms = []
    for each in prompts:
        own = sum(len(step.approved) for step in each)
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _halves(name: str) -> Column:
    header = {"measured": "halves,\nmeasured", "closed_form": "closed\nform", "closed_form_with_cap": "with\ncap"}[name]
    return Column(
        header, lambda row: " ".join("–" if half[name] is None else f"{half[name]:.2f}" for half in row["halves"])
    )


def _difference(row: Any) -> str:
    low, high = row["identity"]["interval"] or (float("nan"), float("nan"))
    return f"{row['identity']['difference']:+.4f} ({low:+.4f} to {high:+.4f})"


COLUMNS = (
    Column("method", lambda row: row["method"]),
    Column("alpha", lambda row: row["alpha"]),
    Column("eta_FP", lambda row: row["eta_fp"]),
    Column("eta_TP", lambda row: row["eta_tp"]),
    Column("tokens\n/call", lambda row: row["tokens_per_call"]),
    *(_halves(name) for name in ("measured", "closed_form", "closed_form_with_cap")),
    Column("meter", lambda row: row["identity"]["meter"], "{:.4f}"),
    Column("eta_FP\nx TV", lambda row: row["identity"]["product"], "{:.4f}"),
    Column("difference, 95 %", _difference),
)

SUITE = Suite(
    name="sprinter",
    question="do SPRINTER's closed form and identity hold on a real pair, and what does its threshold trade?",
    draft_model="zoo:draft",
    methods=(
        *(f"sprinter+threshold={value}+max_draft={_CAP}" for value in (0.8, 0.7, 0.6, 0.5)),
        "draft_model+verifier=ratio+num_speculative_tokens=4",
    ),
    options={"max_tokens": 128, "ignore_eos": True, "repeats": 1, "dtype": "float32", "temperature": 1.0},
    study=study,
)
