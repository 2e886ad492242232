"""Sparse attention while a drafter runs: which rows share blocks, what acceptance costs, what layers share.

    python benchmarks/sparse_attention.py overlap --data DATA --json overlap.json
    python benchmarks/sparse_attention.py acceptance --data DATA --json acceptance.json
    python benchmarks/sparse_attention.py reuse --data DATA --calibration sparse.json --json reuse.json
    python benchmarks/sparse_attention.py drift --data DATA --max-tokens 512 --json drift.json

``overlap``: the target decodes densely with a drafter after a long prompt. Of every verification step, layer and
key/value head it is written down what each row gives to each block of the prefix, and from that: how alike the rows'
own choices are, how much of a row's attention the root's choice holds (by depth in the draft, rows that stood apart
from rows that fell), and how much of the root's attention an *earlier* root's choice still holds, by its age in tokens.

``acceptance``: the same prompts are decoded with dense and with sparse verification. The prompt is a meeting of
QMSum's validation and test parts, and after it a question of each task. That no document of it is in the text that
the target's record names (``training.json``) is checked, by runs of 13 words.

``reuse``: gold answers are verified after long prompts, a root and seven rows a step, under anchors of several
thresholds; what counts is nats per token of the answers.

``drift``: a meeting goes on after its first ``--context`` tokens, dense ones, and is verified sparsely as spoken,
a root and seven rows a step: how often the sparse target's best token is the dense one's, and the divergence of its
law, by how many tokens were written sparsely before, for several distances of ``verification.refresh``.

Finished prompts are kept in the JSON file: a run that was stopped, or has used its ``--minutes``, goes on when it is
started again.

Letters: L layers, R rows of a step, G key/value heads, N blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken.core.tree import TokenTree
from foretoken.data.folder import data_root
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.sparse.attention import SparseAttention
from foretoken.methods.sparse.blocks import BlockRule
from foretoken.methods.sparse.calibration import Calibration
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.models.prefill import prefill
from foretoken_lab.intervals import mean_interval
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.records import read_records
from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.example import Example

_TEMPLATE = 64  # tokens that the chat template and the question's own words may add
AGES = (1, 2, 4, 8, 16, 32, 64)  # tokens
DENSE = "dense"
THETAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 1.0)
REFRESHES = (0, 256, 64, 8)  # rows; 0: never
DISTANCES = (0, 64, 128, 256, 512)  # tokens after the dense prompt, where one range ends and the next begins
_KEY_TEXT = 600  # tokens that a key is hidden in, where a meeting stands before them
_ROWS = 8  # of a step: a root, and a draft that is right
_RUN = 13  # words
_MOST_SHARED = 0.01


# ---------------------------------------------------------------------- overlap


@dataclass
class Step:
    """The attention of one verification step to the blocks of its prefix.

    Attributes:
        prefix: committed rows.
        heads: query heads of a group.
        weights: per layer, float32 [R, G, N]; attention weights, added over the heads of a group.
    """

    prefix: int
    heads: int = 1
    weights: list[Tensor] = field(default_factory=list)


class Watched(DensePlan):
    """Dense, layer by layer, and every row's weights are written down."""

    def __init__(self, cache: KVCache, batch: PackedBatch, size: int, steps: list[Step]) -> None:
        super().__init__(cache, batch)
        segment = batch.segments[0]
        self._size = size
        self._step = None
        if segment.verification:
            self.native = None
            self._step = Step(segment.prefix)
            steps.append(self._step)

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        output = super().attend(layer, q_HTD, k_GTD, v_GTD, **options)
        if self._step is not None:
            keys_SGCD = self.cache.keys[layer]
            assert keys_SGCD is not None
            segment = self.segments[0]
            self._step.weights.append(self._of_rows(q_HTD, keys_SGCD[segment.slot], segment, options["scaling"]))
        return output

    def _of_rows(self, q_HRD: Tensor, keys_GCD: Tensor, segment: Segment, scaling: float) -> Tensor:
        rows, prefix, num_groups = segment.num_rows, segment.prefix, keys_GCD.shape[0]
        count, length = prefix // self._size, prefix + rows
        q_GnRD = q_HRD.float().unflatten(0, (num_groups, -1))
        assert self._step is not None
        self._step.heads = q_GnRD.shape[1]
        scores_GnRL = torch.einsum("gnrd,gld->gnrl", q_GnRD, keys_GCD[:, :length].float()) * scaling
        own_RR = torch.ones(rows, rows, dtype=torch.bool).tril() if segment.seen is None else segment.seen
        scores_GnRL[..., prefix:].masked_fill_(~own_RR, -math.inf)
        weights_GRL = scores_GnRL.softmax(-1).sum(1)
        return weights_GRL[..., : count * self._size].unflatten(-1, (count, self._size)).sum(-1).transpose(0, 1)


