"""What keys and values of 8 bits cost and give in time: a forward after a prefix, with codes and without, in turns.

    python benchmarks/coded_keys.py --model zoo:long --context 4000 --rows 1,8 --threads 1 --json coded_keys.json

With one thread a forward is timed by the processor time of that thread, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretoken.forward.dense import DensePlan
from foretoken.models.load import load
from foretoken_lab.measurement import Measurement
from foretoken_lab.timing.verification import Prefix

KINDS = ("auto", "int8")


class Clock:
    """Gets the time that attention took."""

    attention_seconds = 0.0


def timed(prefix: Prefix, rows: int, clock_of: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a forward, and of its attention."""
    batch, clock = prefix.batch(rows), Clock()
    plan = DensePlan(prefix.cache, batch)
    assert plan.native is not None
    plan.native = replace(plan.native, clock=clock)
    began = clock_of()
    prefix.model.forward(batch, plan)
    return clock_of() - began, clock.attention_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:long")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    measurement = Measurement("coded_keys.py", asked.json, threads=asked.threads)
    clock_of = time.thread_time if asked.threads == 1 else time.perf_counter
    rows = [int(each) for each in asked.rows.split(",")]
    results = []
    for dtype in asked.dtype.split(","):
        prefixes = {}
        for kind in KINDS:
            model = load(asked.model, dtype=dtype, device="cpu", kv_cache_dtype=kind)
            tokens = [(7 + 31 * each) % model.vocab_size for each in range(asked.context + max(rows))]
            prefixes[kind] = Prefix(model, tokens, random=True)
            prefixes[kind].grow(asked.context)
        for count in rows:
            found = {
                kind: [timed(prefix, count, clock_of)] for kind, prefix in prefixes.items()
            }  # the first is not counted
            for _ in range(asked.repeats):
                for kind, prefix in prefixes.items():
                    found[kind].append(timed(prefix, count, clock_of))
            for kind, times in found.items():
                seconds, attention = zip(*times[1:], strict=True)
                cache = prefixes[kind].cache
                results.append(
                    {
                        "dtype": dtype,
                        "kv_cache_dtype": kind,
                        "context": asked.context,
                        "rows": count,
                        "seconds": min(seconds),
                        "median_seconds": statistics.median(seconds),
                        "attention_seconds": min(attention),
                        "bytes_a_token": cache.num_bytes // cache.capacity,
                    }
                )
                print(*(f"{value:.6f}" if isinstance(value, float) else value for value in results[-1].values()))
    measurement.write({"results": results}, model=asked.model, repeats=asked.repeats)


if __name__ == "__main__":
    main()
