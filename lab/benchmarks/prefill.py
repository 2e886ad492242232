"""How fast a prompt is read: ours, transformers and llama.cpp on the same weights, whole prompts, interleaved.

    python benchmarks/prefill.py --model zoo:long --lengths 2048,8192,16000 --threads 1 --json prefill.json
    python benchmarks/prefill.py --model shape:100m

Prompts are bundled texts, end to end. Each engine reads them as it does by default: ours in chunks of the engine's row
budget, transformers at once, llama.cpp (BF16) in batches of 512, with and without its flash attention. The clock runs
until the logits of the last token are there. The last column is the token that an engine would say next: where it
differs, the arithmetic does (other roundings decide a near-tie, or the weights are not the same).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from forwards import quartiles, timed
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, DynamicCache

from foretoken.core.errors import ForetokenError
from foretoken.data.prompts import BUNDLED_SUITE, read_prompts
from foretoken.forward.dense import DensePlan
from foretoken.models.load import load
from foretoken.models.prefill import chunks
from foretoken_lab.measurement import Measurement
from foretoken_lab.models.shapes import PREFIX as SHAPE
from foretoken_lab.models.shapes import write_random_model
from foretoken_lab.peers import adapters

Read = Callable[[Sequence[int]], int]  # a prompt to the token that follows


def main() -> int:
    options = _options()
    measurement = Measurement("prefill.py", options.json, threads=options.threads, peers=True)
    lengths = [int(each) for each in options.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="foretoken-prefill-") as scratch:
        folder = Path(scratch)
        model = options.model
        if model.startswith(SHAPE):
            model = str(folder / "shape")
            (folder / "shape").mkdir()
            write_random_model(options.model.removeprefix(SHAPE), folder / "shape", "bfloat16", positions=max(lengths))
        engines = _engines(model, folder, options, max(lengths))
        text = _text(model, max(lengths))
        rows = [row for length in lengths for row in _measure(engines, text[:length], options.repeats)]
    Console(width=None if sys.stdout.isatty() else 120).print(
        _table(rows, f"{options.model}, {options.threads} threads")
    )
    measurement.write({"results": rows}, dtype=options.dtype, model=options.model, chunk=options.chunk)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="zoo:long", help="a name of the zoo, grown:…, a folder, or shape:NAME")
    parser.add_argument("--lengths", default="2048,8192,16000", help="tokens of the prompts")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=512, help="our rows of one forward")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default="ours,transformers,llama.cpp,llama.cpp flash")
    parser.add_argument("--json", help="write everything here")
    return parser.parse_args()


def _engines(model: str, folder: Path, options: argparse.Namespace, longest: int) -> dict[str, Read]:
    asked = options.engines.split(",")
    found: dict[str, Read] = {}
    if "ours" in asked:
        found["ours"] = _ours(model, options)
    if "transformers" in asked:
        found["transformers"] = _transformers(model, options)
    llama_cpp = adapters.import_llama_cpp() if any(each.startswith("llama.cpp") for each in asked) else None
    if llama_cpp is not None:
        path = adapters.export_gguf(model, options.dtype, folder / "model.gguf")
        for name in ("llama.cpp", "llama.cpp flash"):
            if name in asked:
                found[name] = _llama(llama_cpp, path, options.threads, longest, flash=name.endswith("flash"))
    return found


def _ours(name: str, options: argparse.Namespace) -> Read:
    model = load(name, dtype=options.dtype)

    def read(tokens: Sequence[int]) -> int:
        cache = model.new_cache(1)
        slot = cache.acquire()
        for _, _, batch in chunks(cache, slot, tokens, rows=options.chunk):
            output = model.forward(batch, DensePlan(cache, batch))
        return int(output.best[-1])

    return read


def _transformers(name: str, options: argparse.Namespace) -> Read:
    model = adapters.load_transformers(name, adapters.dense(options.dtype))

    def read(tokens: Sequence[int]) -> int:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    return read


def _llama(llama_cpp: Any, path: Path, threads: int, longest: int, *, flash: bool) -> Read:
    llama = adapters.open_llama(llama_cpp, path, context=longest, threads=threads, flash=flash)
    direct = adapters.LlamaCppDirect("llama.cpp", llama_cpp, llama, frozenset())
    return lambda tokens: direct.generate(tokens, 1)[0]


def _text(model: str, count: int) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(adapters.folder_of(model))
    ids = tokenizer("\n\n".join(each.text for each in read_prompts(BUNDLED_SUITE)))["input_ids"]
    return list(np.resize(ids, count).tolist())


def _measure(engines: dict[str, Read], tokens: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    names = list(engines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    said: dict[str, int] = {name: engines[name](tokens) for name in names}  # and everything is warm
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(timed(lambda name=name: engines[name](tokens)))
    return [
        {
            "engine": name,
            "tokens": len(tokens),
            "tokens_per_second": quartiles([len(tokens) / each for each in seconds[name]]),
            "next": said[name],
        }
        for name in names
    ]


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("prompt", "engine", "tokens/s", "of ours", "next"):
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    previous = None
    for row in rows:
        if row["tokens"] != previous:
            table.add_section()
            previous, first = row["tokens"], row["tokens_per_second"]["median"]
        rate = row["tokens_per_second"]
        table.add_row(
            str(row["tokens"]),
            row["engine"],
            f"{rate['median']:.0f} ({rate['lower']:.0f}-{rate['upper']:.0f})",
            f"{rate['median'] / first:.2f}x",
            str(row["next"]),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetokenError as error:
        print(f"prefill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
