"""Does a second reading know which refused tokens of a draft are fine? Its scores next to those that need no reading.

A draft model's token is tried wherever it differs from the target's, and is fine if the target, going on from it, still
answers rightly (judge/mining.py); questions are held out. Every such token then begins a chain of the draft
model's, which the target reads twice. Scores of fine tokens against wrong ones, within a task, as areas under the ROC
curve, with an interval over resampled questions:

    p0      minus the distance below the top, log p0(d) - max log p0: what a margin (tolerance, ...) decides by
    q       log q(d), of the draft model
    judge   the trained head, where the target has one
    D       log pr(d) - log p0(d): what the second reading adds
    pr      as p0, of the second reading alone: alpha = 1
    mix     as p0, of the mix at this alpha
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.bench.suite import Column, Section
from foretoken.core.errors import ModelError
from foretoken.drafting import learned_part
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.judge.network import JudgeHead
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import prefill
from foretoken.options.sampling import SamplingParams
from foretoken.train.roc import auc
from foretoken_lab.judge.labels import read_states
from foretoken_lab.judge.mining import RANDOM, Mining, mine

RESAMPLES = 300
Prompts = Mapping[str, tuple[str, int]]  # name -> prompt to reflect, tokens of the answer repeated after it


@dataclass(frozen=True, slots=True)
class _Refused:
    """A drafted token that is not the target's choice.

    Attributes:
        question: its number.
        begin: where the answer begins in ``context``.
        context: the tokens before it.
        judged: the head's score; None without a head.
    """

    task: str
    fine: bool
    question: int
    begin: int
    context: list[int]
    token: int
    judged: float | None


def judgement(
    plain: LLM,
    draft: str,
    tasks: Sequence[str],
    count: int,
    prompts: Prompts,
    alphas: Sequence[float],
    nodes: int,
    progress: Callable[[str], None],
) -> Section:
    """The table.

    Args:
        plain: the target, decoding plainly.
        draft: name or folder of the draft model.
        count: questions, of all tasks together.
        nodes: tokens of a draft.
        progress: called with the present stage.
    """
    progress("labels by behaviour")
    writer = LLM(draft, speculative_config={"method": "none"}, dtype=str(plain.target.dtype).removeprefix("torch."))
    refused = _refused(plain, writer.target, tasks, count)
    prompts_of = [{"prompt_token_ids": [*each.context, each.token]} for each in refused]
    length = SamplingParams(max_tokens=max(1, nodes - 1), ignore_eos=True)
    chains = writer.generate(prompts_of, length) if refused else []  # none: no question was answered rightly
    drafts = [[each.token, *chain.token_ids][:nodes] for each, chain in zip(refused, chains, strict=True)]
    rows = []
    for name, (prompt, prefix) in prompts.items():
        progress(f"second readings, {name}")
        ids = plain.tokenizer.encode(prompt, add_special_tokens=False) if prompt else []
        scores = [
            _scores(plain.target, writer.target, each, drafted, ids, prefix, alphas)
            for each, drafted in zip(refused, drafts, strict=True)
        ]
        for task in tasks:
            own = [number for number, each in enumerate(refused) if each.task == task]
            if own:
                rows.append(_row(name, task, [refused[number] for number in own], [scores[number] for number in own]))
    columns = (
        Column("prompt", lambda row: row["prompt"]),
        Column("task", lambda row: row["task"]),
        Column("fine", lambda row: row["fine"], "{}"),
        Column("wrong", lambda row: row["wrong"], "{}"),
        *(Column(score, _area(score)) for score in ("p0", "q", "judge", "D", "pr", *(f"mix {a}" for a in alphas))),
    )
    return Section("judgement", "fine against wrong among refused tokens: area under the curve, 95 %", columns, rows)


def _refused(plain: LLM, draft: LanguageModel, tasks: Sequence[str], count: int) -> list[_Refused]:
    mined = mine(plain, draft, Mining(tasks=tuple(tasks), count=count, choices=1, held_out=True))
    labels = read_states(plain.target, mined.questions)
    try:
        judged = learned_part.find(JudgeHead, None, plain.target).judge(labels.hidden_ND).tolist()
    except ModelError:  # this target has no head
        judged = [None] * len(labels)
    places = [
        (number, question, node, label)
        for number, question in enumerate(mined.questions)
        for node, label in enumerate(question.labels)
        if label is not None
    ]
    found = []
    for (number, question, node, (source, fine)), asked, score in zip(
        places, labels.asked_N.tolist(), judged, strict=True
    ):
        if asked and source != RANDOM:
            tree = question.tree
            context = [*question.prompt, *(tree.tokens[each] for each in tree.path_to(node)[:-1])]
            found.append(_Refused(source, fine, number, len(question.prompt), context, tree.tokens[node], score))
    return found


@torch.inference_mode()
def _scores(
    target: LanguageModel,
    draft: LanguageModel,
    refused: _Refused,
    drafted: Sequence[int],
    prompt: Sequence[int],
    prefix: int,
    alphas: Sequence[float],
) -> dict[str, float]:
    count, token = len(refused.context), refused.token
    # as methods/reflective/verifier.py lays them out
    repeated = refused.context[max(count - prefix, min(refused.begin, count - 1)) :]
    logits_MV = _rows(target, refused.context, [*drafted, *prompt, *repeated])
    z0_V, zr_V = logits_MV[0], logits_MV[-1]
    logp0_V, logpr_V = z0_V.log_softmax(-1), zr_V.log_softmax(-1)
    found = {
        "p0": _margin(z0_V, token),
        "q": float(_rows(draft, refused.context, [])[0].log_softmax(-1)[token]),
        "D": float(logpr_V[token] - logp0_V[token]),
        "pr": _margin(zr_V, token),
    }
    for alpha in alphas:
        found[f"mix {alpha}"] = _margin((1 - alpha) * z0_V + alpha * zr_V, token)
    if refused.judged is not None:
        found["judge"] = refused.judged
    return found


def _margin(logits_V: torch.Tensor, token: int) -> float:
    return float(logits_V[token] - logits_V.max())


def _rows(model: LanguageModel, context: Sequence[int], behind: Sequence[int]) -> torch.Tensor:
    """Raw logits of the context's last row and of the rows after it, float32 [1 + after, V]."""
    cache = model.new_cache(1)
    slot = cache.acquire()
    prefill(model, cache, slot, context[:-1])
    read = [context[-1], *behind]
    cache.reserve(slot, len(read))
    batch = PackedBatch()
    batch.add_chunk(slot, cache.lengths[slot], read, wanted=len(read))
    return model.forward(batch, DensePlan(cache, batch)).logits_MV.float()


