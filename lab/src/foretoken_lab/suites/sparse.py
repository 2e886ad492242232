"""What sparse verification does to a target: acceptance, accuracy on tasks, and agreement on given text.

A threshold that shuts nothing (ffn=1e-30) walks the same way and shows what rounding alone does. For attention:

    foretoken bench --suite sparse --model zoo:long --data DATA \\
        --methods none+verification.attention=per_head+verification.budget=0.2+verification.dense_below=512

Next to the common table, where acceptance alone can rise because the verifier is worse:

* accuracy: every recipe on the same questions, minus dense plain decoding question by question.
* given text: it is read, not generated. After a dense prompt, 256 tokens more are verified in steps of eight rows (a
  root and a draft that is right). The sparse run keeps what its own forwards left in the cache, so that what goes wrong
  early stays. Per position: whether the most probable token is that of the dense target, and KL(dense || sparse) at
  temperature 1, in four parts of the length as well (drift); different experts a layer and step, and the share of the
  prefix that was read. Intervals: 95 %, over texts (normal). The text is the test part of WikiText-2 in the folder of
  the corpora; without ``--data`` this table is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from foretoken.bench.harness import Method
from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.core.tree import TokenTree
from foretoken.engine import compose
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan, DensePlans
from foretoken.forward.feed_forward import routed_experts
from foretoken.methods.sparse.feed_forward import SparseExperts
from foretoken.methods.sparse.plan import SparsePlan, SparseVerification
from foretoken.models.language_model import LanguageModel
from foretoken_lab.calibrations.sparse import blocks_of
from foretoken_lab.suites import accuracy

TASKS = ("json", "profiles")
QUESTIONS = 60  # of each task, without --limit
TEXT = "wikitext2/test.txt.xz"
TEXTS, TOKENS, ROWS = 12, 256, 8
SHORT, LONG = 192, 3072  # tokens of the dense prompt; sparse attention has something to leave out after the long one
DENSE = "dense"
_KEY = "verification."
_CHUNK = 256  # rows of a forward that reads a prompt
_DRIFT = 4  # parts of the verified length


def study(run: Run) -> list[Section]:
    """Accuracy of all recipes, and given text for every setting of verification among them."""
    plain = run.engines["none"]
    questions = accuracy.Questions(TASKS, run.limit or QUESTIONS)
    reference = questions.ask(plain)
    rows = [
        row
        for label, engine in run.engines.items()
        for row in accuracy.rows_of(label, reference if engine is plain else questions.ask(engine), reference)
    ]
    sections = [accuracy.section("answers, minus those of dense plain decoding", rows)]
    if run.data is not None:
        sections.append(_given_text(plain.target, settings_of(run.methods), run.data / TEXT))
    return sections


def settings_of(methods: Sequence[Method]) -> dict[str, dict[str, Any]]:
    """The settings of verification of these recipes, each once, under a short name."""
    found = {}
    for method in methods:
        settings = {key: value for key, value in method.config.items() if key.startswith(_KEY)}
        if settings:
            found["+".join(f"{key.removeprefix(_KEY)}={value}" for key, value in settings.items())] = settings
    return found


def _given_text(target: LanguageModel, settings: Mapping[str, Mapping[str, Any]], text: Path) -> Section:
    attends = any(f"{_KEY}attention" in each for each in settings.values())
    context = min(LONG if attends else SHORT, target.max_length - TOKENS - 1)
    found: dict[str, list[dict[str, Any]]] = {DENSE: [], **{name: [] for name in settings}}
    blocks = blocks_of([text], target, block=context + TOKENS + 1, num_tokens=10**12)
    for _, tokens in zip(range(TEXTS), blocks, strict=False):
        if len(tokens) <= context + TOKENS:
            break
        behind = _Behind(target, tokens, context)
        dense_NV, facts = behind.verify(None)
        found[DENSE].append(facts)
        for name, each in settings.items():
            sparse_NV, facts = behind.verify(each)
            found[name].append({**_compare(dense_NV, sparse_NV), **facts})
    rows = [{"settings": name, **_over_texts(each, TOKENS)} for name, each in found.items()]
    return Section("given_text", f"given text after {context} tokens, {TOKENS} verified", COLUMNS, rows)


class _Behind:
    """A dense prompt in the cache, after which the same tokens are verified in several ways."""

    def __init__(self, target: LanguageModel, tokens: Sequence[int], context: int) -> None:
        self._target, self._tokens, self._context = target, tokens, context
        self._counting = [SparseExperts(each, None, 0.0) for each in routed_experts(target.model)]
        self._cache = cache = target.new_cache(2)
        self._prompt = cache.acquire()
        for start in range(0, context, _CHUNK):
            count = min(_CHUNK, context - start)
            cache.reserve(self._prompt, count)
            batch = PackedBatch()
            batch.add_chunk(self._prompt, start, tokens[start : start + count], wanted=0)
            target.forward(batch, DensePlan(cache, batch))
            cache.commit(self._prompt, range(count))

    def verify(self, settings: Mapping[str, Any] | None) -> tuple[Tensor, dict[str, float | None]]:
        """Logits of every verified position, float32 [N, V], and the bytes read (see the top of this file)."""
        target, cache, context = self._target, self._cache, self._context
        make: Callable[[KVCache, PackedBatch], Any] = DensePlan
        if settings is not None:
            given = compose.settings_of(SparseVerification.settings_key, dict(settings))
            make = SparseVerification.arranged(given, target) or DensePlans()
        slot = cache.fork(self._prompt)
        logits, experts, read = [], [], []
        end = context + TOKENS
        for start in range(context, end, ROWS):
            rows = self._tokens[start : min(start + ROWS, end)]
            cache.reserve(slot, len(rows))
            batch = PackedBatch()
            batch.add_tree(slot, start, rows[0], TokenTree(rows[1:]))
            plan = make(cache, batch)
            if settings is None and self._counting:  # the dense experts, counted
                plan = SparsePlan(plan, batch, [], self._counting, 0.0)
            logits.append(target.forward(batch, plan).logits_MV.float().clone())
            experts.append(plan.num_experts if isinstance(plan, SparsePlan) else None)
            read.append(1.0 if plan.prefix_read is None else plan.prefix_read[0])
            cache.commit(slot, range(len(rows)))
        cache.release(slot)
        counted = [each for each in experts if each is not None]
        return torch.cat(logits), {"experts": mean(counted) if counted else None, "prefix_read": mean(read)}


def _compare(dense_NV: Tensor, sparse_NV: Tensor) -> dict[str, Any]:
    p_NV, q_NV = dense_NV.log_softmax(-1), sparse_NV.log_softmax(-1)
    kl_N = (p_NV.exp() * (p_NV - q_NV)).sum(-1)
    same_N = (dense_NV.argmax(-1) == sparse_NV.argmax(-1)).float()
    quarters = [
        (float(s.mean()), float(k.mean())) for s, k in zip(same_N.chunk(_DRIFT), kl_N.chunk(_DRIFT), strict=True)
    ]
    return {"agreement": float(same_N.mean()), "kl": float(kl_N.mean()), "quarters": quarters}


def _over_texts(rows: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"num_texts": len(rows), "num_positions": len(rows) * num_tokens}
    for name, field in (("experts_per_step", "experts"), ("prefix_read", "prefix_read")):
        values = [row[field] for row in rows if row[field] is not None]
        found[name] = mean(values) if values else None
    if "kl" not in rows[0]:
        return found
    for name in ("agreement", "kl"):
        values = [row[name] for row in rows]
        found[name] = mean(values)
        half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        found[f"{name}_interval"] = [found[name] - half, found[name] + half]
    found["drift"] = [
        {"agreement": mean(row["quarters"][i][0] for row in rows), "kl": mean(row["quarters"][i][1] for row in rows)}
        for i in range(_DRIFT)
    ]
    return found


def _interval(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    def text(row: Mapping[str, Any]) -> str | None:
        if name not in row:
            return None
        low, high = row[f"{name}_interval"]
        return f"{row[name]:.3f} ({low:.3f}-{high:.3f})"

    return text


def _drift(row: Mapping[str, Any]) -> str | None:
    return " ".join(f"{part['agreement']:.3f}" for part in row["drift"]) if "drift" in row else None


COLUMNS = (
    Column("settings", lambda row: row["settings"]),
    Column("texts", lambda row: row["num_texts"], "{}"),
    Column("agreement", _interval("agreement")),
    Column("KL, nats", _interval("kl")),
    Column("agreement\nby quarter", _drift),
    Column("experts\n/step", lambda row: row["experts_per_step"], "{:.1f}"),
    Column("prefix\nread", lambda row: row["prefix_read"], "{:.0%}"),
)

_SETTINGS = ("moe=1", "ffn=0.05", "ffn=0.1", "ffn=0.2", "ffn=0.5", "moe=1+verification.ffn=0.1")

SUITE = Suite(
    name="sparse",
    question="what does sparse verification do to a target's acceptance, accuracy and opinion of given text?",
    model="zoo:moe",
    methods=(
        "ngram",
        "suffix",
        *(f"{drafter}+verification.{each}" for drafter in ("none", "ngram") for each in _SETTINGS),
    ),
    options={"max_tokens": 64, "ignore_eos": True, "repeats": 1},
    study=study,
)
