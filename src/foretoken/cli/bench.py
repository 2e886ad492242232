"""``foretoken bench``: methods against plain decoding on a suite of prompts, all in one run."""

from __future__ import annotations

import hashlib
import json as jsonlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.harness import Method, Plan, Records, measure
from foretoken.bench.suite import SUITES, Column, Run, Section, find_suite
from foretoken.bench.workloads import BUNDLED_SUITE, Prompt, limit_per_category, read_prompts
from foretoken.cli.console import emit, finite, note, status_line, stderr_console
from foretoken.cli.options import (
    Device,
    DraftModel,
    Dtype,
    JsonFile,
    Model,
    Threads,
    TrustRemoteCode,
    Verbose,
    check_model_name,
    check_placement,
    data_option,
    explain,
    load_model,
    temperature_option,
)
from foretoken.cli.settings import DEFAULT_MODEL, parse_methods
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable, write_whole
from foretoken.core.sampling import SamplingParams

_INTERRUPTED = 130
_FILE_WIDTH = 120
_DEFAULT_METHODS = "draft_model,ngram,suffix"
_MEASURE, _METHODS, _OUTPUT = "Measuring", "Methods", "Output"

app = typer.Typer(rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,…",
            help="Names with commas; options of an entry with '+': draft_model+num_speculative_tokens=4. "
            "Plain decoding (none) is always measured.",
            show_default="draft_model, ngram, suffix",
            rich_help_panel=_METHODS,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.KEY=VALUE",
            help="An option for every entry of a method. Repeatable.",
            rich_help_panel=_METHODS,
        ),
    ] = None,
    draft_model: DraftModel = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAME|FILE.jsonl",
            help="A named suite (--list-suites), which brings methods, model and prompts; or a file of prompts in "
            "Spec-Bench format: turns (the first is used) and category; .gz and .xz are read too.",
            show_default="a bundled file of 30",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    list_suites: Annotated[
        bool, typer.Option("--list-suites", help="List the named suites, and do nothing else.")
    ] = False,
    data: Annotated[Path | None, data_option(_MEASURE)] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="Prompts of every category at most; some suites take it for their questions, too.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, help="Interleaved repeats (the median counts).", rich_help_panel=_MEASURE),
    ] = 3,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, help="Prompts that run together.", rich_help_panel=_MEASURE),
    ] = 1,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Tokens of an answer at most.", rich_help_panel=_MEASURE)
    ] = 128,
    temperature: Annotated[float, temperature_option(_MEASURE)] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", help="Seeds prompts and repeats, alike for all methods.", rich_help_panel=_MEASURE)
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="No natural end; flatters n-gram drafts.", rich_help_panel=_MEASURE),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", "--no-chat", help="No chat template.", rich_help_panel=_MEASURE)
    ] = False,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    device: Device = "auto",
    threads: Threads = None,
    json: JsonFile = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write a report with pictures.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    verbose: Verbose = False,
) -> int | None:
    """Measure methods against plain decoding: same prompts, same clock, same run, in interleaved order.

    The baseline is our own plain decoding. Figures are medians over the
    repeats, beside them the lowest and the highest. A slowdown is shown as
    one; failures are counted, never timed.

    [bold]Examples[/bold]

      foretoken bench

      foretoken bench --methods ngram,draft_model+num_speculative_tokens=4

      foretoken bench --limit 2 --repeats 1 --set ngram.prompt_lookup_max=3

      foretoken bench --model ./my-model --draft-model ./my-draft --json a.json

      foretoken bench --suite question.jsonl --report report.html

      foretoken bench --suite self_speculation --data DATA --threads 1
    """
    if context.invoked_subcommand is not None:
        return None
    if list_suites:
        _print_suites()
        return None
    named = None if suite is None or _is_file(suite) else find_suite(suite)
    if named is not None:
        typed = _typed(context)
        chosen = {key: value for key, value in named.options.items() if key not in typed}
        max_tokens, repeats = chosen.get("max_tokens", max_tokens), chosen.get("repeats", repeats)
        temperature, dtype = chosen.get("temperature", temperature), chosen.get("dtype", dtype)
        ignore_eos = chosen.get("ignore_eos", ignore_eos)
        model = model if "model" in typed else named.model
        methods = methods or ",".join(named.methods)
        if draft_model is None and "model" not in typed:
            draft_model = named.draft_model
    names = methods or (_DEFAULT_METHODS if draft_model or model == DEFAULT_MODEL else "ngram,suffix")
    rows = parse_methods(names, sets or [], target=model, draft_model=draft_model)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    check_placement(dtype, device)
    check_model_name(model)
    _check_outputs(json, report)
    found = read_prompts(suite or BUNDLED_SUITE) if named is None else named.prompts(data)
    prompts = limit_per_category(found, limit)

    llm = load_model(
        model,
        rows[0].config,
        verbose=verbose,
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=batch_size,
        trust_remote_code=trust_remote_code,
    )
    engines = {rows[0].label: llm}
    for row in rows[1:]:
        engines[row.label] = llm.with_method(row.config)
        explain(engines[row.label])
    chat = llm.is_chat_model and not raw
    counters = {} if named is None else {name: partial(read, llm) for name, read in named.counters.items()}
    plan = Plan(
        prompts, params, repeats=repeats, batch_size=batch_size, chat=chat, first_token=bool(named), counters=counters
    )
    records = _measure_with_bar(engines, plan)
    if not records.samples:
        note("interrupted before every method had run once: nothing to report")
        return _INTERRUPTED

    results = _finish(records, rows, engines, params)
    sections: list[Section] = []
    if named is not None and named.study is not None and not records.interrupted:
        try:
            with status_line() as progress:
                sections = named.study(Run(engines, rows, prompts, params, chat, data, limit, progress))
        except KeyboardInterrupt:  # what was measured before it is not lost
            records.interrupted = True
    facts = _facts(context.find_root().obj or sys.argv[1:], llm, model, suite, plan, records, seed=seed)
    _print_tables(results, facts, () if named is None else named.columns, sections)
    if json is not None:
        record = {"provenance": facts, "results": results}
        if sections:
            record["studies"] = {section.name: list(section.rows) for section in sections}
        write_whole(json, jsonlib.dumps(finite(record), indent=1) + "\n")
        note(f"wrote {json}")
    if report is not None:
        from foretoken.bench.report import html_report

        write_whole(report, html_report(results, facts))
        note(f"wrote {report}")
    for engine in engines.values():
        engine.close()
    if records.interrupted:
        return _INTERRUPTED
    failed = [result for result in results if result["failures"]]
    for result in failed:
        why = result["errors"][0]["error"] if result["errors"] else "unknown"
        note(f"error: {result['failures']} answers of {result['method']} failed: {why}")
    return int(bool(failed))


