"""What the engine costs next to the model's forwards.

    python benchmarks/overhead.py --json overhead.json

Three questions, each answered by its own table:

* of a decoding step, which share is not inside a model forward (the draft's forwards count as forwards);
* the empty-draft path of the engine against a greedy loop written by hand over the same forward: one step of each in
  turn, at the same context, so that both see the same machine;
* a forward by rows: time, the packing before it, and where its time goes by operation.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from forwards import Decoder, interleaved, quartiles, watch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.measurement import Measurement
from foretoken_lab.peers.adapters import our_recipes

ROWS = (1, 2, 4, 8, 16, 32)


def main() -> int:
    options = _options()
    measurement = Measurement("overhead.py", options.json, threads=options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    llm = LLM(options.model, dtype=options.dtype, threads=options.threads, max_num_seqs=1, speculative_config=None)
    found: dict[str, Any] = {}
    parts = options.parts.split(",")
    if "engine" in parts:
        found["engine"] = engine_share(llm, options)
        console.print(_share_table(found["engine"]))
    if "empty" in parts:
        found["empty_draft"] = empty_draft(llm, options)
        console.print(_empty_table(found["empty_draft"]))
    if "forward" in parts:
        found["forward"] = forward_profile(llm, options)
        console.print(_forward_table(found["forward"]))
    measurement.write(found, model=options.model, draft=options.draft, dtype=options.dtype)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--draft", default="zoo:draft", help="draft model, or 'none'")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=2, help="prompts of every category of the bundled suite")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="of the engine table; interleaved")
    parser.add_argument("--pairs", type=int, default=2000, help="steps of the empty-draft comparison")
    parser.add_argument("--context", type=int, default=256, help="rows in the cache of the forward table")
    parser.add_argument("--forwards", type=int, default=100, help="of each row count, interleaved")
    parser.add_argument("--parts", default="engine,empty,forward")
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------- engine's share


def engine_share(llm: LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Per recipe: time of decoding steps outside forwards, as a share; steps that read the prompt are left out."""
    recipes = our_recipes(None if options.draft in ("", "none") else options.draft)
    engines = {name: llm.with_method(recipe) for name, recipe in recipes.items()}
    prompts = limit_per_category(read_prompts(BUNDLED_SUITE), options.limit)
    params = SamplingParams(max_tokens=options.max_tokens)
    ids_of = [llm.chat_prompt([{"role": "user", "content": p.text}]) if llm.is_chat_model else p.text for p in prompts]
    steps: dict[str, list[Any]] = {name: [] for name in engines}
    beyond: dict[str, list[float]] = {name: [] for name in engines}  # of a call, outside its steps
    for engine in engines.values():
        engine.generate(ids_of[:1], params)
    names = list(engines)
    for repeat in range(options.repeats):
        for number, prompt in enumerate(ids_of):
            turn = (repeat + number) % len(names)
            for name in names[turn:] + names[:turn]:
                with watch(engines[name]) as seen:
                    began = time.perf_counter()
                    engines[name].generate([prompt], params)
                    seconds = time.perf_counter() - began
                steps[name] += [step for step in seen.steps if not step.prompt]
                beyond[name].append(seconds - sum(step.seconds for step in seen.steps))
    rows = []
    for name in names:
        mine = steps[name]
        total, inside = sum(s.seconds for s in mine), sum(s.forward for s in mine)
        rows.append(
            {
                "method": name,
                "num_steps": len(mine),
                "tokens_per_step": sum(s.tokens for s in mine) / len(mine),
                "step_ms": quartiles([1e3 * s.seconds for s in mine]),
                "forward_ms": quartiles([1e3 * s.forward for s in mine]),
                "outside_ms": quartiles([1e3 * (s.seconds - s.forward) for s in mine]),
                "outside_share": 1 - inside / total,
                "outside_share_of_step": quartiles([1 - s.forward / s.seconds for s in mine]),
                "beyond_steps_ms_per_request": quartiles([1e3 * seconds for seconds in beyond[name]]),
            }
        )
    return rows


