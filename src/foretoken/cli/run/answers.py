"""Run prompts and write the results: streamed text, JSON objects, statistics, and partial results after Ctrl-C."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from foretoken.bench.fields import metrics_fields
from foretoken.cli.shared.console import CLEAR_LINE, emit, emit_json, note, stderr_console
from foretoken.core.metrics import Metrics
from foretoken.data.prompts import Prompt
from foretoken.options.lora import LoRARequest
from foretoken.options.sampling import SamplingParams

_INTERRUPTED = 130
_WIDTH = 72  # characters of a prompt in a header
_PATIENCE = 2.0  # seconds of prefill without a progress line


def answer_one(
    llm: Any,
    record: Prompt,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    json: bool,
    adapter: LoRARequest | None = None,
) -> int:
    """Stream one prompt to stdout, and its statistics to stderr; return the exit code."""
    output, ended, interrupted = None, True, False
    reading = _Reading()
    try:
        watched = None if json else reading.report
        for chunk in llm.stream({"prompt_token_ids": prompt_ids}, params, lora_request=adapter, on_prefill=watched):
            reading.clear()
            output = chunk.output
            if not json and chunk.text:
                emit(chunk.text, end="")
                ended = chunk.text.endswith("\n")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reading.clear()
    if output is None:  # interrupted before the first token
        return _INTERRUPTED
    if json:
        emit_json(answer_fields(record, output))
    elif not ended or not output.text:
        emit("")
    if output.error:
        note(f"error: {output.error}")
    if not json:
        note(statistics([output], output.metrics.seconds, llm))
    return _INTERRUPTED if interrupted else int(bool(output.error))


def answer_all(
    llm: Any,
    records: Sequence[Prompt],
    inputs: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    json: bool,
    adapter: LoRARequest | None = None,
) -> int:
    """Run many prompts together and write the answers in the order of the prompts, each as early as possible."""
    writer = _InOrder(records, json=json)
    interrupted = False
    started = time.perf_counter()
    bar = _bar(len(records))
    with bar or contextlib.nullcontext():

        def progress(output: Any) -> None:
            if bar is not None and output.place == writer.turn:
                bar.stop()  # it is hidden while answers are written
            writer.add(output.place, output)
            if bar is not None:
                bar.start()
                bar.advance(bar.task_ids[0])

        try:
            prompts = [{"prompt_token_ids": ids} for ids in inputs]
            llm.generate(prompts, params, lora_request=adapter, progress=progress)
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.perf_counter() - started
    writer.flush()
    for record, output in writer.failed():
        note(f"error: prompt {record.id}: {output.error}")
    if not json:
        note(statistics(list(writer.outputs.values()), seconds, llm))
    if interrupted:
        return _INTERRUPTED
    return int(bool(writer.failed()))


class _Reading:
    """A progress line on a terminal's stderr during a long prefill; removed when the answer begins."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._shown = False

    def report(self, read: int, total: int) -> None:
        """Report the number of prompt tokens read."""
        seconds = time.perf_counter() - self._began
        if seconds < _PATIENCE or not sys.stderr.isatty():
            return
        line = f"reading the prompt: {read:,} of {total:,} tokens in {seconds:.0f} s"
        print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._shown:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
        self._shown = False


class _InOrder:
    """Holds answers until all earlier ones are written; ``turn`` is the index of the next one to write."""

    def __init__(self, records: Sequence[Prompt], *, json: bool) -> None:
        self.records = records
        self.outputs: dict[int, Any] = {}
        self._json = json
        self.turn = 0

    def add(self, index: int, output: Any) -> None:
        self.outputs[index] = output
        while self.turn in self.outputs:
            self._write(self.turn)
            self.turn += 1

    def flush(self) -> None:
        """Write the remaining answers, skipping prompts without one (after an interruption)."""
        for index in sorted(self.outputs):
            if index >= self.turn:
                self._write(index)
        self.turn = len(self.records)

    def failed(self) -> list[tuple[Prompt, Any]]:
        return [(self.records[i], self.outputs[i]) for i in sorted(self.outputs) if self.outputs[i].error]

    def _write(self, index: int) -> None:
        record, output = self.records[index], self.outputs[index]
        if self._json:
            emit_json(answer_fields(record, output))
            return
        first_line = " ".join(record.text.split())
        quoted = first_line if len(first_line) <= _WIDTH else first_line[: _WIDTH - 1] + "…"
        if len(self.records) > 1:
            emit(f"=== {index + 1}/{len(self.records)} {quoted}")
        for number, completion in enumerate(output.outputs, start=1):
            if len(output.outputs) > 1:
                emit(f"--- {number} of {len(output.outputs)}")
            emit(completion.text)
        emit("")


