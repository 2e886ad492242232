"""Why a run was slow, from the JSON that ``generate --json`` and ``bench --json`` write."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.doctor.finding import Finding, found

_MUCH_DRAFTING = 1 / 3
_MUCH_ELSE = 0.1
_FEW_ACCEPTED = 0.4  # of first positions
_REMEDY = "name what --json of generate or bench wrote"
_SUMS = ("seconds", "num_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens")


def check(path: Path) -> list[Finding]:
    """Name the causes, those that cost most first.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    rows, facts = _rows(path)
    causes: list[tuple[float, Finding]] = []
    plain = next((row for row in rows if row["drafter"] == "none"), None)
    for row in rows:
        causes += [(seconds, _labelled(row, each)) for seconds, each in _of_row(row, plain)]
    findings = [each for _, each in sorted(causes, key=lambda cause: -cause[0])]
    cores, threads = facts.get("cores"), facts.get("threads")
    if isinstance(cores, int) and isinstance(threads, int) and threads > cores:
        findings.append(found("threads", f"{threads} on {cores} cores", warn=f"--threads {cores}"))
    return findings or [found("run", f"{len(rows)} row{'s' * (len(rows) != 1)} without a known cause of slowness")]


def _labelled(row: Mapping[str, Any], finding: Finding) -> Finding:
    return Finding(f"{row['method']}: {finding.check}", finding.status, finding.found, finding.remedy)


def _of_row(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> Iterator[tuple[float, Finding]]:
    """Causes in one method's figures, each with the seconds that it costs."""
    seconds, times = row["seconds"] or 0.0, row["time"]
    draft, other = times.get("draft") or 0.0, times.get("other") or 0.0
    if row.get("errors"):
        yield seconds, found("failures", str(row["errors"]), fail="correct the failures first")
    first = row.get("first_token_seconds")
    reading = (first or 0.0) * (row.get("num_prompts") or 0)
    if seconds and reading > seconds / 2:
        remedy = "prompts that begin alike are read once with prefix caching (serve has it on); put what varies last"
        yield reading, found("prompts", f"reading them takes {reading / seconds:.0%} of the time", warn=remedy)
    if seconds and other > _MUCH_ELSE * seconds and not reading > seconds / 2:
        remedy = "texts, grammars, penalties or a busy machine: compare with a plain greedy request"
        yield other, found("other work", f"takes {other / seconds:.0%} of the time", warn=remedy)
    drafted = row["num_draft_tokens"] or 0
    if row["drafter"] == "none":
        return
    if not drafted:
        yield seconds, found("drafting", "nothing was drafted", warn="see the run's last line for the reason")
        return
    if seconds and draft > _MUCH_DRAFTING * seconds:
        remedy = (
            "round the draft (--set dtype=int8 or int4), shorten it (num_speculative_tokens), or take a smaller one"
        )
        yield draft, found("drafting", f"takes {draft / seconds:.0%} of the time", warn=remedy)
    accepted = row["num_accepted_tokens"] or 0
    by_position = row.get("acceptance_by_position") or []
    lost = (drafted - accepted) / drafted * seconds
    if not accepted:
        remedy = "the draft never agrees: look at its tokenizer, template and weights (foretoken doctor --model)"
        yield lost, found("acceptance", f"0 of {drafted} draft tokens were accepted", fail=remedy)
    elif by_position and by_position[0] < _FEW_ACCEPTED:
        remedy = "this draft seldom agrees on this text: another method, or a head trained on it"
        yield lost, found("acceptance", f"{by_position[0]:.0%} of first draft tokens are accepted", warn=remedy)
    elif len(by_position) > 3 and by_position[-1] < by_position[0] / 4:
        length = next(i for i, each in enumerate(by_position) if each < by_position[0] / 2)
        remedy = f"--set num_speculative_tokens={max(1, length)}"
        yield lost / 2, found("draft length", f"acceptance falls to half at token {length + 1}", warn=remedy)
    yield from _dear_rows(row, plain, drafted)


def _dear_rows(
    row: Mapping[str, Any], plain: Mapping[str, Any] | None, drafted: float
) -> Iterator[tuple[float, Finding]]:
    """Whether verifying several tokens costs about as much as computing them one by one."""
    if plain is None or not plain["num_steps"] or not row["num_steps"]:
        return
    verify, one = (each["time"].get("verify") or 0.0 for each in (row, plain))
    step, single = verify / row["num_steps"], one / plain["num_steps"]
    nodes = drafted / row["num_steps"]
    if nodes >= 1 and single and (step / single - 1) / nodes > 0.5:
        more = (step / single - 1) / nodes
        remedy = "is the native path in use (foretoken doctor --model)? shorter drafts cost less"
        facts = f"verifying one more token costs {more:.0%} of a step"
        yield verify - one, found("rows", facts, warn=remedy)


def _rows(path: Path) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The rows of a benchmark, or the sum of the answers of ``generate``; and the provenance."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--run {path}: cannot be read ({error})") from None
    try:
        records = [json.loads(text)]
    except ValueError:
        try:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(
                f"--run {path}: is no JSON ({error}): name what --json of generate or bench wrote"
            ) from None
    try:
        if isinstance(records[0], dict) and "results" in records[0]:
            return [dict(_checked(each)) for each in records[0]["results"]], records[0].get("provenance") or {}
        return [_sum([_checked(each) for each in records])], {}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"--run {path}: {error} is missing: {_REMEDY}") from None


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in (*_SUMS, "time"):
        row[name]
    return row


def _sum(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(each[name] or 0 for each in answers) for name in _SUMS}
    total["time"] = {name: sum(each["time"].get(name) or 0.0 for each in answers) for name in answers[0]["time"]}
    total["errors"] = next((each["error"] for each in answers if each.get("error")), None)
    total["acceptance_by_position"] = max((each.get("acceptance_by_position") or [] for each in answers), key=len)
    return {**total, "method": f"{len(answers)} answers", "drafter": None}