class Overlap:
    """Sums over the steps of one prompt.

    Args:
        rule: how many blocks a head keeps.
    """

    def __init__(self, rule: BlockRule) -> None:
        self.rule = rule
        self.rows: dict[str, dict[str, float]] = {}  # depth and fate -> sums
        self.ages: dict[int, list[float]] = {}  # age -> attention of the root to free blocks, and what of it was kept
        self.by_layer: list[float] = []  # overlap of a draft's rows with the root, added over ``drafted`` rows
        self.drafted = 0
        self.layers: dict[str, list[list[list[float]]]] = {}  # per_head, per_layer -> [L][L] the same two
        self._before: list[tuple[int, Tensor]] = []  # prefix, and what that root chose: bool [L, G, N]

    def add(self, step: Step, stood: int) -> None:
        """One step, with ``stood`` accepted tokens of its draft."""
        weights = torch.stack(step.weights)  # [L, R, G, N]
        num_layers, num_rows, num_groups, count = weights.shape
        rule, keep = self.rule, self.rule.keep(step.prefix, num_groups)
        free = torch.zeros(count, dtype=torch.bool)
        free[rule.sinks : count - rule.locals] = True
        picks = keep // num_groups - rule.sinks - rule.locals
        if picks < 1:
            raise SystemExit(f"a budget of {rule.budget} leaves nothing to choose after {step.prefix} rows")
        w = weights * free

        def best(scores: Tensor) -> Tensor:
            order = scores.masked_fill(~free, -1.0)
            return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order.topk(picks, dim=-1).indices, True)

        own = best(w)  # of each row
        root, votes = own[:, :1], best(w.sum(1, keepdim=True))
        layer = best(w[:, :1].sum(2, keepdim=True)).expand(-1, -1, num_groups, -1)
        for r in range(num_rows):
            fate = "root" if r == 0 else "stood" if r <= stood else "fell"
            mine, mass = own[:, r : r + 1], w[:, r : r + 1]
            shared = (mine & root).sum(-1).float()
            of = float(mass.sum())
            fixed = rule.sinks + rule.locals

            def held(chosen: Tensor, mass: Tensor = mass) -> float:
                return float((mass * chosen).sum())

            sums = {
                "cells": shared.numel(),
                "overlap": float((shared / picks).sum()),
                "overlap_with_fixed": float(((shared + fixed) / (picks + fixed)).sum()),
                "jaccard": float((shared / (2 * picks - shared)).sum()),
                "free": of,
                "all": float(num_layers * num_groups * step.heads),
                "by_root": held(root),
                "by_itself": held(mine),
                "by_votes": held(votes),
                "by_layer_of_root": held(layer),
                "by_chance": of * picks / int(free.sum()),
            }
            for key in (f"{r}", fate):
                into = self.rows.setdefault(key, dict.fromkeys(sums, 0.0))
                for name, value in sums.items():
                    into[name] += value
            if r:  # the paper's figure: by layer, with the blocks that are always kept
                of_layers = ((shared[:, 0] + fixed) / (picks + fixed)).mean(-1).tolist()
                self.by_layer = [a + b for a, b in zip(self.by_layer or [0.0] * num_layers, of_layers, strict=True)]
                self.drafted += 1
        self._age(step.prefix, w[:, 0], root[:, 0], free)
        self._between(w[:, 0], {"per_head": root[:, 0], "per_layer": layer[:, 0]})

    def _age(self, prefix: int, w: Tensor, root: Tensor, free: Tensor) -> None:
        for age in (0, *AGES):
            if age == 0:
                chosen = root
            else:
                found = [each for each in self._before if age <= prefix - each[0] < 2 * age]
                if not found:
                    continue
                chosen = torch.zeros_like(root)
                theirs = found[-1][1]
                chosen[..., : theirs.shape[-1]] = theirs
            into = self.ages.setdefault(age, [0.0, 0.0])
            into[0] += float(w.sum())
            into[1] += float((w * chosen).sum())
        held = root.clone()
        held[..., ~free] = True  # blocks that are always kept
        self._before = [each for each in self._before if prefix - each[0] < 2 * AGES[-1]] + [(prefix, held)]

    def _between(self, w: Tensor, sets: Mapping[str, Tensor]) -> None:
        for name, chosen in sets.items():
            table = self.layers.setdefault(name, [[[0.0, 0.0] for _ in w] for _ in w])
            for i, theirs in enumerate(chosen):
                for j, mass in enumerate(w):
                    table[i][j][0] += float(mass.sum())
                    table[i][j][1] += float((mass * theirs).sum())

    def fields(self) -> dict[str, Any]:
        """The sums, as JSON takes them."""
        return {
            "rows": self.rows,
            "ages": {str(age): sums for age, sums in self.ages.items()},
            "overlap_by_layer": [each / max(1, self.drafted) for each in self.by_layer],
            "layers": self.layers,
        }


