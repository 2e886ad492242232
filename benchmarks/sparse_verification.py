"""What sparse verification does to a target: agreement on given text, acceptance, accuracy on tasks, experts read.

    python benchmarks/sparse_verification.py --model zoo:long --text TEXT.jsonl --out FOLDER \\
        --settings attention=per_head+budget=0.1+dense_below=512,ffn=0.05 --context 3072 --task keys --task-context 2000

Settings are those of ``verification.*``, joined by '+'; every part compares all of them with dense verification:

A threshold that shuts nothing (ffn=1e-30) walks the same way and shows what rounding alone does.

teacher     text is given, not generated: behind a dense prompt of --context tokens, --tokens more are verified in
            steps of --rows rows (a root and a draft that is right). The sparse run keeps what its own forwards left in
            the cache, so what goes wrong early stays. Per position: whether the most probable token is that of the
            dense target, and KL(dense || sparse) at temperature 1; by quarter of the length (drift); different experts
            a layer and step. Intervals: 95 %, over texts (normal).
acceptance  drafters on a suite of prompts, greedy: tokens per step with dense and with sparse verification, tokens up
            to the first that differs from the dense text, and the share of equal texts. Acceptance alone can rise
            because the verifier is worse.
tasks       accuracy with its interval, and the paired difference to dense.
experts     one block of experts with random weights of a size of its own: processor time of the library's experts and
            of ours, with 0, 2 and 4 experts of a row that may be left out, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from foretoken import LLM, SamplingParams
from foretoken.bench.workloads import BUNDLED_SUITE, read_prompts
from foretoken.cli.settings import parse_settings
from foretoken.core.provenance import provenance
from foretoken.core.tree import TokenTree
from foretoken.engine.compose import settings_of
from foretoken.methods.sparse.calibrate import blocks_of
from foretoken.methods.sparse.feed_forward import Skip, SparseExperts, ratios
from foretoken.methods.sparse.plan import SparsePlan, SparseVerification
from foretoken.models.batch import PackedBatch
from foretoken.models.dense import DensePlan
from foretoken.models.feed_forward import RoutedExperts, routed_experts, swapped
from foretoken.models.language_model import LanguageModel
from foretoken.tasks.catalog import Setting, find
from foretoken.tasks.difference import paired_difference
from foretoken.tasks.evaluate import Report, evaluate

DENSE = "dense"
_CHUNK = 256  # rows of a forward that reads a prompt
_RECORDED = ("texts", "context", "tokens", "rows", "prompts", "prompt_tokens", "max_tokens", "draft_tokens", "limit")
_REPEATS = 25  # of a block of experts
_DRIFT = 4  # parts of the verified length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:moe")
    parser.add_argument("--settings", default="ffn=0.05", help="A+B,C: settings of verification, joined by '+'")
    parser.add_argument("--parts", default="teacher,acceptance,tasks")
    parser.add_argument("--text", type=Path, action="append", help="documents for 'teacher'; repeatable")
    parser.add_argument("--texts", type=int, default=8, help="how many")
    parser.add_argument("--context", type=int, default=256, help="tokens that are read densely before each")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each that are verified")
    parser.add_argument("--rows", type=int, default=8, help="of a verification")
    parser.add_argument("--methods", default="ngram,suffix")
    parser.add_argument("--suite", type=Path, default=BUNDLED_SUITE)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, help="lengthen prompts with text in front, to so many tokens")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--task", default="json")
    parser.add_argument("--task-context", type=int)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder for sparse_PART_MODEL.json")
    parser.add_argument("--tag", default="", help="behind MODEL in the files' names")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=8, seed=0)
    settings = [{}, *(_parse(each) for each in options.settings.split(","))]
    options.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[..., Any]] = {
        "teacher": teacher,
        "acceptance": acceptance,
        "tasks": tasks,
        "experts": experts,
    }
    for part in options.parts.split(","):
        began = time.perf_counter()
        results = parts[part](llm, settings, options)
        facts = provenance(sys.argv, dtype=str(llm.target.dtype), threads=options.threads)
        facts["command"] = " ".join(["python", "benchmarks/sparse_verification.py", *sys.argv[1:]])
        found = {
            "provenance": facts,
            "options": {name: getattr(options, name) for name in _RECORDED},
            "seconds": time.perf_counter() - began,
            "results": results,
        }
        name = f"sparse_{part}_{options.model.rpartition(':')[2].replace('/', '_')}{options.tag}.json"
        (options.out / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.out / name}")


def _parse(text: str) -> dict[str, Any]:
    return {f"verification.{key}": value for key, value in parse_settings(text.split("+"), "--settings").items()}


def _name(settings: dict[str, Any]) -> str:
    return "+".join(f"{key.partition('.')[2]}={value}" for key, value in settings.items()) or DENSE


# ---------------------------------------------------------------------- given text


def teacher(llm: LLM, settings: Sequence[dict[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Sparse beside dense, position by position."""
    target = llm.target
    length = options.context + options.tokens + 1
    texts = blocks_of(options.text, target, block=length, num_tokens=10**12)
    found: dict[str, list[dict[str, Any]]] = {_name(each): [] for each in settings}
    for number, tokens in zip(range(options.texts), texts, strict=False):
        if len(tokens) < length:
            break
        behind = _Behind(target, tokens, options)
        dense_NV, experts = behind.verify(None)
        found[DENSE].append({"experts": experts})
        for each in settings[1:]:
            sparse_NV, experts = behind.verify(each)
            found[_name(each)].append({**_compare(dense_NV, sparse_NV), "experts": experts})
        print(f"text {number + 1}", {name: _round(rows[-1]) for name, rows in found.items()}, flush=True)
    return [{"settings": name, **_over_texts(rows, options.tokens)} for name, rows in found.items()]


