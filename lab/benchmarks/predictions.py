"""Predicted outputs against plain decoding: an answer with ten changes, and the answer to another prompt.

    python lab/benchmarks/predictions.py --model zoo:smollm2-135m --limit 6 --json predictions.json

Plain decoding writes --max-tokens tokens after each prompt, beyond the end of the answer if need be. The prediction is
this text with ten places changed: tokens replaced, left out and put in by turns. So an edit of a file is measured, by a
model that repeats the rest of it. The wrong prediction is the answer to another prompt. Each prompt goes through all of
them in an order that rotates, as often as --repeats says; the seconds are the median of the turns, since one turn may
meet another program. A ratio is that of the seconds of plain decoding.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.measurement import Measurement

PLAIN, EDIT, WRONG = "plain", "ten changes", "another answer"
CHANGES = 10


def main() -> int:
    options = _options()
    measurement = Measurement("predictions.py", options.json, threads=options.threads)
    plain = LLM(options.model, dtype=options.dtype, threads=options.threads, speculative_config=None)
    rows = [row for method in options.methods.split(",") for row in _measured(plain, method, options)]
    _show(rows)
    measurement.write(
        {"rows": rows}, model=options.model, dtype=options.dtype, limit=options.limit, max_tokens=options.max_tokens
    )
    return 0


def edited(tokens: list[int], size: int) -> list[int]:
    """The text with ten places changed: tokens replaced, left out and put in by turns.

    Args:
        size: of the vocabulary.
    """
    found, apart = list(tokens), max(1, len(tokens) // CHANGES)
    for change in reversed(range(CHANGES)):
        place = change * apart + apart // 2
        other = (found[place] + 17) % size
        found[place : place + 1] = ([other], [], [found[place], other, other])[change % 3]
    return found


def _measured(plain: LLM, method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    drafts = plain.with_method({"method": method})
    prompts = limit_per_category(read_prompts(Path(options.suite)), options.limit)
    conversations = [[{"role": "user", "content": each.text}] for each in prompts]
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    answers = [list(plain.chat([each], params)[0].token_ids) for each in conversations]
    found = []
    for number, (conversation, answer) in enumerate(zip(conversations, answers, strict=True)):
        changed = edited(answer, plain.target.vocab_size)
        runs = {
            PLAIN: (plain, params),
            EDIT: (drafts, replace(params, prediction=changed)),
            WRONG: (drafts, replace(params, prediction=answers[number - 1])),
        }
        turns: dict[str, list[float]] = {name: [] for name in runs}
        steps = {}
        for turn in range(options.repeats):
            for name in [*runs, *runs][(number + turn) % len(runs) :][: len(runs)]:
                llm, asked = runs[name]
                began = perf_counter()
                (output,) = llm.chat([conversation], asked)
                turns[name].append(perf_counter() - began)
                steps[name] = output.metrics.num_steps
                assert list(output.token_ids) == answer, f"prompt {number}: {name} has another text"
        seconds = {name: round(median(each), 4) for name, each in turns.items()}
        found.append({"method": method, "prompt": prompts[number].id, "seconds": seconds, "steps": steps})
    return found


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("method", "prediction", "tokens per step", "speed over plain", "least", "most")
    for method in dict.fromkeys(str(row["method"]) for row in rows):
        here = [row for row in rows if row["method"] == method]
        for name in (EDIT, WRONG):
            ratios = [row["seconds"][PLAIN] / row["seconds"][name] for row in here]
            shares = [row["steps"][PLAIN] / row["steps"][name] for row in here]
            speeds = (f"{each:.2f}x" for each in (median(ratios), min(ratios), max(ratios)))
            table.add_row(method, name, f"{median(shares):.2f}", *speeds)
    Console(width=100).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--methods", default="none,auto", help="the prediction is copied by any drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--suite", default=BUNDLED_SUITE, help="prompts, JSON Lines")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3, help="turns, of which the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the record here")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