def overlap(options: argparse.Namespace, kept: Kept) -> None:
    """Decode, watch, and write down the sums of every prompt."""
    llm = LLM(options.target, threads=options.threads, dtype=options.dtype, max_num_seqs=1, speculative_config=None)
    rule = BlockRule(budget=options.budget, dense_below=0, size=options.block)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    for method in options.methods:
        watching = llm.with_method({"method": method, "num_speculative_tokens": options.nodes})
        steps: list[Step] = []
        watching.recipe.plan.attention = lambda cache, batch, steps=steps: Watched(cache, batch, options.block, steps)
        for task in options.tasks:
            for example in questions(llm, task, options):
                name = f"{method} {task} {options.context} {example.id}"
                if name in kept:
                    continue
                seen = Overlap(rule)
                (request,) = watching.new_requests(prompt(llm, [example.prompt]), params)
                watching.engine.add(request)
                while watching.engine.busy:
                    before = request.num_output
                    watching.engine.step()
                    for step in steps:
                        seen.add(step, request.num_output - before - 1)
                    steps.clear()
                if request.error is not None:
                    raise SystemExit(request.error)
                of = {"method": method, "task": task, "prompt_tokens": len(request.tokens) - request.num_output}
                kept.add(name, {**of, "tokens_per_step": request.metrics.tokens_per_step, **seen.fields()})


# ---------------------------------------------------------------------- acceptance


SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "per_head, exact": {"attention": "per_head"},
    "per_layer, exact": {"attention": "per_layer"},
    "per_head, mean": {"attention": "per_head", "score": "mean"},
    "per_head, exact, half the budget": {"attention": "per_head"},
}


