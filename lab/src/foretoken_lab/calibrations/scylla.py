"""Measure ``k_opt(b)`` (foretoken/methods/scylla/width.py) with the planner's record and cost model.

    rate(b, k) = b A(k) / t(b, k)                   A: tokens per step of a tree of k nodes; k = 0: plain decoding
    t(b, k)    = V(1 + k, b) + D(k, b) + o b        a step of b requests; foretoken/planner/costs.py

The target answers the prompts once, at temperature 0; the head is replayed along these answers with every k, so A(k) is
that of a real run and the same for every b. Steps with drafts are timed in turn with plain steps; with one CPU thread
these are processor times, which exclude other processes.

Paper: arXiv:2505.07858, the third scaling relation. Differs: the paper fits a formula to the point where arithmetic
intensity meets the machine's balance; here that width is reported as well (``k_roof``), because a node with free
verification may still not pay.

    FLOPs(b, k) = b k (2 N + 4 layers s d)        bytes(b, k) = w N + b s kv + b k act
    k_roof(b)   = the largest k with FLOPs / bytes <= I_crit = GEMM operations per second / bytes streamed per second
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foretoken.core.errors import InputError
from foretoken.engine import compose
from foretoken.engine.llm import LLM
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.width import Widths
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams
from foretoken.planner import costs as cost_model
from foretoken.planner.replay import Replay, States
from foretoken.planner.trace import record

_LEAST_SECONDS = 1.0  # of timing forwards


def measure(
    llm: LLM,
    config: ScyllaDrafter.Config,
    prompts: Sequence[Sequence[int]],
    *,
    batches: Sequence[int],
    nodes: Sequence[int],
    tokens: int,
    repeats: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure the table for a head over a loaded target.

    Args:
        llm: of any method; its target is used.
        prompts: token ids.
        batches: b, increasing.
        nodes: k, increasing, without 0.
        tokens: length of an answer.
        repeats: answers, or groups of b answers, on which each k is timed.
        progress: called after the recording, after the timing, and after the replay of each k.
    Returns:
        ``accepted`` (k -> A), ``measured`` (an object for each b and k), ``roofline`` and ``widths``.
    Raises:
        InputError: the answers are too short for a draft.
    """
    target = llm.target
    drafter = ScyllaDrafter(config, target)
    drafter.widths = None
    began = time.perf_counter()
    trace = record(target, list(enumerate(prompts)), SamplingParams(max_tokens=tokens, ignore_eos=True), math.inf)
    if max(len(answer.tokens) for answer in trace.answers) < cost_model.STEPS:
        raise InputError(f"--max-tokens {tokens}: too few steps to be timed; give more, or shorter prompts")
    progress()
    context = round(sum(len(answer.prompt_ids) + tokens / 2 for answer in trace.answers) / len(trace.answers))
    spent = max(_LEAST_SECONDS, time.perf_counter() - began)
    costs = cost_model.measure(target, trace, seconds=spent, contexts=(context,), requests=batches)
    draft = cost_model.measure_draft(target, drafter, None, trace, costs, math.inf, lengths=nodes, turns=repeats)
    progress()
    recipe = compose.build({"method": drafter, "num_speculative_tokens": max(nodes)}, target)
    replay = Replay(recipe, target, trace, States(target))
    gains = {0: 1.0}
    for width in nodes:
        runs = [replay.run_fixed(answer, width).expected for answer in trace.answers]
        gains[width] = sum(run.tokens for run in runs) / sum(run.num_steps for run in runs)
        progress()
    measured, rates = [], {}
    for batch in batches:
        for width, gain in gains.items():
            step = costs.step(width, context, draft if width else cost_model.DraftCosts(), batch)
            rates[batch, width] = batch * gain / step
            measured.append(
                {
                    "batch": batch,
                    "nodes": width,
                    "step_seconds": step,
                    "draft_seconds": draft(width, batch) if width else 0.0,
                    "tokens_per_second": rates[batch, width],
                }
            )
    return {
        "accepted": {str(width): gain for width, gain in gains.items()},
        "recorded_tokens": trace.num_tokens,
        "measured": measured,
        "roofline": roofline(target, batches, context, max(nodes)),
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
