"""Fails if a method takes more steps than the kept record says; counts do not depend on the speed of the machine.

    python scripts/steps.py

``lab/results/steps.json`` is a record of ``foretoken bench`` in float32 with drafts of fixed length. The command of its
provenance runs again, and the tokens per step of each method are compared. A rise is reported, too: keep it by running
that command at a clean commit.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from foretoken.cli.main import main

KEPT = Path(__file__).resolve().parents[1] / "lab" / "results" / "steps.json"
ROUNDING = 0.005  # another processor may sum in another order, and so choose another token where two are equally likely


def by_method(record: Path) -> dict[str, float]:
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    return {each["method"]: each["tokens_per_step"] for each in results}


def differences(kept: dict[str, float], now: dict[str, float]) -> tuple[list[str], list[str]]:
    """Methods that drafted worse, and better, each with both figures."""
    changed = {name: f"{name}: {now[name]:.3f} tokens per step, kept {value:.3f}" for name, value in kept.items()}
    fallen = [line for name, line in changed.items() if now[name] < kept[name] * (1 - ROUNDING)]
    return fallen, [line for name, line in changed.items() if now[name] > kept[name] * (1 + ROUNDING)]


def run_again(folder: Path) -> Path:
    """The record of the kept command, run now."""
    _, *arguments = shlex.split(json.loads(KEPT.read_text(encoding="utf-8"))["provenance"]["command"])
    arguments[arguments.index("--out") + 1] = str(folder / KEPT.name)
    if code := main(arguments):
        sys.exit(code)
    return folder / KEPT.name


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        fallen, risen = differences(by_method(KEPT), by_method(run_again(Path(made))))
    print("\n".join([*fallen, *risen]) or "as kept")
    sys.exit(bool(fallen))
