"""Training of SPRINTER's head (methods/sprinter/network.py): a logistic regression on cached states of the draft.

    pre, post   the state alone, as published
    drawn       the facts of the token without a penalty, and the state with a penalty chosen by held-out loss; the
                strictest penalty leaves almost no weight on the state

Paper: arXiv:2502.04557 and its released code: binary cross-entropy, Adam, learning rate 5e-4, batches of 10, 20 epochs,
70 % of the examples for training. Only the head is trained.
Differs: the split is by document, because neighbouring examples are similar; the epoch with the lowest held-out loss is
kept, not the one with the best accuracy at 0.5, because the user sets the threshold; soft labels are optional. L-BFGS
fits ``drawn`` on standardised inputs. Epoch and penalty are chosen on the same examples that the figures describe.

Letters: N examples, D width.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.distortion import Spent, total_variation
from foretoken.core.draft import Approvals, Draft
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.provenance import provenance
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.drafting.logistic import Logistic
from foretoken.engine.before_weights import check_vocabulary
from foretoken.engine.llm import LLM
from foretoken.methods.sprinter.labels import LONGEST_PROMPT, Collecting, Examples, collect, prompts_of
from foretoken.methods.sprinter.network import FACTS, FEATURES, HeadConfig, SprinterHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.last_states import LastStates
from foretoken.models.load import load
from foretoken.train.acceptance import answers
from foretoken.train.grouped_split import grouped_split
from foretoken.train.mixture import Source
from foretoken.train.regression import Standard, regress
from foretoken.train.roc import auc
from foretoken.train.run_folder import disk_trouble, write_record

RATE, BATCH, EPOCHS, TRAINED = 5e-4, 10, 20, 0.7
PENALTIES = tuple(10.0**power for power in range(2, -5, -1))  # on the state, relative to a mean loss; strictest first
FEWEST = 100  # examples


@dataclass(frozen=True)
class Fitted:
    """A head's weights, and its quality on the held-out documents.

    Attributes:
        weight_D, bias: of the epoch or penalty with the lowest held-out loss.
        chosen: that epoch, from 1, or that penalty.
        held_out: ``loss`` (nats), ``auc`` (None where one class is missing), ``accuracy`` at 0.5, ``acceptable`` (share
            of labels above a half), ``examples``.
        curve: [mean training loss, held-out loss] of each epoch or penalty.
        held_N: bool, the examples that were held out.
    """

    weight_D: Tensor
    bias: float
    chosen: float
    held_out: dict[str, float | int | None]
    curve: list[list[float]]
    held_N: Tensor

    def scores(self, x_ND: Tensor) -> Tensor:
        """Logits of examples, [N]."""
        return x_ND @ self.weight_D + self.bias


def fit(
    x_ND: Tensor, y_N: Tensor, document_N: Tensor, *, seed: int = 0, epochs: int = EPOCHS, rate: float = RATE
) -> Fitted:
    """Fit a logistic regression.

    Args:
        x_ND: features.
        y_N: labels in [0, 1].
        document_N: the examples of one document are all used for training, or all held out.
    """
    generator = torch.Generator().manual_seed(seed)
    train_N = _trained_on(document_N, generator)
    x, y, x_held, y_held = x_ND[train_N], y_N[train_N], x_ND[~train_N], y_N[~train_N]
    weight_D, bias = torch.zeros(x_ND.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([weight_D, bias], lr=rate)
    curve: list[list[float]] = []
    best: tuple[float, int, Tensor, float] | None = None
    for epoch in range(1, epochs + 1):
        losses = []
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(x[rows] @ weight_D + bias, y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            held = float(F.binary_cross_entropy_with_logits(x_held @ weight_D + bias, y_held))
        curve.append([round(sum(losses) / len(losses), 5), round(held, 5)])
        if best is None or held < best[0]:
            best = held, epoch, weight_D.detach().clone(), float(bias.detach())
    assert best is not None
    loss_held, epoch, weight, offset = best
    return Fitted(weight, offset, epoch, quality(x_held @ weight + offset, y_held, loss_held), curve, ~train_N)


def fit_beside_facts(x_ND: Tensor, y_N: Tensor, document_N: Tensor, *, seed: int = 0) -> Fitted:
    """Fit the logistic regression of ``drawn``: a penalty on the state, none on the facts after it.

    Args:
        x_ND: features: the state, and then the facts.
        y_N, document_N: see :func:`fit`.
    """
    train_N = _trained_on(document_N, torch.Generator().manual_seed(seed))
    standard = Standard.of(x_ND[train_N])
    x, y, x_held, y_held = standard(x_ND[train_N]), y_N[train_N], x_ND[~train_N], y_N[~train_N]
    weight_N = torch.full((len(y),), 1.0 / len(y))
    of_state_D = torch.ones(x_ND.shape[1])
    of_state_D[-len(FACTS) :] = 0.0
    numbers = torch.zeros(x_ND.shape[1] + 1)
    curve: list[list[float]] = []
    best: tuple[float, float, Logistic] | None = None
    for penalty in PENALTIES:
        numbers = regress(x, y, weight_N, penalty * of_state_D, numbers)
        unit = standard.fold(numbers[:-1], float(numbers[-1]))
        losses = [
            float(F.binary_cross_entropy_with_logits(rows @ unit.weight_D + unit.bias, labels))
            for rows, labels in ((x_ND[train_N], y), (x_held, y_held))
        ]
        curve.append([round(loss, 5) for loss in losses])
        if best is None or losses[1] < best[0]:
            best = losses[1], penalty, unit
    assert best is not None
    loss_held, penalty, unit = best
    score_N = x_held @ unit.weight_D + unit.bias
    return Fitted(unit.weight_D, unit.bias, penalty, quality(score_N, y_held, loss_held), curve, ~train_N)


def _trained_on(document_N: Tensor, generator: torch.Generator) -> Tensor:
    train_N = grouped_split(document_N, TRAINED, generator)
    if bool(train_N.all()):  # one document: its end is held out
        train_N[int(len(train_N) * TRAINED) :] = False
    return train_N


BASELINES = ("q", "entropy", "margin")


def baselines(facts_N3: Tensor) -> dict[str, Tensor]:
    """Return scores without a head for each example; a higher score predicts acceptance."""
    log_q_N, entropy_N, margin_N = facts_N3.unbind(-1)
    return dict(zip(BASELINES, (log_q_N, -entropy_N, margin_N), strict=True))


def by_source(scores: Mapping[str, Tensor], y_N: Tensor, source_N: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the ROC AUC of several scores within each source; a pooled AUC would reward separating the sources.

    Returns:
        source -> ``examples``, ``acceptable``, and ``auc`` of every score (None where one class is missing).
    """
    found = {}
    good_N = y_N > 0.5
    for source in sorted(set(source_N)):
        here_N = torch.tensor([each == source for each in source_N])
        areas = {name: auc(score_N[here_N], good_N[here_N]) for name, score_N in scores.items()}
        found[source] = {
            "examples": int(here_N.sum()),
            "acceptable": round(float(good_N[here_N].float().mean()), 4),
            "auc": {name: None if area is None else round(area, 4) for name, area in areas.items()},
        }
    return found


