"""Measure ``k_opt(b)`` (foretoken/methods/scylla/width.py): accepted tokens of a tree of k nodes, and the time
of a step of b requests.

    rate(b, k) = b A(k) / t(b, k)      A(k): tokens per step;  t: seconds from one draft to the next;  k = 0: plain

A(k) comes from one recording with the largest tree at temperature 0: the nodes of a reranked tree are nested, so its
best k nodes are the tree of budget k, and A(k) counts the accepted nodes among them. The recorded steps are those of
the largest tree, so A(k) is an estimate; ``served`` is the measured acceptance of the timed runs. Times are medians
over steps of exactly b requests, with the widths interleaved, under the current load of the machine; with one CPU
thread they are processor times, which exclude other processes. The recording and the timed runs of every b answer the
same
prompts: some prompts are easier to draft for, and would make the rates of different b incomparable.

Paper: arXiv:2505.07858, the third scaling relation. Differs: the paper fits a formula to the point where arithmetic
intensity meets the machine's balance; here that width is reported as well (``k_roof``), because a node with free
verification may still not pay.

    FLOPs(b, k) = b k (2 N + 4 layers s d)        bytes(b, k) = w N + b s kv + b k act
    k_roof(b)   = the largest k with FLOPs / bytes <= I_crit = GEMM operations per second / bytes streamed per second
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InputError
from foretoken.core.protocols import Budget, Context, Features, Outcome
from foretoken.engine.llm import LLM
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.width import Widths
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams

_LEAST_STEPS = 3


class Watched(ScyllaDrafter):
    """Drafts a given number of nodes, and records the verdicts and the times.

    Attributes:
        clock: returns seconds.
        nodes: maximum number of nodes of a draft.
        steps: (requests, seconds until the next draft, seconds of drafting) of each step.
        paths: (rank of each accepted node among the draft's nodes, number of nodes) of each draft.
    """

    nodes = 0

    def __init__(self, config: ScyllaDrafter.Config, target: LanguageModel) -> None:
        super().__init__(config, target)
        self.widths = None
        alone = target.device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.thread_time if alone else time.perf_counter
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.steps: list[tuple[int, float, float]] = []
        self.paths: list[tuple[list[int], int]] = []
        self._begun: tuple[int, float] | None = None
        self._drafting = 0.0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        now = self.clock()
        if self._begun is not None and self._begun[0] == len(contexts):
            self.steps.append((len(contexts), now - self._begun[1], self._drafting))
        limited = [Budget(min(b.max_nodes, self.nodes), b.max_depth, None, b.evidence, b.history_only) for b in budgets]
        drafts = super().propose(contexts, limited)
        self._begun, self._drafting = (len(contexts), now), self.clock() - now
        return drafts

    def on_forward(self, features: Sequence[Features]) -> None:
        if any(not len(each.draft) and len(each.hidden[self._depths[0]]) > 1 for each in features):
            self._begun = None  # a prompt was read: not a step of decoding
        super().on_forward(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if len(outcome.draft):
                rank = {node: place for place, node in enumerate(by_reach(outcome.draft))}
                self.paths.append(([rank[node] for node in outcome.verdict.path], len(outcome.draft)))
        super().observe(outcomes)


def by_reach(draft: Draft) -> list[int]:
    """Sort a draft's nodes by the probability of their path, best first: the order of pruning."""
    reach: list[float] = []
    for parent, confidence in zip(draft.tree.parents, draft.confidence, strict=True):
        reach.append(confidence * (1.0 if parent < 0 else reach[parent]))
    return sorted(range(len(reach)), key=lambda node: (-reach[node], node))


def accepted(paths: Sequence[tuple[Sequence[int], int]], nodes: int) -> float:
    """Return A(k): tokens per step, bonus included, if only the best ``nodes`` of every draft had been verified."""
    return 1 + sum(sum(rank < nodes for rank in ranks) for ranks, _ in paths) / max(1, len(paths))


def measure(
    llm: LLM,
    config: ScyllaDrafter.Config,
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int],
    nodes: Sequence[int],
    tokens: int,
    repeats: int = 3,
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Measure the table for a head over a loaded target.

    Args:
        llm: of any method; its target is used.
        prompts: token ids; each repeat takes the next ones in turn, as many as the largest batch.
        batches: b, increasing.
        nodes: k, increasing, without 0.
        tokens: length of an answer.
    Returns:
        ``accepted`` (k -> A), ``measured`` (an object for each b and k), ``roofline`` and ``widths``.
    Raises:
        InputError: there were too few drafts for a measurement.
    """
    drafter = Watched(config, llm.target)
    engine = LLM.from_target(
        llm.target,
        speculative_config={"method": drafter, "num_speculative_tokens": max(nodes)},
        max_num_seqs=max(batches),
        max_rows_per_step=max(512, max(batches) * (1 + max(nodes))),
        seed=0,
    )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    most = max(batches)

    def answer(repeat: int, width: int, count: int) -> list[Any]:
        """Answer the prompts of a repeat, ``count`` at a time."""
        drafter.nodes = width
        outputs: list[Any] = []
        for begin in range(0, most, count):
            numbers = [repeat * most + place % most for place in range(begin, begin + count)]
            asked = [{"prompt_token_ids": list(prompts[number % len(prompts)])} for number in numbers]
            outputs += engine.generate(asked, params)
        return outputs

    def advance() -> None:
        if progress is not None:
            progress()

    try:
        for repeat in range(repeats):
            answer(repeat, max(nodes), most)
        paths = drafter.paths
        advance()
        if not paths:
            raise InputError("there were no drafts: the prompts leave no positions for an answer; give shorter ones")
        found: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {}
        for repeat in range(repeats):
            for batch in batches:
                for width in (0, *nodes):
                    drafter.forget()
                    outputs = answer(repeat, width, batch)
                    advance()
                    steps = [each for each in drafter.steps if each[0] == batch]
                    emitted = sum(output.metrics.num_tokens for output in outputs)
                    calls = sum(output.metrics.num_steps for output in outputs)
                    if len(steps) >= _LEAST_STEPS:
                        times = median(each[1] for each in steps), median(each[2] for each in steps)
                        found.setdefault((batch, width), []).append((*times, emitted, calls))
    finally:
        engine.close()
    gains = {0: 1.0, **{width: accepted(paths, width) for width in nodes}}
    measured, rates = [], {}
    for (batch, width), runs in found.items():
        step, draft = (median(each[place] for each in runs) for place in (0, 1))
        rates[batch, width] = batch * gains[width] / step
        measured.append(
            {
                "batch": batch,
                "nodes": width,
                "step_seconds": step,
                "draft_seconds": draft if width else 0.0,
                "spread": (max(each[0] for each in runs) - min(each[0] for each in runs)) / step,
                "tokens_per_second": rates[batch, width],
                "served": sum(each[2] for each in runs) / sum(each[3] for each in runs),
            }
        )
    missing = [batch for batch in batches if (batch, 0) not in rates]
    if missing:
        raise InputError(f"--max-tokens {tokens}: too few steps of {missing[0]} requests to be timed; give more")
    context = round(sum(map(len, prompts)) / len(prompts) + tokens / 2)
    return {
        "accepted": {str(width): gain for width, gain in gains.items()},
        "recorded_steps": len(paths),
        "measured": measured,
        "roofline": roofline(llm.target, batches, context, max(nodes)),
        "widths": [list(pair) for pair in choose(batches, rates).table],
    }


def roofline(target: LanguageModel, batches: Sequence[int], context: int, most: int) -> dict[str, Any]:
    """Return ``k_roof(b)``: the number of nodes that a verification computes while it loads the weights.

    Args:
        context: s, rows of the prefix.
        most: maximum k.
    """
    text = target.config.get_text_config(decoder=True)
    size = target.sizes
    width = target.dtype.itemsize
    heads = getattr(text, "num_attention_heads", 1)
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    weights = size.layer * target.num_layers + size.head
    per_row = 2 * weights + 4 * target.num_layers * context * heads * head
    kv_bytes = 2 * target.num_layers * kv * head * width
    act_bytes = 2 * target.num_layers * text.hidden_size * width  # each layer reads and writes the residual stream
    operations, stream = machine_balance(text.hidden_size, target.dtype)
    critical = operations / stream
    table = []
    for batch in batches:
        once = width * weights + batch * context * kv_bytes  # bytes read for any draft
        known = [k for k in range(1, most + 1) if batch * k * per_row <= critical * (once + batch * k * act_bytes)]
        table.append([batch, max(known, default=0)])
    return {"operations_per_second": operations, "bytes_per_second": stream, "context": context, "k_roof": table}


def machine_balance(width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return operations per second of a product of 256 rows, and bytes per second of reading 64 MB; the best of
    five.
    """
    rows_RW, weight_WO = torch.ones(256, width, dtype=dtype), torch.ones(width, 4 * width, dtype=dtype)
    memory = torch.ones(16 << 20)
    products, reads = [], []
    with torch.inference_mode():
        for _ in range(5):
            begun = time.perf_counter()
            rows_RW @ weight_WO
            between = time.perf_counter()
            memory.sum()
            reads.append(time.perf_counter() - between)
            products.append(between - begun)
    return 2.0 * 256 * width * 4 * width / min(products), memory.numel() * 4 / min(reads)


def choose(batches: Sequence[int], rates: Mapping[tuple[int, int], float]) -> Widths:
    """Choose for every batch the width with the highest rate, never more than for a smaller batch.

    Args:
        batches: increasing.
        rates: (requests, nodes) -> tokens per second; nodes 0 is plain decoding. Fewer nodes win ties.
    """
    table, most = [], None
    for batch in batches:
        known = {nodes: rate for (size, nodes), rate in rates.items() if size == batch}
        best = min(known, key=lambda nodes: (-known[nodes], nodes))
        most = best if most is None else min(most, best)
        table.append((batch, most))
    return Widths(tuple(table))