class _Behind:
    """A dense prompt in the cache, behind which the same tokens are verified in several ways."""

    def __init__(self, target: LanguageModel, tokens: Sequence[int], options: Any) -> None:
        self._target, self._tokens, self._options = target, tokens, options
        self._counting = [SparseExperts(each, None, 0.0) for each in routed_experts(target.model)]
        self._cache = cache = target.new_cache(2)
        self._prompt = cache.acquire()
        for start in range(0, options.context, _CHUNK):
            count = min(_CHUNK, options.context - start)
            cache.reserve(self._prompt, count)
            batch = PackedBatch()
            batch.add_chunk(self._prompt, start, tokens[start : start + count], wanted=0)
            target.forward(batch, DensePlan(cache, batch))
            cache.commit(self._prompt, range(count))

    def verify(self, settings: dict[str, Any] | None) -> tuple[Tensor, float | None]:
        """Logits of every verified position, float32 [N, V], and different experts a layer and step."""
        target, cache, options = self._target, self._cache, self._options
        if settings is None:
            make: Any = DensePlan
        else:
            given = settings_of(SparseVerification.settings_key, dict(settings))
            make = SparseVerification.arranged(given, target)
        slot = cache.fork(self._prompt)
        logits, experts = [], []
        end = options.context + options.tokens
        for start in range(options.context, end, options.rows):
            rows = self._tokens[start : min(start + options.rows, end)]
            cache.reserve(slot, len(rows))
            batch = PackedBatch()
            batch.add_tree(slot, start, rows[0], TokenTree(rows[1:]))
            plan = make(cache, batch)
            if settings is None and self._counting:  # the dense experts, counted
                plan = SparsePlan(plan, batch, [], self._counting, 0.0)
            logits.append(target.forward(batch, plan).logits_MV.float().clone())
            experts.append(getattr(plan, "num_experts", None))
            cache.commit(slot, range(len(rows)))
        cache.release(slot)
        counted = [each for each in experts if each is not None]
        return torch.cat(logits), mean(counted) if counted else None


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
    experts = [row["experts"] for row in rows if row["experts"] is not None]
    found["experts_per_step"] = mean(experts) if experts else None
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


def _round(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}


# ---------------------------------------------------------------------- drafts