def quality(score_N: Tensor, y_N: Tensor, loss: float) -> dict[str, float | int | None]:
    """Measure how well scores (logits) separate acceptable tokens from others."""
    good_N = y_N > 0.5
    area = auc(score_N, good_N)
    return {
        "loss": round(loss, 4),
        "auc": None if area is None else round(area, 4),
        "accuracy": round(float(((score_N > 0) == good_N).float().mean()), 4),
        "acceptable": round(float(good_N.float().mean()), 4),
        "examples": len(y_N),
    }


def run(
    target_name: str,
    draft_name: str,
    sources: Sequence[Source],
    out: Path,
    how: Collecting,
    *,
    feature: str = "drawn",
    soft: bool = False,
    device: str = "cpu",
    report: Callable[[int], None] = lambda number: None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Collect examples, train a head, and write it: ``config.json``, ``model.safetensors``, ``training.json``.

    Args:
        target_name, draft_name: zoo name, folder or hub id.
        sources: the text; every document is read once.
        feature: input of the head: "pre", "drawn" or "post".
        soft: train on the acceptance probability instead of the label.
        report: called with the number of examples so far.
        arguments: the command line, for the record.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: the pair, the data or the disk stop the run; it writes nothing then.
    """
    SprinterHead.check_place(out)
    if feature not in FEATURES:
        raise ConfigError(f"--feature {feature}: must be pre, drawn or post")
    check_vocabulary(target_name, draft_name)
    target, draft = load(target_name, device=device), load(draft_name, device=device)
    LastStates(draft)  # refuse a draft that cannot carry a head before anything is collected
    config = HeadConfig(
        feature=feature,
        width=draft.config.get_text_config(decoder=True).hidden_size,
        target=target_name,
        target_fingerprint=fingerprint_of(target.source),
        draft=draft_name,
        draft_fingerprint=fingerprint_of(draft.source),
    )
    longest = min(LONGEST_PROMPT, *(model.max_length - how.steps - 2 for model in (target, draft)))
    read: list[str] = []
    prompts = prompts_of(sources, target.tokenizer, longest, how, read)
    began = time.monotonic()
    examples = collect(target, draft, prompts, how, report)
    collected = time.monotonic()
    y_N = _labels(examples, how.ratio, soft)
    found = {}
    for each in FEATURES:
        fitting = fit_beside_facts if each == "drawn" else fit
        found[each] = fitting(examples.features(each), y_N, examples.document_N, seed=how.seed)
    held_N = found[feature].held_N  # the same for every feature: the split depends on the seed
    scores = {each: fitted.scores(examples.features(each)) for each, fitted in found.items()}
    scores |= baselines(examples.facts_N3)
    source_N = [read[document] for document in examples.document_N[held_N].tolist()]
    record = {
        "method": "sprinter",
        "target": target_name,
        "target_fingerprint": config.target_fingerprint,
        "draft": draft_name,
        "draft_fingerprint": config.draft_fingerprint,
        "feature": feature,
        "parameters": config.num_inputs + 1,
        "soft": soft,
        "collecting": asdict(how),
        "examples": len(examples),
        "documents": int(examples.document_N[-1]) + 1,
        "acceptable": round(float((y_N > 0.5).float().mean()), 4),
        "optimiser": _optimiser(feature, found[feature]),
        "held_out": {each: fitted.held_out for each, fitted in found.items()},
        "held_out_by_source": by_source(
            {name: score_N[held_N] for name, score_N in scores.items()}, y_N[held_N], source_N
        ),
        "baselines": list(BASELINES),
        "curve": found[feature].curve,
        "seconds": {"collecting": round(collected - began, 1), "training": round(time.monotonic() - collected, 1)},
        "threads": torch.get_num_threads(),
        "sources": [{"name": each.name, "share": each.share} for each in sources],
        "provenance": provenance(arguments),
    }
    with disk_trouble(out):
        SprinterHead(config, Logistic(found[feature].weight_D, found[feature].bias)).save(out)
        write_record(out, record)
    return record


def _optimiser(feature: str, fitted: Fitted) -> dict[str, Any]:
    if feature == "drawn":
        return {"penalties": list(PENALTIES), "penalty_kept": fitted.chosen}
    return {"rate": RATE, "batch": BATCH, "epochs": EPOCHS, "epoch_kept": fitted.chosen}


def _labels(examples: Examples, ratio: float, soft: bool) -> Tensor:
    if len(examples) < FEWEST:
        raise InputError(
            f"only {len(examples)} examples could be collected, {FEWEST} are needed: give more text or more --minutes"
        )
    y_N = examples.labels(ratio, soft=soft)
    if not 0 < int((y_N > 0.5).sum()) < len(y_N):
        what = "all" if bool((y_N > 0.5).all()) else "none"
        raise InputError(
            f"{what} of the {len(examples)} draft tokens are acceptable to the target: the labels have only one class"
        )
    return y_N


# ---------------------------------------------------------------------- measurement in the engine


class Watched(Verifier):
    """Wrap the verifier of a recipe, and compare the head's decisions with the exact test.

    Let a be the probability Σ min(p, q) that the exact test accepts a drafted token, and v the head's decision:
    alpha = mean a, eta_fp = Σ v (1 - a) / Σ (1 - a), eta_tp = Σ v a / Σ a, over the tokens reached. With `pre`
    the head does not depend on the token, and eta_fp is P(v | the token would be rejected); with `post` a is that of
    the token itself, min(1, p/q).
    """

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.name, self.promise, self.laws, self.trees = rule.name, rule.promise, rule.laws, rule.trees
        self.needs = rule.needs
        self.tokens = self.accepted = self.said_yes = self.yes_and_accepted = 0.0

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        return self.verify_within(draft, target, rng, None)

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        verdict: Verdict = self._rule.verify_within(draft, target, rng, spent)
        for node in range(min(len(verdict.path) + 1, len(draft))):
            assert isinstance(draft.evidence, Approvals)
            said = draft.evidence.approved[node]
            if said is not None:
                chance = acceptance(draft, target, node)
                self.tokens += 1
                self.accepted += chance
                self.said_yes += said
                self.yes_and_accepted += said * chance
        return verdict

    def rates(self) -> dict[str, float | None]:
        """Return alpha, eta_fp and eta_tp; None if no token was judged."""
        refused = self.tokens - self.accepted
        return {
            "alpha": _share(self.accepted, self.tokens),
            "eta_fp": _share(self.said_yes - self.yes_and_accepted, refused),
            "eta_tp": _share(self.yes_and_accepted, self.accepted),
        }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def acceptance(draft: Draft, target: Laws, node: int) -> float:
    """Return the probability that an exact test accepts: a sample at this node, or the token itself if the head read
    it.
    """
    token = draft.tree.tokens[node]
    if target.greedy:
        return float(token == target.best[node])
    p_V, q_V = target.p_at(node), draft.law.q_at(node)  # type: ignore[union-attr]
    if isinstance(draft.evidence, Approvals) and draft.evidence.saw_token:
        return min(1.0, float(p_V[token]) / float(q_V[token]))
    return 1.0 - total_variation(p_V, q_V)


def measure(
    target: str,
    config: Mapping[str, Any],
    prompts: Sequence[str],
    temperatures: Sequence[float] = (0.0, 1.0),
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Run the drafter `sprinter` with its own verifier on prompts, and measure it.

    Args:
        target: zoo name or folder.
        config: a ``speculative_config`` of this drafter.
        options: of the engine.
    Returns:
        for each temperature ("T=0", "T=1"): ``tokens_per_step``, ``steps`` (target calls), ``tokens``, ``drafted``,
        ``distortion`` and ``kl`` a token (None: infinite, as at temperature 0), ``alpha``, ``eta_fp``, ``eta_tp``.
        Empty if no prompt fits.
    """
    llm = LLM(target, speculative_config=dict(config), **options)
    found = {}
    for temperature in temperatures:
        rule = Watched(llm.recipe.verifier)
        watched = llm.with_method({"method": llm.recipe.drafter, "verifier": rule})
        outputs, total = answers(watched, prompts, temperature), Metrics()
        if not outputs:
            break
        for output in outputs:
            total.add(output.metrics)
        found[f"T={temperature:g}"] = {
            "tokens_per_step": round(total.tokens_per_step, 3),
            "steps": total.num_steps,
            "tokens": total.num_tokens,
            "drafted": total.num_draft_tokens,
            "distortion": round(total.distortion, 4),
            "kl": round(total.kl, 4) if math.isfinite(total.kl) else None,
            **rule.rates(),
            "prompts": len(outputs),
        }
    llm.close()
    return found
