"""Processor time from a cold start to the first answer, against another checkout, by turns.

    python benchmarks/first_answer.py --against CHECKOUT [--repeats 5] [--max-tokens 32] [--json OUT]

Two things in a process of their own each: ``from foretoken import LLM``, and an answer of ``zoo:base`` on the command
line. User and system time of the process, its threads included: on a machine that others use it says more than the
clock. OMP_NUM_THREADS is as in the environment; with several threads those that wait are counted, too. Each checkout
runs once beforehand, since the native decoder is compiled at its first use.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from foretoken.core.provenance import provenance

HERE = Path(__file__).resolve().parents[1]
PROMPT = "Ben has 9 pencils and finds 14 more. How many pencils does he have now?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="another checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = {"there": options.against.resolve(), "here": HERE}
    answer = ["-m", "foretoken", "generate", PROMPT, "--model", "zoo:base", "--max-tokens", str(options.max_tokens)]
    commands = {"import": ["-c", "from foretoken import LLM"], "answer": answer}
    seconds: dict[str, dict[str, list[float]]] = {what: {where: [] for where in trees} for what in commands}
    for tree in trees.values():
        spent(answer, tree)
    for repeat in range(options.repeats):
        for what, command in commands.items():
            for where in sorted(trees, reverse=bool(repeat % 2)):
                seconds[what][where].append(spent(command, trees[where]))
    for what, found in seconds.items():
        there, here = (statistics.median(found[where]) for where in ("there", "here"))
        print(f"{what:<8}there {there:.2f} s, here {here:.2f} s: {here / there:.2f}")
    if options.json is not None:
        facts = provenance(answer, against=commit_of(trees["there"]), load=os.getloadavg(), omp=omp_threads())
        options.json.write_text(json.dumps({"processor_seconds": seconds, "provenance": facts}, indent=1) + "\n")


def omp_threads() -> str | None:
    """As the environment says; None: each library's own choice."""
    return os.environ.get("OMP_NUM_THREADS")


def commit_of(tree: Path) -> str:
    """The commit that is checked out there."""
    told = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def spent(command: list[str], tree: Path) -> float:
    """User and system time of Python with the sources of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