def acceptance(llm: LLM, settings: Sequence[dict[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Tokens per step, and how far the text follows the dense one."""
    prompts = [_prompt(llm, prompt.text, options) for prompt in read_prompts(options.suite)[: options.prompts]]
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    results = []
    for method in options.methods.split(","):
        dense: list[list[int]] = []
        for each in settings:
            engine = llm.with_method({"method": method, "num_speculative_tokens": options.draft_tokens, **each})
            outputs = [engine.generate([{"prompt_token_ids": ids}], params)[0] for ids in prompts]
            texts = [output.token_ids for output in outputs]
            dense = dense or texts
            per_step = [output.metrics.tokens_per_step for output in outputs]
            experts = [output.metrics.experts_per_step for output in outputs]
            row = {
                "method": method,
                "settings": _name(each),
                "num_prompts": len(prompts),
                "tokens_per_step": sum(map(len, texts)) / sum(output.metrics.num_steps for output in outputs),
                "tokens_per_step_by_prompt": per_step,
                "equal_texts": mean(ours == theirs for ours, theirs in zip(texts, dense, strict=True)),
                "mean_tokens_before_a_difference": mean(map(_common, texts, dense)),
                "experts_per_step": mean(experts) if None not in experts else None,
            }
            results.append(row)
            print({key: value for key, value in row.items() if key != "tokens_per_step_by_prompt"}, flush=True)
    return results


def _prompt(llm: LLM, text: str, options: Any) -> list[int]:
    ids = llm.chat_prompt([{"role": "user", "content": text}])["prompt_token_ids"] if llm.is_chat_model else None
    ids = ids or list(llm.tokenizer(text)["input_ids"])
    if options.prompt_tokens is None or len(ids) >= options.prompt_tokens:
        return ids
    (front,) = (list(block) for block in _first(options, llm.target, options.prompt_tokens - len(ids)))
    return front + ids


def _first(options: Any, target: LanguageModel, length: int) -> list[list[int]]:
    return [next(iter(blocks_of(options.text, target, block=length, num_tokens=1)))]


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


# ---------------------------------------------------------------------- tasks


def tasks(llm: LLM, settings: Sequence[dict[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Accuracy, and what is lost of it."""
    results = []
    for name in options.task.split(","):
        task = find(name)
        setting = Setting(
            context=options.task_context if task.context is not None else None,
            count=lambda text: len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]),
        )
        examples = task.examples(options.limit, setting)
        params = SamplingParams(max_tokens=task.max_tokens)
        dense: Report | None = None
        for each in settings:
            report = evaluate(llm.with_method({"method": "none", **each}), task, examples, params)
            dense = dense or report
            pairs = zip(report.answers, dense.answers, strict=True)
            correct = [(ours.correct, theirs.correct) for ours, theirs in pairs if not ours.error and not theirs.error]
            difference = paired_difference(*map(list, zip(*correct, strict=True)))
            row = {
                "task": name,
                "settings": _name(each),
                "num_examples": report.num_examples,
                "accuracy": report.accuracy,
                "interval": report.interval,
                "difference": {"mean": difference.mean, "low": difference.low, "high": difference.high},
                "measures": dict(report.measures),
                "nll": report.nll,
                "experts_per_step": report.metrics.experts_per_step,
            }
            results.append(row)
            print(row, flush=True)
    return results


# ---------------------------------------------------------------------- one block of experts

WIDTH, CHANNELS, EXPERTS, CHOSEN = 1024, 512, 32, 8


def experts(llm: LLM, settings: Sequence[dict[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Milliseconds of a block, and the experts that it read."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=WIDTH,
        moe_intermediate_size=CHANNELS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config).bfloat16().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for weight in block.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 / weight.shape[-1] ** 0.5)
        block.gate.weight.mul_(4)
        rows_RD = torch.randn(400, WIDTH, generator=generator).bfloat16()
        beta = ratios(block.gate(rows_RD)[1]).median(0).values.tolist()
        parts = RoutedExperts(
            0, block.experts, EXPERTS, CHOSEN, True, block.experts.gate_up_proj, block.experts.down_proj, F.silu
        )
        results = []
        for count in (1, 4, 8, 32):
            ours = {m: SparseExperts(parts, Skip(beta, m, "nested", True) if m else None, 0.0) for m in (0, 2, 4)}
            forms = {"library": {}, **{f"m={m}": {block.experts: each} for m, each in ours.items()}}
            seconds: dict[str, list[float]] = {name: [] for name in forms}
            for _ in range(_REPEATS):
                for name, swaps in forms.items():
                    with swapped(swaps):
                        began = time.thread_time()
                        block(rows_RD[None, :count])
                        seconds[name].append(time.thread_time() - began)
            row = {
                "rows": count,
                "milliseconds": {name: 1e3 * median(each) for name, each in seconds.items()},
                "experts_read": {f"m={m}": each.num_needed for m, each in ours.items()},
            }
            results.append(row)
            print(row, flush=True)
    return results


if __name__ == "__main__":
    main()