def _bar(total: int) -> Any:
    """Return a progress bar on stderr; None for a single prompt, or if stderr is no terminal."""
    if total == 1 or not sys.stderr.isatty():
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=stderr_console(), transient=True, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=total)
    return bar


def answer_fields(record: Prompt, output: Any) -> dict[str, Any]:
    """Return the JSON object of one prompt: its first completion, and all of them under ``outputs`` if there are
    several.

    Args:
        record: the prompt.
        output: the engine's RequestOutput; an unfinished one counts as cancelled.
    """
    fields = {"id": record.id, "prompt": record.text, **completion_fields(output)}
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [dataclasses.asdict(entry) for entry in output.prompt_logprobs]
    if len(output.outputs) > 1:
        fields["outputs"] = [completion_fields(completion) for completion in output.outputs]
    return fields


def completion_fields(completion: Any) -> dict[str, Any]:
    """Return the fields of one completion, under the same names in every command."""
    fields = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason or "cancelled",
        **metrics_fields(completion.metrics),
        "promise": completion.promise,
        "error": completion.error,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [dataclasses.asdict(entry) for entry in completion.logprobs]
    return fields


def statistics(outputs: Sequence[Any], seconds: float, llm: Any = None) -> str:
    """Return one line of statistics: tokens, speed, acceptance, phases of the time, and the guarantee.

    Args:
        llm: the engine; it gives the reason if nothing was drafted.
    """
    total = Metrics()
    for output in outputs:
        for completion in output.outputs:
            total.add(completion.metrics)
    parts = [
        f"{total.num_tokens} tokens in {seconds:.2f} s",
        f"{total.num_tokens / seconds if seconds > 0 else 0:.0f} tokens/s",
        f"{total.tokens_per_step:.2f} tokens per step",
    ]
    if total.num_draft_tokens:
        share = total.num_accepted_tokens / total.num_draft_tokens
        parts.append(f"{share:.0%} of {total.num_draft_tokens} draft tokens accepted")
    elif llm is not None and llm.why_undrafted:
        parts.append(f"nothing was drafted: {llm.why_undrafted}")
    if total.num_discarded_tokens:
        parts.append(f"{total.num_discarded_tokens} prefetched draft tokens discarded")
    if total.num_moved_bytes:
        parts.append(f"{total.num_moved_bytes / total.num_steps / 1e3:.2f} kB per step to the drafter and back")
    if total.num_accepted_tokens and total.accepted_by_source:
        shares = sorted(total.accepted_by_source.items(), key=lambda each: -each[1])
        parts.append("from " + ", ".join(f"{name} {n / total.num_accepted_tokens:.0%}" for name, n in shares))
    times = {"draft": total.draft_seconds, "verify": total.verify_seconds, "other": total.other_seconds}
    whole = sum(times.values())
    if whole > 0:
        parts.append("time " + " ".join(f"{name} {value / whole:.0%}" for name, value in times.items()))
    if total.prefix_read is not None and total.prefix_read < 1:
        parts.append(f"{total.prefix_read:.0%} of the prefix read")
    if total.experts_per_step is not None:
        parts.append(f"{total.experts_per_step:.1f} experts per layer and step")
    if total.sparse:
        parts.append("distortion not known (sparse verification)")
    elif total.distortion:
        parts.append(f"distortion {total.distortion:.3g} and KL {total.kl:.3g} per token")
    completions = [completion for output in outputs for completion in output.outputs]
    cut = [each for each in completions if each.finish_reason == "length"]
    if len(completions) == 1 and cut:
        parts.append(f"cut at {len(cut[0].token_ids)} tokens by the length limit (--max-tokens)")
    elif cut:
        parts.append(f"{len(cut)} of {len(completions)} answers cut by the length limit (--max-tokens)")
    parts += sorted({output.promise for output in outputs})
    return " · ".join(parts)