def acceptance(options: argparse.Namespace, kept: Kept) -> None:
    """Every question with every method and setting; a row for each question and task."""
    llm = LLM(options.target, threads=options.threads, dtype=options.dtype, max_num_seqs=1, speculative_config=None)
    kept.facts["held_out"] = held_out(options.target, options.data)
    engines = {}
    for method in options.methods:
        for name, own in SETTINGS.items():
            config: dict[str, Any] = {"method": method, "num_speculative_tokens": options.nodes}
            budget = options.budget / 2 if "half" in name else options.budget
            given = {**own, "budget": budget, "dense_below": options.dense_below, "block": options.block} if own else {}
            config |= {f"verification.{key}": value for key, value in given.items()}
            engines[method, name] = llm.with_method(config)
    params = SamplingParams(max_tokens=options.max_tokens)
    asked = {task: behind_a_meeting(llm, task, options) for task in options.tasks}
    for number in range(options.limit):
        for task in options.tasks:
            example, ids = asked[task][number]
            name = f"{task} {number} {example.id}"
            if name in kept:
                continue
            found = []
            for (method, settings), engine in engines.items():
                (output,) = engine.generate([ids], params)
                if output.error is not None:
                    raise SystemExit(output.error)
                of, scores = output.metrics, catalog.find(task).score(output.text, example)
                found.append(
                    {
                        "method": method,
                        "settings": settings,
                        "tokens": of.num_tokens,
                        "steps": of.num_steps,
                        "drafted": of.num_draft_tokens,
                        "accepted": of.num_accepted_tokens,
                        "prefix_read": of.prefix_read,
                        "score": scores.get("correct", scores.get("rougeL")),
                        "output": output.token_ids,
                    }
                )
            kept.add(name, {"task": task, "prompt_tokens": len(ids["prompt_token_ids"]), "runs": found})


def behind_a_meeting(llm: LLM, task: str, options: argparse.Namespace) -> list[tuple[Example, dict[str, list[int]]]]:
    """Questions of a task, each after another question about a meeting and its answer in the data."""
    count = counter(llm)

    def of(task: str, context: int | None) -> list[Example]:
        return catalog.find(task).examples(
            options.limit, catalog.Setting(data=options.data, context=context, count=count)
        )

    room = options.context - _TEMPLATE
    if task == "qmsum":
        return [(each, prompt(llm, [each.prompt])) for each in of(task, room)]
    examples = of(task, _KEY_TEXT if task == "keys" else None)
    meetings = of("qmsum", room - max(count(each.prompt) for each in examples))
    return [
        (example, prompt(llm, [meeting.prompt, meeting.answer, example.prompt]))
        for meeting, example in zip(meetings, examples, strict=True)
    ]


def held_out(target: str, data: Path | None) -> dict[str, Any]:
    """The training text of a zoo model and of its predecessors, and the share of it in the meetings of the questions.

    Raises:
        SystemExit: the record names the file of the meetings, or the folder has another training part than was read.
    """
    root = data_root(data)
    place, read = zoo.path(target.removeprefix(zoo.PREFIX)), {}
    while True:
        record = json.loads((place / "training.json").read_text(encoding="utf-8"))
        for source in record["mixture"]:
            read |= {each["sha256"]: f"{record['recipe']}/{source['name']}/{each['name']}" for each in source["files"]}
        before = (record.get("start") or "").removeprefix(zoo.PREFIX)
        if before not in zoo.MODELS or not (place := zoo.path(before)).is_dir():
            break
    theirs, ours = root / "qmsum_train" / "train.jsonl.xz", root / "eval" / "qmsum.jsonl.gz"
    if _sha256(theirs) not in read:
        raise SystemExit(f"'{target}' has read another {theirs.name}: so these meetings cannot be checked")
    if _sha256(ours) in read:
        raise SystemExit(f"'{target}' has read {ours.name}")
    known = {run for record in read_records(theirs, ("document",)) for run in _runs(record["document"])}
    shares = []
    for record in read_records(ours, ("document",)):
        runs = list(_runs(record["document"]))
        shares.append(sum(run in known for run in runs) / len(runs))
    found = {"files_read": sorted(read.values()), "meetings": len(shares), "run_of_words": _RUN}
    found["largest_share_of_runs_that_were_read"] = max(shares)
    if max(shares) > _MOST_SHARED:
        raise SystemExit(f"a meeting shares {max(shares):.1%} of its runs of {_RUN} words with the training text")
    return found


