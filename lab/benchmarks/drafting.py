"""What drafters draft and what that takes, per task: accepted length, milliseconds a draft and an accepted token.

    python benchmarks/drafting.py --methods draft_model,diffuspec --nodes 8 --max-tokens 128 --json drafting.json

Answers end where the model ends them: after that end a small model repeats itself, which a draft model copies and a
head that has read answers does not. Decoding only: the draft that reads a request's prompt, its first one, is not
timed. A drafter's time is that of all its calls: ``propose``, ``on_forward`` and ``observe``.
Every prompt goes through all methods one after the other, in an order that rotates. With --threads 1 a draft is timed
in processor time, and next to the speed on the clock stands that by processor time, prompts included: others disturb
both less.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.cli.prove.methods import parse_methods
from foretoken.core.files import check_writable, write_whole
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Drafter
from foretoken.core.provenance import provenance
from foretoken.data.prompts import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken_lab.peers.versions import Quiet, command


class Clock:
    """Times a drafter's calls after a request's first draft; replaces them on the instance."""

    def __init__(self, drafter: Drafter) -> None:
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.seconds, self.drafts, self._begun = 0.0, 0, False
        propose: Any = self._timed(drafter.propose)

        def proposing(contexts: Any, budgets: Any) -> Any:
            before = self.seconds
            found = propose(contexts, budgets)
            if not self._begun:
                self.seconds = before
            self.drafts += self._begun and len(found[0]) > 0
            self._begun = self._begun or budgets[0].max_nodes > 0
            return found

        for name in ("on_forward", "observe"):
            setattr(drafter, name, self._timed(getattr(drafter, name)))
        drafter.propose = proposing  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self._now()
            try:
                return call(*arguments)
            finally:
                self.seconds += self._now() - began

        return timed

    def begin(self) -> None:
        """A request begins; the time until its first draft is over does not count."""
        self.seconds, self.drafts, self._begun = 0.0, 0, False


@dataclass
class Total:
    """One method on one task."""

    metrics: Metrics = field(default_factory=Metrics)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    drafts: int = 0
    unequal: int = 0


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    rows = _measure(options)
    Console(width=160).print(_table(rows))
    facts = provenance([], model=options.model, methods=options.methods, dtype=options.dtype, threads=options.threads)
    facts["command"] = command("drafting.py")
    facts["share_of_processors_used_by_others"] = quiet.report()
    if options.json:
        write_whole(options.json, json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")
    return 0


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each method, task and temperature."""
    llm = LLM(options.model, dtype=options.dtype, threads=options.threads, speculative_config=None)
    methods = parse_methods(options.methods, options.set, target=options.model)
    count = {} if options.nodes == "auto" else {"num_speculative_tokens": int(options.nodes)}
    llms = {each.label: llm.with_method({**(count if each.label != "none" else {}), **each.config}) for each in methods}
    clocks = {label: Clock(each.recipe.drafter) for label, each in llms.items()}
    totals: dict[tuple[float, str, str], Total] = defaultdict(Total)
    prompts = limit_per_category(read_prompts(Path(options.suite)), options.limit)
    labels = list(llms)
    for temperature in options.temperatures:
        for turn, prompt in enumerate(prompts):
            asked = llm.chat_prompt([{"role": "user", "content": prompt.text}])
            params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=turn)
            texts = {}
            for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
                clocks[label].begin()
                began = time.process_time()
                (output,) = llms[label].generate(asked, params)
                processor_seconds = time.process_time() - began
                if output.error is not None:
                    raise SystemExit(f"{label}: {output.error}")
                texts[label] = output.token_ids
                total = totals[temperature, prompt.category, label]
                total.metrics.add(output.metrics)
                total.seconds += clocks[label].seconds
                total.processor_seconds += processor_seconds
                total.drafts += clocks[label].drafts
            for label in labels:
                totals[temperature, prompt.category, label].unequal += texts[label] != texts["none"]
    return [_row(*key, total, totals[(*key[:2], "none")]) for key, total in totals.items()]


def _row(temperature: float, task: str, label: str, total: Total, plain: Total) -> dict[str, Any]:
    metrics, milliseconds = total.metrics, 1000 * total.seconds
    return {
        "temperature": temperature,
        "task": task,
        "method": label,
        "tokens_per_step": round(metrics.tokens_per_step, 3),
        "accepted_length": round(metrics.num_accepted_tokens / max(1, metrics.num_steps), 3),
        "acceptance_by_position": [round(share, 3) for share in metrics.acceptance_by_position],
        "draft_milliseconds": round(milliseconds / total.drafts, 4) if total.drafts else None,
        "milliseconds_per_accepted": (
            round(milliseconds / metrics.num_accepted_tokens, 4) if metrics.num_accepted_tokens else None
        ),
        "step_milliseconds": round(1000 * metrics.tokens_per_step / metrics.tokens_per_second, 3),
        "speedup": round(metrics.tokens_per_second / plain.metrics.tokens_per_second, 3),
        "processor_speedup": round(_by_processor(total) / _by_processor(plain), 3),
        "unequal_outputs": total.unequal if temperature == 0 else None,
    }


def _by_processor(total: Total) -> float:
    """Tokens a second of processor time."""
    return total.metrics.num_tokens / total.processor_seconds


def _table(rows: list[dict[str, Any]]) -> Table:
    names = ("accepted_length", "draft_milliseconds", "milliseconds_per_accepted", "step_milliseconds", "speedup")
    names = (*names, "processor_speedup", "unequal_outputs")
    table = Table(
        "T",
        "task",
        "method",
        "accepted",
        "ms a draft",
        "ms an accepted token",
        "ms a step",
        "speed",
        "by processor",
        "unequal",
    )
    for row in sorted(rows, key=lambda each: (each["temperature"], each["task"])):
        shown = ["-" if row[name] is None else str(row[name]) for name in names]
        table.add_row(f"{row['temperature']:g}", row["task"], row["method"], *shown)
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--methods", default="draft_model,diffuspec", help="as foretoken bench takes them")
    parser.add_argument("--set", action="append", default=[], help="METHOD.key=value")
    parser.add_argument("--nodes", default="8", help="draft tokens of a step, or auto")
    parser.add_argument("--suite", default=str(BUNDLED_SUITE), help="prompts; a category is a task")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
