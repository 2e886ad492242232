"""Training of the judge's head (network.py): labels, fit, threshold, and its quality on held-out questions.

Paper: arXiv:2501.19309. The target stays frozen; D + 1 numbers are trained.
Differs: labels come from tasks with checkable answers (mining.py), or from a user's annotations (triples.py).
The training set contains only tokens that are not the target's own choice, because the verifier uses the judge only for
those. The other tokens are all fine and many times as many; with them the head learns to separate these two groups
instead: on the zoo's pair the area under the ROC curve on the relevant tokens fell from 0.80 to 0.67 (mean of eight
splits).
The threshold is the smallest that accepts at most a given share of the bad tokens of every task, on questions outside
of the fit, without random tokens. The figures describe a third part of the questions, separately for each task: an
area over all tasks also rewards separating the tasks. Scores without a head are reported for comparison.

Letters: N tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.core.provenance import provenance
from foretoken.engine.llm import LLM
from foretoken.methods.judge.network import JudgeConfig, JudgeHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.models.vocabulary import different_vocabulary
from foretoken.train.grouped_split import grouped_split
from foretoken.train.roc import auc
from foretoken.train.run_folder import disk_trouble, write_record
from foretoken_lab.intervals import wilson_interval
from foretoken_lab.judge.fit import fit, macro_auc
from foretoken_lab.judge.labels import Labels, Marked, read_states
from foretoken_lab.judge.mining import ABREAST, RANDOM, Mining, mine
from foretoken_lab.judge.store import Store
from foretoken_lab.judge.triples import check_tail, read_triples

TRAINED, CHOSEN_BY = 0.7, 0.15  # shares of the questions; the figures use the rest
FEWEST = 50  # minimum number of tokens of either kind


def run(
    target_name: str,
    draft_name: str | None,
    out: Path,
    mining: Mining | None,
    *,
    triples: Path | None = None,
    tail: str = "mask",
    labels_file: Path | None = None,
    false_accepts: float = 0.02,
    seed: int = 0,
    device: str = "cpu",
    report: Callable[[int], None] = lambda number: None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Collect labels, train a head, and write it: ``config.json``, ``model.safetensors``, ``training.json``.

    Args:
        target_name, draft_name: zoo name, folder or hub id; the draft is needed for mining only.
        mining: how to mine labels; None: from the triples alone.
        triples: a file of annotations.
        tail: treatment of the tokens after an annotated error.
        labels_file: stores mined questions one by one; questions that it already has are not mined again.
        false_accepts: maximum share of held-out bad tokens above the threshold.
        seed: of the split.
        report: called with the number of mined questions.
        arguments: the command line, for the record.
    Returns:
        the record that is saved as ``training.json``.
    Raises:
        ForetokenError: an option, the pair, the data or the disk stop the run; nothing is written then.
    """
    _check(draft_name, out, mining, triples, false_accepts)
    check_tail(tail)
    if labels_file is not None and mining is None:
        raise ConfigError(f"--labels {labels_file}: stores mined labels, but nothing is mined: name --task")
    # one pass over a question serves all trials of its answer
    llm = LLM(
        target_name,
        speculative_config={"method": "none"},
        device=device,
        max_num_seqs=ABREAST,
        enable_prefix_caching=True,
    )
    marked: list[Marked] = [] if triples is None else read_triples(triples, llm, tail)
    draft = None if draft_name is None or mining is None else _draft(llm, draft_name, device)
    store = None
    if labels_file is not None and draft is not None and mining is not None:
        marks = fingerprint_of(llm.target.source), fingerprint_of(draft.source)
        store = Store(labels_file, *marks, mining.choices)
    began = time.monotonic()
    mined = None if draft is None or mining is None else mine(llm, draft, mining, report, store)
    mining_ends = time.monotonic()
    every = marked if mined is None else [*marked, *mined.questions]
    labels = read_states(llm.target, every)
    asked = labels.of(labels.asked_N)
    without = without_head(asked, None if draft is None else read_states(draft, every).law_N3[labels.asked_N], seed)
    tried_N = torch.tensor([asked.sources[place] != RANDOM for place in asked.source_N.tolist()], dtype=torch.bool)
    train_N, choose_N = _split(asked, tried_N, seed)
    read = time.monotonic()
    # random tokens are used in the fit, but are too easy for the choice
    fitted = fit(asked, train_N, choose_N & tried_N, anywhere=(RANDOM,))
    judged = asked.of(choose_N & tried_N)
    threshold = threshold_of(judged, fitted.unit.probabilities(judged.hidden_ND), false_accepts)
    held_N = ~train_N & ~choose_N
    held = asked.of(held_N)
    score_N = fitted.unit.probabilities(held.hidden_ND)
    config = JudgeConfig(
        width=asked.hidden_ND.shape[1],
        threshold=threshold,
        target=target_name,
        target_fingerprint=fingerprint_of(llm.target.source),
    )
    record = {
        "method": "judge",
        "target": target_name,
        "target_fingerprint": config.target_fingerprint,
        "draft": draft_name,
        "draft_fingerprint": None if draft is None else fingerprint_of(draft.source),
        "parameters": config.width + 1,
        "normed": config.normed,
        "threshold": threshold,
        "false_accepts": false_accepts,
        "mining": None if mining is None else asdict(mining),
        "asked": {} if mined is None else mined.used,
        "answered_rightly": {} if mined is None else mined.right,
        "triples": None if triples is None else {"file": triples.name, "texts": len(marked), "tail": tail},
        "labels": {
            "tokens": len(labels),
            "not_the_targets_own": int(tried_N.sum()),
            "fine": int(asked.fine_N.sum()),
            "random": int((~tried_N).sum()),
        },
        "fit": {
            "strength": fitted.strength,
            "bad_weights": {source: round(weight, 4) for source, weight in fitted.bad_weights.items()},
            "auc_by_strength": {f"{each:g}": _rounded(area) for each, area in fitted.areas.items()},
        },
        "held_out": {
            "macro_auc": _rounded(macro_auc(held, score_N)),
            "by_source": {
                name: quality(held, score_N, threshold, {each: it_N[held_N] for each, it_N in without.items()}, name)
                for name in held.sources
            },
        },
        "seconds": {
            "mining": round(mining_ends - began, 1),
            "reading": round(read - mining_ends, 1),
            "fitting": round(time.monotonic() - read, 1),
        },
        "seed": seed,
        "threads": torch.get_num_threads(),
        "provenance": provenance(arguments),
    }
    with disk_trouble(out):
        JudgeHead(config, fitted.unit).save(out)
        write_record(out, record)
    return record


