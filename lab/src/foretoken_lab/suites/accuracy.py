"""Accuracy of several recipes on the same questions, against a reference question by question: a table of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.suite import Column, Section
from foretoken.options.sampling import SamplingParams
from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.catalog import Setting
from foretoken_lab.tasks.difference import paired_difference
from foretoken_lab.tasks.evaluate import Answer, Report, evaluate
from foretoken_lab.tasks.example import Example


class Questions:
    """Questions of some tasks for one recipe after the other; answers are greedy.

    Args:
        tasks: names of the catalogue of tasks.
        limit: questions of each.
        setting: where the questions come from and how long their prompts are.
    """

    def __init__(self, tasks: Sequence[str], limit: int, setting: Setting | None = None) -> None:
        self._tasks = {name: catalog.find(name) for name in tasks}
        self._examples: dict[str, list[Example]] = {
            name: list(task.examples(limit, setting or Setting())) for name, task in self._tasks.items()
        }

    def ask(self, llm: Any, *, only: str | None = None) -> dict[str, Report]:
        """Answers of one recipe, by task; only of the named task if one is given."""
        return {
            name: evaluate(llm, task, self._examples[name], SamplingParams(max_tokens=task.max_tokens))
            for name, task in self._tasks.items()
            if only in (None, name)
        }


def rows_of(label: str, found: Mapping[str, Report], reference: Mapping[str, Report]) -> list[dict[str, Any]]:
    """A recipe next to the reference: a row a task, and one of all tasks together after them.

    Questions that failed in either are left out of the difference, and counted.
    """
    rows = []
    groups = {name: (report.answers, reference[name].answers) for name, report in found.items()}
    if len(groups) > 1:
        whole = [answer for report in found.values() for answer in report.answers]
        groups["all"] = (tuple(whole), tuple(answer for report in reference.values() for answer in report.answers))
    for name, (own, other) in groups.items():
        reports = [found[name]] if name in found else list(found.values())
        tokens = sum(report.metrics.num_tokens for report in reports)
        steps = sum(report.metrics.num_steps for report in reports)
        rows.append(
            {
                "method": label,
                "task": name,
                **_compared(own, other),
                "tokens_per_step": tokens / steps if steps else None,
                "mean_tokens": tokens / len(own),
                **_per_right_answer(own, steps, sum(report.seconds for report in reports)),
                "distortion": sum(r.distortion * r.metrics.num_tokens for r in reports) / tokens if tokens else None,
            }
        )
    return rows


def _per_right_answer(own: Sequence[Answer], calls: int, seconds: float) -> dict[str, float | None]:
    """What a right answer took; None where there is none."""
    right = sum(answer.correct for answer in own)
    return {
        "calls_per_right_answer": calls / right if right else None,
        "seconds_per_right_answer": seconds / right if right else None,
    }


def _compared(own: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Any]:
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if not a.error and not b.error]
    counts = {"questions": len(pairs), "failed": len(own) - len(pairs)}
    if not pairs:
        return {**counts, "accuracy": None, "minus_reference": None, "lost": 0, "won": 0, "same_text": None}
    difference = paired_difference([a.correct for a, _ in pairs], [b.correct for _, b in pairs])
    return {
        **counts,
        "accuracy": sum(a.correct for a, _ in pairs) / len(pairs),
        "minus_reference": [difference.mean, difference.low, difference.high],
        "lost": difference.second_only,
        "won": difference.first_only,
        "same_text": sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
    }


def section(title: str, rows: Sequence[Mapping[str, Any]], name: str = "accuracy") -> Section:
    """The table of such rows."""
    return Section(name, title, COLUMNS, rows)


def _difference(row: Mapping[str, Any]) -> str | None:
    if row["minus_reference"] is None:
        return None
    mean, low, high = row["minus_reference"]
    return f"{mean:+.1%} ({low:+.1%} to {high:+.1%})"


COLUMNS = (
    Column("method", lambda row: row["method"]),
    Column("task", lambda row: row["task"]),
    Column("accuracy", lambda row: row["accuracy"], "{:.1%}"),
    Column("minus the reference, 95 %", _difference),
    Column("same\ntext", lambda row: row["same_text"], "{:.0%}"),
    Column("tokens\n/step", lambda row: row["tokens_per_step"]),
    Column("calls\n/right", lambda row: row["calls_per_right_answer"], "{:.1f}"),
    Column("tokens", lambda row: row["mean_tokens"], "{:.0f}"),
    Column("TV", lambda row: row["distortion"], "{:.3f}"),
    Column("failed", lambda row: row["failed"], "{}"),
)
