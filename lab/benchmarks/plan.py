"""How well `foretoken plan` predicts: every replayed method is run for real, too, and compared with its prediction.

    python lab/benchmarks/plan.py --model zoo:smollm2-135m --model zoo:base --limit 2 --minutes 20 --json plan.json

One plan for each model. The error is |predicted - measured| / measured of the gain over plain decoding, on the prompts
of the real run; `regret` is what the choice of a plan that had run its three best predictions alone lacks to the best
that was measured. Run it on a quiet machine; --threads 1 where it is not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken.planner import plan as planning
from foretoken_lab.measurement import Measurement


def main() -> int:
    options = _options()
    measurement = Measurement("plan.py", options.json, threads=options.threads)
    usual, planning._MEASURED = planning._MEASURED, options.runs
    found = [_planned(model, options, usual) for model in options.model]
    measurement.write(
        {"models": found},
        suite=Path(options.suite).name,
        limit=options.limit,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        minutes=options.minutes,
    )
    return 0


def _planned(model: str, options: argparse.Namespace, usual: int) -> dict[str, Any]:
    llm = LLM(model, dtype=options.dtype, threads=options.threads, speculative_config={"method": "none"})
    prompts = limit_per_category(read_prompts(Path(options.suite)), options.limit)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=0)
    methods = None if options.methods is None else options.methods.split(",")
    wanted = planning.Wanted(
        prompts=prompts,
        params=params,
        chat=llm.is_chat_model,
        minutes=options.minutes,
        drafts=options.draft_model,
        methods=methods,
        contexts=options.contexts,
    )
    made, trace = planning.make(llm, wanted, lambda state, share: print(f"{share:.0%} {state}", flush=True))
    llm.close()
    rows = [_row(each) for each in made.candidates if each.measured is not None]
    replayed = [row for row in rows if row["predicted"]]
    record = {
        "model": model,
        "answers": len(trace.answers),
        "plain_tokens_per_second": round(made.plain, 2),
        "busy": made.busy,
        "rows": rows,
        "median_error": median(row["error"] for row in replayed) if replayed else None,
        "regret": _regret(rows, usual),
    }
    _show(record)
    return record


def _row(each: Any) -> dict[str, Any]:
    on_same = each.predicted_of_run or each.predicted
    return {
        "method": each.label,
        "length": each.length,
        "predicted": round(on_same, 3),
        "measured": round(each.measured, 3),
        "error": round(abs(on_same - each.measured) / each.measured, 4) if on_same else None,
        "tokens_per_step": round(each.tokens_per_step, 3),
        "draft_share": round(each.draft_share, 3),
    }


def _regret(rows: list[dict[str, Any]], usual: int) -> float:
    """What the best of those that a usual plan runs lacks to the best of all, as a share."""
    best = sorted((row for row in rows if row["predicted"]), key=lambda row: -row["predicted"])[:usual]
    run = [row["measured"] for row in (*best, *(row for row in rows if not row["predicted"]))]
    return round(1.0 - max([1.0, *run]) / max([1.0, *(row["measured"] for row in rows)]), 4)


def _show(record: dict[str, Any]) -> None:
    table = Table(
        "method", "length", "predicted", "measured", "error", "tokens/step", "drafting", title=record["model"]
    )
    for row in record["rows"]:
        error = "-" if row["error"] is None else f"{row['error']:.1%}"
        table.add_row(
            row["method"],
            str(row["length"]),
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            error,
            f"{row['tokens_per_step']:.2f}",
            f"{row['draft_share']:.0%}",
        )
    Console(width=130).print(table)
    error = "-" if record["median_error"] is None else f"{record['median_error']:.1%}"
    print(f"median error {error} (aim: below 8 %), regret {record['regret']:.1%} (aim: below 3 %)")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="repeatable")
    parser.add_argument("--draft-model", action="append", default=[], help="draft models and folders of heads")
    parser.add_argument("--methods", metavar="A,B", help="default: all")
    parser.add_argument("--suite", default=str(BUNDLED_SUITE))
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--runs", type=int, default=8, help="methods that are run for real, by prediction")
    parser.add_argument("--minutes", type=float, default=15.0, help="of each plan")
    parser.add_argument("--contexts", type=lambda text: [int(each) for each in text.split(",")], default=[128, 2048])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
