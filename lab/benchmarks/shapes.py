"""Bigger shapes with random weights: a forward by rows, and what speculation gains at a known acceptance.

    python benchmarks/shapes.py --shapes 100m,500m --json shapes.json
    python benchmarks/shapes.py --shapes gemma3-100m,phi3-100m,moe-100m --parts forward

Weights are random, so texts mean nothing; times are those of any model of that shape. Two tables a shape:

* a forward of 1 to 32 rows after 256 cached rows: ours, transformers with its own cache, llama.cpp (BF16), with all
  rows' logits; interleaved, order rotating. ``--dtype int8`` and ``int4`` are ours, Q8_0 and Q4_0 of llama.cpp, and
  bfloat16 of transformers. Of other families than Llama, our general path stands in the place of llama.cpp. A forward
  of one row is little more than reading the weights once: below the table stands the rate at which ours does, and its
  share of what plain reads and copies of as many bytes reach in the same turns.
* speculation through the real engine with a scripted drafter: it proposes the recorded plain continuation with every
  token spoilt with probability 1 - a, for nothing. So the speed-up is what verification leaves of the acceptance; the
  last columns say what remains if drafting a token costs 5, 10 or 20 % of a plain step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from forwards import Decoder, greedy, interleaved, quartiles, without_fused
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError, nearest
from foretoken.models.load import load
from foretoken_lab.measurement import Measurement
from foretoken_lab.models.shapes import FAMILY_SHAPES, SHAPES, write_random_model
from foretoken_lab.peers import adapters
from foretoken_lab.testing import EvenlySpoilt, ScriptRule

ROWS = (1, 4, 8, 16, 32)
DRAFT_COSTS = (0.05, 0.1, 0.2)
KNOWN = (*SHAPES, *FAMILY_SHAPES)
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}  # of a weight, scales and minimums included


def main() -> int:
    options = _options()
    measurement = Measurement("shapes.py", options.json, threads=options.threads, peers=True)
    names = options.shapes.split(",")
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"unknown shape '{name}': {nearest(name, KNOWN)}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="foretoken-shapes-") as folder:
            found[name] = _shape(name, Path(folder), options, console)
    measurement.write({"shapes": found}, dtype=options.dtype, context=options.context, seed=0)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="100m,500m", help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="cached rows before the forward, or prompt length")
    parser.add_argument("--forwards", type=int, default=30, help="of each row count and engine, interleaved")
    parser.add_argument("--acceptance", default="0.5,0.6,0.7,0.8,0.9")
    parser.add_argument("--lengths", default="4,8,16", help="draft tokens per step")
    parser.add_argument("--max-tokens", type=int, default=128, help="per scripted generation")
    parser.add_argument("--repeats", type=int, default=3, help="of the scripted generations, interleaved")
    parser.add_argument("--parts", default="forward,scripted")
    parser.add_argument(
        "--llama-flash",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="llama.cpp with its flash attention, which was the faster setting where this was tried",
    )
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


def _shape(name: str, folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    transformers_logging.disable_progress_bar()
    parameters = write_random_model(name, folder, adapters.dense(options.dtype))
    found: dict[str, Any] = {"parameters": parameters, "shape": SHAPES.get(name) or FAMILY_SHAPES[name]}
    parts = options.parts.split(",")
    if "forward" in parts:
        found["forward"] = forward_times(folder, parameters, options, llama=name in SHAPES)
        console.print(_forward_table(found["forward"], f"{name}: {parameters / 1e6:.0f} M parameters, ms per forward"))
        if name != "moe-100m":  # of which a row reads a part
            console.print(_bandwidth_line(found["forward"]))
    if "scripted" in parts:
        found["scripted"] = scripted(folder, options)
        console.print(_scripted_table(found["scripted"], f"{name}: speculation at a known acceptance"))
    return found


# ---------------------------------------------------------------------------------------------------- forward times


def forward_times(folder: Path, parameters: int, options: argparse.Namespace, *, llama: bool) -> list[dict[str, Any]]:
    """Seconds of a forward after ``context`` rows, by engine and row count; logits of all rows in each. Then those of
    reading the bytes of all weights, and of copying them.

    Args:
        llama: whether the shape is a Llama's.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(7, 8000, (options.context,), generator=generator).tolist()
    rows_of = {n: torch.randint(7, 8000, (n,), generator=generator).tolist() for n in ROWS}
    makers: dict[str, Callable[..., Callable[[Sequence[int]], Any]]] = {
        "ours": _our_forward,
        "transformers": _transformers_forward,
    }
    if not llama:
        makers["ours, general"] = _general_forward
    elif adapters.import_llama_cpp() is not None:
        makers["llama.cpp"] = _llama_forward
    calls: dict[Any, Callable[[], Any]] = {}
    for engine, make in makers.items():
        forward = make(folder, prompt, options)
        for n, tokens in rows_of.items():
            calls[engine, n] = lambda forward=forward, tokens=tokens: forward(tokens)
    weights = torch.ones(round(parameters * _BITS[options.dtype] / 32))
    elsewhere = torch.empty_like(weights)
    calls["plain read", 1], calls["plain copy", 1] = weights.sum, lambda: elsewhere.copy_(weights)
    seconds = interleaved(calls, options.forwards)
    moved = {"ours": 1, "plain read": 1, "plain copy": 2}  # times the weights' bytes, by a row
    found = []
    for (engine, n), each in seconds.items():
        found.append({"engine": engine, "rows": n, "ms": quartiles([1e3 * s for s in each])})
        if n == 1 and engine in moved:
            amount = moved[engine] * weights.numel() * weights.element_size()
            found[-1]["gigabytes_per_second"] = amount / statistics.median(each) / 1e9
    return found