def _share_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="decoding steps: time outside model forwards", title_justify="left", header_style="bold")
    table.add_column("method", no_wrap=True)
    for name in ("steps", "tok/step", "step ms", "forward ms", "outside ms", "share", "share of a step", "request ms"):
        table.add_column(name, justify="right")
    for row in rows:
        each = row["outside_share_of_step"]
        table.add_row(
            row["method"],
            str(row["num_steps"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['step_ms']['median']:.3f}",
            f"{row['forward_ms']['median']:.3f}",
            f"{row['outside_ms']['median']:.3f}",
            f"{row['outside_share']:.1%}",
            f"{each['median']:.1%} ({each['lower']:.1%}-{each['upper']:.1%})",
            f"{row['beyond_steps_ms_per_request']['median']:.2f}",
        )
    return table


# --------------------------------------------------------------------------------------------------- empty draft


def empty_draft(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """One engine step and one step by hand in turn, both on the same text at the same position."""
    engine_side = llm.with_method(None)
    by_hand = Decoder(llm.target)
    ids = [int(i) for i in torch.randint(7, llm.target.vocab_size, (32,), generator=torch.Generator().manual_seed(0))]
    num_tokens = min(256, llm.target.max_length - len(ids) - 1)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine_seconds: list[float] = []
    hand_seconds: list[float] = []
    same = True
    chance = random.Random(0)
    clock = time.perf_counter
    while len(engine_seconds) < options.pairs:
        (request,) = engine_side.new_requests(ids, params)
        engine_side.engine.add(request)
        engine_side.engine.step()
        by_hand.prefill(ids)
        for number in range(num_tokens - 1):
            began = clock()
            if chance.random() < 0.5:
                engine_side.engine.step()
                middle = clock()
                by_hand.step()
                ended = clock()
                pair = middle - began, ended - middle
            else:
                by_hand.step()
                middle = clock()
                engine_side.engine.step()
                ended = clock()
                pair = ended - middle, middle - began
            if number >= 8:
                engine_seconds.append(pair[0])
                hand_seconds.append(pair[1])
        same = same and request.tokens == by_hand.tokens
    ratios = [a / b for a, b in zip(engine_seconds, hand_seconds, strict=True)]
    differences = [1e3 * (a - b) for a, b in zip(engine_seconds, hand_seconds, strict=True)]
    middle_of_each = quartiles(engine_seconds)["median"] / quartiles(hand_seconds)["median"]
    return {
        "engine_ms": quartiles([1e3 * s for s in engine_seconds]),
        "by_hand_ms": quartiles([1e3 * s for s in hand_seconds]),
        "paired_ratio": quartiles(ratios),
        "paired_ratio_95": _interval(ratios),
        "ratio_of_medians": middle_of_each,
        "difference_ms": quartiles(differences),
        "same_tokens": same,
    }


def _interval(values: list[float], draws: int = 500) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    tensor = torch.tensor(values)
    generator = torch.Generator().manual_seed(0)
    medians = torch.stack(
        [tensor[torch.randint(len(values), (len(values),), generator=generator)].median() for _ in range(draws)]
    )
    low, high = medians.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def _empty_table(found: dict[str, Any]) -> Table:
    table = Table(title="empty draft against a loop by hand, ms a token", title_justify="left", header_style="bold")
    for name in ("engine", "by hand", "paired ratio", "95 %", "quartiles", "difference ms", "same tokens"):
        table.add_column(name, justify="right")
    paired, (low, high) = found["paired_ratio"], found["paired_ratio_95"]
    table.add_row(
        f"{found['engine_ms']['median']:.4f}",
        f"{found['by_hand_ms']['median']:.4f}",
        f"{paired['median']:.4f}",
        f"{low:.4f}-{high:.4f}",
        f"{paired['lower']:.3f}-{paired['upper']:.3f}",
        f"{found['difference_ms']['median']:+.4f}",
        str(found["same_tokens"]),
    )
    return table


# ------------------------------------------------------------------------------------------------------- forward


def forward_profile(llm: LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A verification forward of some rows after a filled cache: time, packing, argmax, and operations by time."""
    decoder = Decoder(llm.target)
    generator = torch.Generator().manual_seed(0)
    decoder.prefill(torch.randint(7, llm.target.vocab_size, (options.context,), generator=generator).tolist())
    rows_of = {n: torch.randint(7, llm.target.vocab_size, (n,), generator=generator).tolist() for n in ROWS}
    calls = {("forward", n): (lambda t=tokens: decoder.forward(t, wanted=len(t))) for n, tokens in rows_of.items()}
    calls |= {("pack", n): (lambda t=tokens: decoder.pack(t)) for n, tokens in rows_of.items()}
    logits = {n: decoder.forward(tokens, wanted=n).clone() for n, tokens in rows_of.items()}
    calls |= {("argmax", n): (lambda x=each: x.max(dim=-1)[1].tolist()) for n, each in logits.items()}
    seconds = interleaved(calls, options.forwards)
    found = []
    for n, tokens in rows_of.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(10):
                decoder.forward(tokens, wanted=n)
        events = sorted(profile.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
        whole = 1e6 * 10 * quartiles(seconds["forward", n])["median"]
        top = [{"op": e.key, "share": e.self_cpu_time_total / whole, "calls": e.count / 10} for e in events[:8]]
        found.append(
            {
                "rows": n,
                "forward_ms": quartiles([1e3 * s for s in seconds["forward", n]]),
                "pack_ms": quartiles([1e3 * s for s in seconds["pack", n]]),
                "argmax_ms": quartiles([1e3 * s for s in seconds["argmax", n]]),
                "top_operations": top,
            }
        )
    return found


def _forward_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="forward by rows (packing included)", title_justify="left", header_style="bold")
    for name in ("rows", "ms", "quartiles", "x one row", "pack ms", "argmax ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("torch operations, share of the forward (a native call shows nothing inside)")
    one = rows[0]["forward_ms"]["median"]
    for row in rows:
        time_ = row["forward_ms"]
        table.add_row(
            str(row["rows"]),
            f"{time_['median']:.3f}",
            f"{time_['lower']:.3f}-{time_['upper']:.3f}",
            f"{time_['median'] / one:.2f}",
            f"{row['pack_ms']['median']:.3f}",
            f"{row['argmax_ms']['median']:.3f}",
            ", ".join(f"{op['op'].removeprefix('aten::')} {op['share']:.0%}" for op in row["top_operations"][:4]),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetokenError as error:
        print(f"overhead: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