def _is_file(suite: str) -> bool:
    """Whether this names a file of prompts: names of suites are bare words."""
    return bool(set(suite) & set("./\\~")) or Path(suite).exists()


def _typed(context: typer.Context) -> set[str]:
    """The options that stand on the command line: what they say goes before a suite's defaults."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def _print_suites() -> None:
    for name in SUITES:
        emit(f"{name:<18}{find_suite(name).question}")


def _check_outputs(json: Path | None, report: Path | None) -> None:
    """Find out before an hour of measuring, not after, that results cannot be written."""
    if json is not None:
        check_writable(json, "--json")
    if report is not None:
        check_writable(report, "--report")
        if json is not None and json.resolve() == report.resolve():
            raise ConfigError(f"--json and --report both name {report}: choose two files")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--report needs matplotlib: pip install 'foretoken[report]', or leave --report out"
            ) from None


def _measure_with_bar(engines: dict[str, Any], plan: Plan) -> Records:
    total = len(engines) * len(plan.groups()) * plan.repeats
    if not sys.stderr.isatty():
        return measure(engines, plan)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # drawn after calls only: a thread that redraws would take processor time from what is measured
    with Progress(*columns, console=stderr_console(), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("warm-up", total=total)

        def step(label: str) -> None:
            progress.update(task, advance=1, description=label, refresh=True)

        return measure(engines, plan, progress=step)


def _finish(
    records: Records, rows: Sequence[Method], engines: dict[str, Any], params: SamplingParams
) -> list[dict[str, Any]]:
    from foretoken.bench.summary import summarise

    promises = {label: engine.recipe.promise_for(params) for label, engine in engines.items()}
    return summarise(records, rows, promises)


def _facts(
    arguments: Sequence[str], llm: Any, model: str, suite: str | None, plan: Plan, records: Records, *, seed: int
) -> dict[str, Any]:
    import torch

    from foretoken.core.provenance import provenance

    prompts: Sequence[Prompt] = plan.prompts
    return provenance(
        arguments,
        model=model,
        dtype=llm.target.precision,
        device=str(llm.target.device),
        threads=torch.get_num_threads(),
        seed=seed,
        temperature=plan.params.temperature,
        max_tokens=plan.params.max_tokens,
        ignore_eos=plan.params.ignore_eos,
        chat_template=plan.chat,
        batch_size=plan.batch_size,
        repeats=plan.repeats,
        interrupted=records.interrupted,
        suite={
            "file": suite or "bundled",
            "sha256": _fingerprint(suite, prompts),
            "num_prompts": len(prompts),
            "categories": sorted({prompt.category for prompt in prompts}),
        },
    )


def _fingerprint(suite: str | None, prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the file, or of the prompts that a named suite has put together."""
    if suite is None or _is_file(suite):
        return hashlib.sha256(Path(suite or BUNDLED_SUITE).read_bytes()).hexdigest()
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()


def _print_tables(
    results: list[dict[str, Any]], facts: dict[str, Any], columns: Sequence[Column], sections: Sequence[Section]
) -> None:
    from rich.console import Console

    from foretoken.bench.table import tables

    suite = facts["suite"]
    title = (
        f"{facts['model']} {facts['dtype']}, {suite['num_prompts']} prompts x {facts['repeats']} repeats, "
        f"{facts['threads']} threads, batch {facts['batch_size']}, {facts['cpu']}"
    )
    # a file or a pipe has no width: wide enough then for every column
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    with console.capture() as capture:
        console.print(tables(results, title, columns, sections))
    emit(capture.get(), end="")
    if facts["interrupted"]:
        emit("interrupted: only what every method had finished is counted")