def _runs(text: str) -> Iterator[int]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    yield from map(hash, zip(*(words[start:] for start in range(_RUN)), strict=False))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------------- reuse


def reuse(options: argparse.Namespace, kept: Kept) -> None:
    """Gold answers after long prompts, under every set of anchors; a row for each prompt."""
    target = load(str(options.target), dtype=options.dtype)
    llm = LLM.from_target(target, max_num_seqs=1)
    plans: dict[str, Callable[[KVCache, PackedBatch], DensePlan]] = {DENSE: DensePlan}
    kept.facts["anchors"] = anchors = {}
    known = Calibration.load(options.calibration)
    for sets in ("per_head", "per_layer"):
        rule = BlockRule(budget=options.budget, dense_below=options.dense_below, size=options.block, sets=sets)
        chosen = {theta: tuple(known.anchors_for(target.num_layers, sets, theta)) for theta in THETAS}
        for count in sorted({len(each) for each in chosen.values()}):
            theta = max(each for each, layers in chosen.items() if len(layers) == count)
            anchors[f"{sets} {theta}"] = list(chosen[theta])
            if sets == "per_layer" and count < target.num_layers:
                anchors[f"{sets} evenly {count}"] = evenly(count, target.num_layers)
        for name, layers in anchors.items():
            if name.startswith(sets):
                plans[name] = SparseAttention(rule, layers)
    for number in range(options.limit):
        for task in options.tasks:
            setting = catalog.Setting(data=options.data, context=options.context - _TEMPLATE, count=counter(llm))
            example = catalog.find(task).examples(options.limit, setting)[number]
            if (name := f"{task} {number} {example.id}") in kept:
                continue
            ids = prompt(llm, [example.prompt])["prompt_token_ids"]
            answer = llm.tokenizer(example.response, add_special_tokens=False)["input_ids"][: options.max_tokens]
            of = {"task": task, "number": number, "prompt_tokens": len(ids)}
            kept.add(name, {**of, **losses(target, ids, answer, plans)})


def evenly(count: int, layers: int) -> list[int]:
    """So many anchors: the first two layers, as always, and the others at even distances."""
    others = count - 2
    return [0, 1, *(2 + round(i * (layers - 2) / others) for i in range(others))]


def losses(
    target: LanguageModel,
    ids: Sequence[int],
    answer: Sequence[int],
    plans: Mapping[str, Callable[[KVCache, PackedBatch], DensePlan]],
) -> dict[str, Any]:
    """Nats of an answer's tokens, and whether all of them are the most probable ones, after a prompt read densely."""
    cache = target.new_cache(2)
    base = cache.acquire()
    prefill(target, cache, base, ids[:-1])
    found: dict[str, Any] = {"answer_tokens": len(answer), "nats": {}, "right": {}, "prefix_read": {}}
    rows, wanted = [ids[-1], *answer[:-1]], torch.tensor(answer)
    for name, make in plans.items():
        slot, logits, read = cache.fork(base), [], []
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            cache.reserve(slot, len(some))
            batch = PackedBatch()
            batch.add_tree(slot, cache.lengths[slot], some[0], TokenTree(some[1:]))
            plan = make(cache, batch)
            logits.append(target.forward(batch, plan).logits_MV.float().clone())
            read.append(1.0 if plan.prefix_read is None else plan.prefix_read[0])
            cache.commit(slot, range(len(some)))
        cache.release(slot)
        logits_NV = torch.cat(logits)
        found["nats"][name] = float(torch.nn.functional.cross_entropy(logits_NV, wanted, reduction="sum"))
        found["right"][name] = bool((logits_NV.argmax(-1) == wanted).all())
        found["prefix_read"][name] = sum(read) / len(read)
    return found


