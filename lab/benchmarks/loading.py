"""Loading: seconds, processor time and peak memory from the command to the first token, of models and dtypes.

    python lab/benchmarks/loading.py MODEL[@DTYPE] ... [--against CHECKOUT] [--repeats 3] [--json OUT]

Each run is ``foretoken generate`` with one token, imports included. ``peak`` is the most that was resident, pages of
mapped files included. Each checkout loads each model once beforehand: its modules and the native decoder are compiled
at their first use, and the files' pages are then in the system's cache. Checkouts take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from foretoken.core.provenance import provenance
from foretoken_lab.peers.versions import command

HERE = Path(__file__).resolve().parents[2]
ANSWER = ("generate", "Once", "--raw", "--method", "none", "--max-tokens", "1", "--ignore-eos")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[@DTYPE]")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = {"here": HERE} | ({} if options.against is None else {"there": options.against.resolve()})
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in options.models:
        model, _, dtype = name.partition("@")
        runs = found[name] = {where: [] for where in trees}
        for tree in trees.values():
            run(model, dtype or "auto", tree)
        for repeat in range(options.repeats):
            for where in sorted(trees, reverse=bool(repeat % 2)):
                runs[where].append(run(model, dtype or "auto", trees[where]))
        for where, of_tree in runs.items():
            middle = {key: statistics.median(each[key] for each in of_tree) for key in of_tree[0]}
            print(
                f"{name} {where}: {middle['wall']:.1f} s, processor {middle['processor']:.1f} s "
                f"({min(each['processor'] for each in of_tree):.1f} to {max(e['processor'] for e in of_tree):.1f}), "
                f"peak {middle['peak']:.2f} GB",
                flush=True,
            )
    if options.json is not None:
        facts = provenance(
            [], loaded=options.models, load=os.getloadavg(), omp=os.environ.get("OMP_NUM_THREADS"), cores=os.cpu_count()
        )
        facts["command"] = command("loading.py")
        options.json.write_text(json.dumps({"runs": found, "provenance": facts}, indent=1) + "\n")


def run(model: str, dtype: str, tree: Path) -> dict[str, float]:
    """Seconds and GB of one process."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "foretoken", *ANSWER, "--model", model, "--dtype", dtype],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{tree}: loading {model} failed")
    return {
        "wall": wall,
        "user": usage.ru_utime,
        "system": usage.ru_stime,
        "processor": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * 1024 / 1e9,
    }


if __name__ == "__main__":
    main()