def smallest_threshold(score_N: Tensor, good_N: Tensor, false_accepts: float) -> float:
    """The smallest threshold that at most this share of the bad ones is above; 0 if any number of them may be.

    Args:
        score_N: probabilities.
        good_N: bool; at least one is bad.
    """
    bad = score_N[~good_N].sort(descending=True).values.tolist()
    allowed = math.floor(false_accepts * len(bad) + 1e-9)  # 0.02 * 50 may be a hair below 1
    return bad[allowed] if allowed < len(bad) else 0.0


def threshold_of(labels: Labels, score_N: Tensor, false_accepts: float) -> float:
    """Return the smallest threshold with at most this share of the bad tokens of every source above it.

    Args:
        labels: some of them bad.
        score_N: probabilities.
    """
    places = [labels.source_N == place for place in range(len(labels.sources))]
    kept = [(score_N[here_N], labels.fine_N[here_N]) for here_N in places if bool((~labels.fine_N[here_N]).any())]
    return max(smallest_threshold(*each, false_accepts) for each in kept)


def without_head(labels: Labels, draft_N3: Tensor | None, seed: int = 0) -> dict[str, Tensor]:
    """Return scores of tokens without a head: a baseline for heads within a task.

    Args:
        draft_N3: ``law_N3`` of the same tokens under the draft model; None: no draft model.
        seed: of the random scores.
    Returns:
        name -> [N]: ``p`` (log p of the token), ``p_over_largest``, ``entropy`` (of the target's distribution), ``q``
        and ``draft_entropy``, negated so that a confident draft scores high; and ``chance``.
    """
    p_N, over_N, entropy_N = labels.law_N3.unbind(-1)
    scores = {"p": p_N, "p_over_largest": over_N, "entropy": entropy_N}
    if draft_N3 is not None:
        scores |= {"q": draft_N3[:, 0], "draft_entropy": -draft_N3[:, 2]}
    return {**scores, "chance": torch.rand(len(labels), generator=torch.Generator().manual_seed(seed))}