# ---------------------------------------------------------------------- drift


def drift(options: argparse.Namespace, kept: Kept) -> None:
    """Meetings as they went on, verified densely and sparsely; a row for each meeting."""
    target = load(str(options.target), dtype=options.dtype)
    kept.facts["held_out"] = held_out(options.target, options.data)
    rule = BlockRule(budget=options.budget, dense_below=options.dense_below, size=options.block)
    plan = SparseAttention(rule, range(target.num_layers))
    length = options.context + options.max_tokens
    meetings = read_records(data_root(options.data) / "eval" / "qmsum.jsonl.gz", ("id", "document"))
    read = ((each["id"], target.tokenizer(each["document"])["input_ids"]) for each in meetings)
    for name, ids in [each for each in read if len(each[1]) > length][: options.limit]:
        if name in kept:
            continue
        dense_NV, _ = as_said(target, ids[: length + 1], options.context, DensePlan)
        found: dict[str, Any] = {}
        for every in REFRESHES:
            sparse_NV, share = as_said(target, ids[: length + 1], options.context, plan, every)
            same = (sparse_NV.argmax(-1) == dense_NV.argmax(-1)).float()
            kl = torch.nn.functional.kl_div(sparse_NV, dense_NV, reduction="none", log_target=True).sum(-1)
            ranges = [slice(*pair) for pair in itertools.pairwise(DISTANCES) if pair[1] <= options.max_tokens]
            found[str(every)] = {
                "prefix_read": share,
                "agreement": [float(same[each].mean()) for each in ranges],
                "kl": [float(kl[each].mean()) for each in ranges],
            }
        kept.add(name, {"refresh": found})


def as_said(
    target: LanguageModel,
    ids: Sequence[int],
    begin: int,
    make: Callable[[KVCache, PackedBatch], DensePlan],
    refresh: int = 0,
) -> tuple[Tensor, float]:
    """Log-probabilities [N, V] after each token from ``begin`` on but the last; the share of prefixes that was read.

    Args:
        refresh: rows after which their keys and values are computed again densely; 0: never.
    """
    cache = target.new_cache(1)
    slot = cache.acquire()
    prefill(target, cache, slot, ids[:begin])
    laws, read, dense = [], [], begin
    for start in range(begin, len(ids) - 1, _ROWS):
        if refresh and start - dense >= refresh:
            cache.rollback(slot, dense)
            prefill(target, cache, slot, ids[dense:start])
            dense = start
        some = ids[start : min(start + _ROWS, len(ids) - 1)]
        cache.reserve(slot, len(some))
        batch = PackedBatch()
        batch.add_tree(slot, start, some[0], TokenTree(some[1:]))
        plan = make(cache, batch)
        laws.append(target.forward(batch, plan).logits_MV.float().log_softmax(-1))
        read.append(1.0 if plan.prefix_read is None else plan.prefix_read[0])
        cache.commit(slot, range(len(some)))
    return torch.cat(laws), sum(read) / len(read)


# ---------------------------------------------------------------------- tables


def tables(part: str, rows: Mapping[str, Any]) -> None:
    """What the rows say, over prompts."""
    of = {"overlap": _overlap_tables, "acceptance": _acceptance_table, "reuse": _reuse_table, "drift": _drift_table}
    of[part](list(rows.values()))