def _our_forward(folder: Path, prompt: list[int], options: argparse.Namespace) -> Callable[[Sequence[int]], Any]:
    decoder = Decoder(load(str(folder), dtype=options.dtype))
    decoder.prefill(prompt)
    return lambda tokens: decoder.forward(tokens, wanted=len(tokens))


def _general_forward(folder: Path, prompt: list[int], options: argparse.Namespace) -> Callable[[Sequence[int]], Any]:
    with without_fused():
        return _our_forward(folder, prompt, options)


def _transformers_forward(
    folder: Path, prompt: list[int], options: argparse.Namespace
) -> Callable[[Sequence[int]], Any]:
    model = adapters.load_transformers(str(folder), adapters.dense(options.dtype))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def forward(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
            cache.crop(-len(tokens))
        return logits

    return forward


def _llama_forward(folder: Path, prompt: list[int], options: argparse.Namespace) -> Callable[[Sequence[int]], Any]:
    """The C interface: fill the batch, remove the tail, decode, and wait for the logits of all rows."""
    import llama_cpp

    path = adapters.export_gguf(str(folder), options.dtype, folder / "model.gguf")
    llama = adapters.open_llama(
        llama_cpp, path, context=options.context + 64, threads=options.threads, flash=options.llama_flash
    )
    llama.eval(prompt)
    memory = llama_cpp.llama_get_memory(llama.ctx)
    batch = llama._batch

    def forward(tokens: Sequence[int]) -> Any:
        llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1)
        batch.set_batch(tokens, n_past=len(prompt), logits_all=True)
        code = llama_cpp.llama_decode(llama.ctx, batch.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        return llama_cpp.llama_get_logits(llama.ctx)

    return forward


def _forward_table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("engine", no_wrap=True)
    for n in ROWS:
        table.add_column(f"{n} rows" if n > 1 else "1 row", justify="right", no_wrap=True)
    engines = list(dict.fromkeys(row["engine"] for row in rows if not row["engine"].startswith("plain")))
    ms = {(row["engine"], row["rows"]): row["ms"] for row in rows}
    for engine in engines:
        each = [ms[engine, n] for n in ROWS]
        table.add_row(engine, *(f"{m['median']:.2f} ({m['lower']:.2f}-{m['upper']:.2f})" for m in each))
    table.add_section()
    for engine in engines[1:]:
        ratios = [ms[engine, n]["median"] / ms["ours", n]["median"] for n in ROWS]
        table.add_row(f"{engine} / ours", *(f"{each:.2f}x" for each in ratios))
    return table


def _bandwidth_line(rows: list[dict[str, Any]]) -> str:
    rates = {row["engine"]: row["gigabytes_per_second"] for row in rows if "gigabytes_per_second" in row}
    read, copied = rates["plain read"], rates["plain copy"]
    return (
        f"one row reads its weights at {rates['ours']:.1f} GB/s: {rates['ours'] / max(read, copied):.0%} of the faster "
        f"of a plain read ({read:.1f}) and a plain copy ({copied:.1f}, both ways)"
    )


# -------------------------------------------------------------------------------------------- scripted speculation


def scripted(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plain decoding and every (acceptance, length) on the same prompt, interleaved."""
    plain = LLM(str(folder), dtype=options.dtype, max_num_seqs=1, speculative_config=None)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(7, 8000, (options.context,), generator=generator).tolist()
    count = options.max_tokens
    lengths = [int(n) for n in options.lengths.split(",")]
    # one token beyond every draft, so that the script never ends before the request does
    answer = greedy(plain, prompt, count + 1)
    engines: dict[tuple[float, int], LLM] = {(0.0, 0): plain}
    for a in (float(each) for each in options.acceptance.split(",")):
        for n in lengths:
            # random weights give near-ties that flip between 1 and N rows: the script decides, not the logits
            recipe = {
                "method": EvenlySpoilt({tuple(prompt): answer}, a, phase=(1 + len(engines)) / 97),
                "verifier": ScriptRule([*prompt, *answer]),
                "num_speculative_tokens": n,
            }
            engines[a, n] = plain.with_method(recipe)
    runs: dict[tuple[float, int], list[Any]] = {key: [] for key in engines}
    for engine in engines.values():
        greedy(engine, prompt, 8)
    keys = list(engines)
    for repeat in range(options.repeats):
        turn = repeat * len(keys) // options.repeats
        for key in keys[turn:] + keys[:turn]:
            runs[key].append(_decode(engines[key], prompt, count))
    rows = []
    baseline = quartiles([1 / run["tokens_per_second"] for run in runs[0.0, 0]])["median"]
    for (a, n), each in runs.items():
        speed = quartiles([run["tokens_per_second"] for run in each])
        steps = sum(run["num_steps"] for run in each)
        tokens_per_step = sum(run["num_tokens"] for run in each) / steps
        step_seconds = sum(run["seconds"] for run in each) / steps
        rows.append(
            {
                "acceptance": a,
                "draft_tokens": n,
                "tokens_per_second": speed,
                "tokens_per_step": tokens_per_step,
                "expected_tokens_per_step": (1 - a ** (n + 1)) / (1 - a) if n else 1.0,
                "speedup": speed["median"] * baseline,
                "step_ms": 1e3 * step_seconds,
                "time_share": {
                    part: sum(run[part] for run in each) / sum(run["seconds"] for run in each)
                    for part in ("draft", "verify", "other")
                },
                "speedup_if_a_draft_token_costs": {
                    str(cost): tokens_per_step * baseline / (step_seconds + n * cost * baseline) for cost in DRAFT_COSTS
                },
            }
        )
    return rows


def _decode(llm: LLM, prompt: list[int], count: int) -> dict[str, Any]:
    """One generation, the prompt's step left out: decoding is the question here."""
    (request,) = llm.new_requests(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    llm.engine.add(request)
    while request.num_output == 0:
        llm.engine.step()
    m = request.metrics
    before = (m.num_tokens, m.num_steps, m.draft_seconds, m.verify_seconds, m.other_seconds)
    while not request.finished:
        llm.engine.step()
    after = (m.num_tokens, m.num_steps, m.draft_seconds, m.verify_seconds, m.other_seconds)
    num_tokens, num_steps, draft, verify, other = (b - a for a, b in zip(before, after, strict=True))
    seconds = draft + verify + other
    if request.error is not None:
        raise RuntimeError(request.error)
    return {
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "draft": draft,
        "verify": verify,
        "other": other,
    }


def _scripted_table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    names = ("acceptance", "draft", "tok/step", "expected", "step ms", "tokens/s", "speed-up", "draft/verify/other")
    for name in (*names, *(f"at {cost:.0%}" for cost in DRAFT_COSTS)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        plain = not row["draft_tokens"]
        table.add_row(
            "plain" if plain else f"{row['acceptance']:.1f}",
            str(row["draft_tokens"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['expected_tokens_per_step']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_second']['median']:.1f}",
            f"{row['speedup']:.2f}x",
            "/".join(f"{row['time_share'][part]:.0%}" for part in ("draft", "verify", "other")),
            *(f"{each:.2f}x" for each in row["speedup_if_a_draft_token_costs"].values()),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetokenError as error:
        print(f"shapes: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