def _row(prompt: str, task: str, refused: Sequence[_Refused], scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    fine_N = torch.tensor([each.fine for each in refused])
    question_N = torch.tensor([each.question for each in refused])
    areas = {
        name: _with_interval(torch.tensor([each[name] for each in scores]), fine_N, question_N) for name in scores[0]
    }
    counts = {"fine": int(fine_N.sum()), "wrong": int((~fine_N).sum())}
    return {"prompt": prompt, "task": task, **counts, **areas}


def _with_interval(score_N: torch.Tensor, fine_N: torch.Tensor, question_N: torch.Tensor) -> list[float] | None:
    """The area, and the middle 95 % of it over questions drawn with replacement."""
    area = auc(score_N, fine_N)
    if area is None:
        return None
    generator = torch.Generator().manual_seed(0)
    tokens_of = [(question_N == number).nonzero()[:, 0] for number in question_N.unique().tolist()]
    again = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(tokens_of), (len(tokens_of),), generator=generator).tolist()
        kept = torch.cat([tokens_of[number] for number in drawn])
        if (one := auc(score_N[kept], fine_N[kept])) is not None:
            again.append(one)
    again.sort()
    last = len(again) - 1
    return [area, again[math.floor(0.025 * last)], again[math.ceil(0.975 * last)]]


def _area(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    def cell(row: Mapping[str, Any]) -> str | None:
        found = row.get(name)
        return None if found is None else f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"

    return cell