def _overlap_tables(rows: list[dict[str, Any]]) -> None:
    shares = ("by_root", "by_itself", "by_votes", "by_layer_of_root", "by_chance")
    _print(
        "rows: overlap with the root's own choice; attention to free blocks that is held",
        ("method", "task", "row", "cells", "overlap", "with fixed", "Jaccard", *shares, "of all, by root"),
        [
            (
                *key,
                kind,
                int(t["cells"]),
                *tuple(t[name] / t["cells"] for name in ("overlap", "overlap_with_fixed", "jaccard")),
                *tuple(t[name] / t["free"] for name in shares),
                1 - (t["free"] - t["by_root"]) / t["all"],
            )
            for key, some in _grouped(rows, "method", "task")
            for kind in ("root", "stood", "fell", "1", "3", "7")
            if (t := _added([row["rows"].get(kind, {}) for row in some])).get("cells")
        ],
    )
    _print(
        "attention of the root to free blocks that an earlier root's choice holds, by its age in tokens",
        ("method", "task", "0", *map(str, AGES)),
        [
            (*key, *(_ratio([row["ages"].get(str(age), (0, 0)) for row in some]) for age in (0, *AGES)))
            for key, some in _grouped(rows, "method", "task")
        ],
    )
    for sets in ("per_head", "per_layer"):
        depth = range(len(rows[0]["layers"][sets]))
        table = [[_ratio([row["layers"][sets][i][j] for row in rows]) for j in depth] for i in depth]
        _print(f"{sets}: what the choice of layer i holds in layer j", ("", *map(str, depth)), list(enumerate(table)))


def _acceptance_table(rows: list[dict[str, Any]]) -> None:
    lines = []
    for (task,), some in _grouped(rows, "task"):
        runs = [run for row in some for run in row["runs"]]
        for (method, settings), of in _grouped(runs, "method", "settings"):
            t = _added([{key: run[key] for key in ("tokens", "steps", "drafted", "accepted", "score")} for run in of])
            read = [1.0 if run["prefix_read"] is None else run["prefix_read"] for run in of]
            dense = [run["output"] for run in runs if (run["method"], run["settings"]) == (method, DENSE)]
            same = sum(run["output"] == other for run, other in zip(of, dense, strict=True))
            accepted = t["accepted"] / max(1, t["drafted"])
            lines.append(
                (
                    task,
                    method,
                    settings,
                    len(of),
                    sum(read) / len(read),
                    t["tokens"] / t["steps"],
                    accepted,
                    t["score"] / len(of),
                    same,
                )
            )
    heads = ("task", "method", "verification", "n", "prefix read", "tokens/step", "accepted", "score", "same text")
    _print("acceptance", heads, lines)


def _reuse_table(rows: list[dict[str, Any]]) -> None:
    lines = []
    for (task,), some in _grouped(rows, "task"):
        full = {"per_head": "per_head 1.0", "per_layer": "per_layer 1.0"}
        for name in some[0]["nats"]:
            nats = [row["nats"][name] / row["answer_tokens"] for row in some]
            base = full.get(name.split()[0], DENSE)
            against = [row["nats"][base] / row["answer_tokens"] for row in some]
            mean, interval = mean_interval([a - b for a, b in zip(nats, against, strict=True)])
            low, high = interval or (math.nan, math.nan)
            right = sum(row["right"][name] for row in some) / len(some)
            read = sum(row["prefix_read"][name] for row in some) / len(some)
            lines.append((task, name, len(some), read, sum(nats) / len(nats), mean, low, high, right))
    heads = ("task", "anchors", "n", "prefix read", "nats/token", "over all layers", "low", "high", "right")
    _print("reuse", heads, lines)


def _drift_table(rows: list[dict[str, Any]]) -> None:
    lines = []
    for every in rows[0]["refresh"]:
        some = [row["refresh"][every] for row in rows]
        share = sum(each["prefix_read"] for each in some) / len(some)
        for number, (low, high) in enumerate(itertools.pairwise(DISTANCES)):
            if number < len(some[0]["kl"]):
                same, around = mean_interval([each["agreement"][number] for each in some])
                kl, of_kl = mean_interval([each["kl"][number] for each in some])
                missing = (math.nan, math.nan)
                at = (every, f"{low} to {high}", len(some), share)
                lines.append((*at, same, *(around or missing), kl, *(of_kl or missing)))
    heads = ("refresh", "tokens before", "n", "prefix read", "same best", "low", "high", "KL", "low", "high")
    _print("drift", heads, lines)


