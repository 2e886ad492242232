"""A forward of k rows in two or more source trees, interleaved in one run: what a change of the hot path is worth.

    git worktree add ../before COMMIT
    python benchmarks/revisions.py --trees before=../before/src,after=src --model shape:100m --rows 1,8,12,16,32

One process for each tree, all over the same weights; they take turns, a burst of forwards each, and the others
sleep meanwhile. Medians are for comparing trees, minima for telling what the machine can do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretoken_lab.measurement import Measurement

_BURST = 4


def main() -> int:
    options = _options()
    if options.worker:
        return _work(options.worker, options)
    trees = dict(each.split("=", 1) for each in options.trees.split(","))
    rows = [int(each) for each in options.rows.split(",")]
    measurement = Measurement("revisions.py", options.json, threads=None)
    workers, commits = {}, {}
    for name, tree in trees.items():
        workers[name], commits[name] = _start(tree, options)
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in trees for n in rows}
    for turn in range(-1, options.bursts):  # one to warm up
        names = list(trees) if turn % 2 else list(reversed(trees))
        for n in rows:
            for name in names:
                found = _ask(workers[name], n)
                if turn >= 0:
                    seconds[name, n] += found
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    what = "ms of a forward" if options.clock == "wall" else "ms of processor time of a forward"
    print(f"{options.model}, {options.dtype}, {options.threads} threads, {options.context} cached rows; {what}")
    print(f"{'':>12}" + "".join(f"{n:>20}" for n in rows))
    for name in trees:
        for what, of in (("median", statistics.median), ("least", min)):
            each = [1e3 * of(seconds[name, n]) for n in rows]
            cells = "".join(f"{ms:>12.2f} ({ms / each[0]:.2f}x)" for ms in each)
            print(f"{name[:12]:>12}{cells}  {what}")
    settings = ("model", "dtype", "threads", "context", "clock", "bursts")
    found = [{"tree": name, "rows": n, "seconds": each} for (name, n), each in seconds.items()]
    measurement.write({"forwards": found}, **{name: getattr(options, name) for name in settings}, trees=commits)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", default="here=src", help="NAME=FOLDER of sources, separated by commas")
    parser.add_argument("--model", default="shape:100m", help="a checkpoint, zoo:base, grown:base:100m, shape:100m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "int8", "int4"])
    parser.add_argument("--rows", default="1,4,8,12,16,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write every time and where it comes from to this file")
    parser.add_argument("--bursts", type=int, default=12, help=f"of {_BURST} forwards, for each tree and row count")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: processor time, which separates trees on a machine that others use, too; with one thread",
    )
    parser.add_argument("--tree-draft", action="store_true", help="rows are a root and a tree that is no chain")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu: with --threads 1, since threads that wait use the processor, too")
    return options


def _start(tree: str, options: argparse.Namespace) -> tuple[Any, str]:
    """A worker over a tree's sources, and their commit."""
    command = [sys.executable, __file__, "--worker", options.model, "--threads", str(options.threads)]
    command += ["--context", str(options.context), "--dtype", options.dtype]
    command += ["--clock", options.clock, *(["--tree-draft"] if options.tree_draft else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve()), "HF_HUB_OFFLINE": "1"}
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    ready = _read(worker)
    print(f"{tree}: {ready['source']} at {ready['commit']}")
    return worker, ready["commit"]


def _ask(worker: Any, rows: int) -> list[float]:
    worker.stdin.write(f"{rows}\n")
    worker.stdin.flush()
    found: list[float] = _read(worker)["seconds"]
    return found


def _read(worker: Any) -> Any:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("a worker has ended")
    return json.loads(line)


def _work(name: str, options: argparse.Namespace) -> int:
    import torch

    import foretoken
    from foretoken.core.provenance import git_commit
    from foretoken.core.tree import TokenTree
    from foretoken.models.load import load

    if find_spec("foretoken.forward"):
        from foretoken.forward.batch import PackedBatch
        from foretoken.forward.dense import DensePlan
    else:  # a tree of before 26 November 2026
        PackedBatch = import_module("foretoken.models.batch").PackedBatch
        DensePlan = import_module("foretoken.models.dense").DensePlan

    torch.set_num_threads(options.threads)
    model = load(name, dtype=options.dtype)
    cache = model.new_cache(1)
    slot = cache.acquire()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, 8000, (options.context + 512,), generator=generator).tolist()

    def forward(count: int, *, commit: bool) -> None:
        cache.reserve(slot, count)
        begin = cache.lengths[slot]
        batch = PackedBatch()
        if options.tree_draft and not commit and count > 2:
            tree = TokenTree(tokens[1:count], [-1, -1, *range(count - 3)])
            batch.add_tree(slot, begin, tokens[0], tree)
        else:
            batch.add_chunk(slot, begin, tokens[begin : begin + count], wanted=count)
        model.forward(batch, DensePlan(cache, batch))
        if commit:
            cache.commit(slot, range(count))

    for _ in range(0, options.context, 256):
        forward(min(256, options.context - cache.lengths[slot]), commit=True)
    _tell({"source": foretoken.__file__, "commit": git_commit(Path(foretoken.__file__).parent)})
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    for line in sys.stdin:
        seconds = []
        for repeat in range(_BURST + 1):  # the first one wakes the threads
            began = clock()
            forward(int(line), commit=False)
            if repeat:
                seconds.append(clock() - began)
        _tell({"seconds": seconds})
    return 0


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