def quality(
    labels: Labels,
    score_N: Tensor,
    threshold: float,
    without: Mapping[str, Tensor] | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Measure a head on the tokens for which the verifier uses it.

    Args:
        labels: tokens that are not the target's own choice.
        score_N: the head's scores.
        without: other scores, from :func:`without_head`; None: none.
        source: use the tokens of this source only; None: all tokens.
    Returns:
        ``fine``, ``bad`` (tokens); ``auc``, and ``auc_of`` each score without a head; ``accepted``, the share above the
        threshold, ``fine_accepted``, the same of the fine tokens, and ``false_accepts``, of the bad ones, with its 95 %
        interval. None if there are no tokens.
    """
    if source is not None:
        here_N = labels.source_N == labels.sources.index(source)
        here = {name: each_N[here_N] for name, each_N in (without or {}).items()}
        return quality(labels.of(here_N), score_N[here_N], threshold, here)
    accepted_N, fine_N = score_N > threshold, labels.fine_N
    fine, bad = int(fine_N.sum()), int((~fine_N).sum())
    wrong = int((accepted_N & ~fine_N).sum())
    return {
        "fine": fine,
        "bad": bad,
        "auc": _rounded(auc(score_N, fine_N)),
        "auc_of": {name: _rounded(auc(each_N, fine_N)) for name, each_N in (without or {}).items()},
        "accepted": _rounded(float(accepted_N.float().mean())) if len(labels) else None,
        "fine_accepted": _rounded(int((accepted_N & fine_N).sum()) / fine) if fine else None,
        "false_accepts": _rounded(wrong / bad) if bad else None,
        "false_accepts_interval": [round(each, 4) for each in wilson_interval(wrong, bad)] if bad else None,
    }


def best_without_head(record: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the most predictive score without a head, in either direction, and its area; None: no areas.

    Args:
        record: a result of :func:`quality`.
    """
    areas = {
        name: max(area, 1 - area) for name, area in record["auc_of"].items() if area is not None and name != "chance"
    }
    return max(areas.items(), key=lambda each: each[1], default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _check(draft: str | None, out: Path, mining: Mining | None, triples: Path | None, false_accepts: float) -> None:
    JudgeHead.check_place(out)
    if not 0 <= false_accepts < 1:
        raise ConfigError(f"--false-accepts {false_accepts}: must be a share from 0 up to, not including, 1")
    if mining is None and triples is None:
        raise ConfigError("there is nothing to train on: name --task, or give --triples FILE")
    if mining is not None and draft is None:
        raise ConfigError("--draft-model is needed for --task: its tokens are tried in the target's answers")


def _draft(llm: LLM, name: str, device: str) -> LanguageModel:
    draft = load(name, device=device)
    reason = different_vocabulary(llm.tokenizer, draft.tokenizer)
    if reason is not None:
        raise MismatchError(
            f"draft model '{name}' has another vocabulary than '{llm.target.name}' ({reason}): use a draft with the "
            "target's tokenizer"
        )
    return draft


def _split(labels: Labels, tried_N: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Split the tokens: for the fit, and for the choice of strength and threshold; every part has both kinds.

    Args:
        tried_N: bool, without random tokens.
    Raises:
        InputError: there are too few tokens of one kind.
    """
    tried = labels.fine_N[tried_N]
    for count, what in ((int(tried.sum()), "fine"), (int((~tried).sum()), "not fine")):
        if count < FEWEST:
            raise InputError(
                f"only {count} tokens were found that are {what} and not the target's own choice; {FEWEST} are "
                "needed: use more questions (--examples, --minutes), or other --task, or give --triples FILE"
            )
    generator = torch.Generator().manual_seed(seed)
    train_N = grouped_split(labels.question_N, TRAINED, generator)
    choose_N = torch.zeros_like(train_N)
    if bool((~train_N).any()):
        choose_N[~train_N] = grouped_split(labels.question_N[~train_N], CHOSEN_BY / (1 - TRAINED), generator)
    for side_N in (train_N, choose_N, ~train_N & ~choose_N):
        fine_N = labels.fine_N[side_N & tried_N]
        if not 0 < int(fine_N.sum()) < len(fine_N):
            raise InputError(
                "the labels come from too few questions: those held out have fine tokens only, or none; ask more "
                "(--examples, --minutes)"
            )
    return train_N, choose_N