def _grouped(rows: Sequence[dict[str, Any]], *names: str) -> list[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return [(key, [row for row in rows if tuple(row[name] for name in names) == key]) for key in keys]


def _added(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            found[name] = found.get(name, 0.0) + value
    return found


def _ratio(pairs: Sequence[Sequence[float]]) -> float:
    whole = sum(pair[0] for pair in pairs)
    return sum(pair[1] for pair in pairs) / whole if whole else math.nan


def _print(title: str, heads: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    table = Table(*heads, title=title)
    for line in lines:
        flat = [each for cell in line for each in (cell if isinstance(cell, list) else [cell])]
        table.add_row(*(f"{each:.3f}" if isinstance(each, float) else str(each) for each in flat))
    Console(width=200).print(table)


# ---------------------------------------------------------------------- questions, and finished prompts


class Kept:
    """Rows by name, in a file that is written after each one.

    Args:
        path: of the file; None: they are only printed.
        facts: provenance of this run; a file of another command is refused.
        minutes: after which no row is begun.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any], minutes: float) -> None:
        self.path, self.facts = path, dict(facts)
        self.rows: dict[str, Any] = {}
        self._quiet, self._end = Quiet(), time.monotonic() + 60 * minutes
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != self.facts["settings"]:
                raise SystemExit(f"{path} is of other settings: {found['settings']}; name another file")
            self.rows = found["rows"]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a row; ends the run where its time is over."""
        self.rows[name] = row
        print(f"{len(self.rows)}: {name}", flush=True)
        if self.path is not None:
            others = {"share_of_processors_used_by_others": self._quiet.share()}
            write_whole(self.path, json.dumps({**self.facts, **others, "rows": self.rows}) + "\n")
        if time.monotonic() > self._end:
            raise SystemExit("the time is over: start it again to go on")


def questions(llm: LLM, task: str, options: argparse.Namespace) -> list[Example]:
    """Questions of at most ``--context`` tokens, nearly."""
    setting = catalog.Setting(data=options.data, context=options.context - _TEMPLATE, count=counter(llm))
    return catalog.find(task).examples(options.limit, setting)


def counter(llm: LLM) -> Callable[[str], int]:
    """Counts tokens."""
    return lambda text: len(llm.tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt(llm: LLM, said: Sequence[str]) -> dict[str, list[int]]:
    """A conversation that ends with a question."""
    roles = ("user", "assistant")
    return llm.chat_prompt([{"role": roles[i % 2], "content": text} for i, text in enumerate(said)])


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.json:
        check_writable(options.json, "--json")
    named = {name: str(value) for name, value in vars(options).items() if name not in ("json", "minutes", "data")}
    facts = provenance([], model=options.target, dtype=options.dtype, threads=options.threads)
    facts["command"] = command("sparse_attention.py")
    kept = Kept(options.json, {"settings": named, "provenance": facts}, options.minutes)
    {"overlap": overlap, "acceptance": acceptance, "reuse": reuse, "drift": drift}[options.part](options, kept)
    tables(options.part, kept.rows)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["overlap", "acceptance", "reuse", "drift"])
    parser.add_argument("--target", default="zoo:long")
    parser.add_argument("--data", type=Path, help="folder of the corpora")
    parser.add_argument("--tasks", nargs="+", default=["qmsum", "keys"])
    parser.add_argument("--methods", nargs="+", default=["longspec", "ngram"])
    parser.add_argument("--context", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=6, help="questions of each task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=7, help="draft tokens of every step, at most")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--dense-below", type=int, default=256, help="of acceptance and reuse; overlap has 0")
    parser.add_argument("--calibration", type=Path, help="of reuse: what 'foretoken calibrate sparse' has written")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
