"""``foretoken bench``: compare methods with plain decoding on a suite of prompts, in one run."""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.harness import Method, Plan, Records, measure
from foretoken.bench.suite import Column, Run, Section, find_suite, fingerprint, is_file, read_suite, suites
from foretoken.cli.prove.methods import check_draft_is_used, parse_methods
from foretoken.cli.shared import options
from foretoken.cli.shared.console import emit, emit_json, emit_laid_out, note, progress_bar, status_line
from foretoken.cli.shared.extended import ExtendedGroup
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.given import check_alone, typed
from foretoken.cli.shared.outputs import check_outputs, check_pictures, write_json, write_text
from foretoken.cli.shared.settings import DEFAULT_MODEL, parse_numbers
from foretoken.core import extensions
from foretoken.core.errors import ConfigError
from foretoken.data.prompts import Prompt, filled_up, limit_per_category
from foretoken.drafting.published.folder import method_for
from foretoken.options.sampling import SamplingParams

_INTERRUPTED = 130
_REPORTS = {"--csv": "csv", "--report": "html"}  # option -> name of an entry point
_OF_PARAMS = ("max_tokens", "temperature", "ignore_eos")  # settings that a named suite may provide
_MEASURE, _METHOD, _OUTPUT = "Measuring", "Method", "Output"
_method = functools.partial(typer.Option, rich_help_panel=_METHOD)
_measure = functools.partial(typer.Option, rich_help_panel=_MEASURE)
_output = functools.partial(typer.Option, rich_help_panel=_OUTPUT)


class Group(ExtendedGroup):
    """``foretoken bench``, with subcommands of other distributions."""

    path = "bench."


app = typer.Typer(cls=Group, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
@with_flags
def bench(
    *,
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    methods: Annotated[
        str | None,
        _method(
            "--methods",
            metavar="A,B,…",
            help="Comma-separated names; '+' adds an option to one: draft_model+num_speculative_tokens=4. "
            "Plain decoding (none) is always measured.",
            show_default="auto, draft_model, ngram, suffix",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        _method(
            "--set", metavar="KEY=VALUE", help="An option for all entries of a method, METHOD.NAME=VALUE. Repeatable."
        ),
    ] = None,
    draft_model: options.DraftModel = None,
    suite: Annotated[
        str | None,
        options.suite_option(_MEASURE, "A named suite also sets methods and model; --list-suites lists them."),
    ] = None,
    list_suites: Annotated[bool, typer.Option("--list-suites", help="Only list the named suites.")] = False,
    data: Annotated[Path | None, options.data_option(_MEASURE)] = None,
    limit: Annotated[int | None, options.limit_option(_MEASURE, "Maximum prompts per category.")] = None,
    repeats: Annotated[int, options.repeats_option("Interleaved repeats; the result is their median.", _MEASURE)] = 3,
    batch_size: Annotated[
        str, _measure("--batch-size", metavar="N,…", help="Prompts per batch; several sizes are measured in turn.")
    ] = "1",
    prompt_tokens: Annotated[
        str | None,
        _measure(
            "--prompt-tokens",
            metavar="N,…",
            help="Extend prompts to this many tokens with other prompts in front; combined with every batch size.",
            show_default="unchanged",
        ),
    ] = None,
    params: Annotated[
        SamplingParams,
        Flags(
            _MEASURE,
            ("max_tokens", "temperature", "seed", "ignore_eos"),
            defaults={"seed": 0},
            helps={
                "seed": "Seed of the sampling, for all methods.",
                "ignore_eos": "Continue after the end of an answer; favours methods that copy.",
            },
        ),
    ],
    raw: Annotated[bool, _measure("--raw", "--no-chat", help="Do not apply the chat template.")] = False,
    loading: options.Loading,
    json: Annotated[
        bool,
        options.json_option(
            "Print results and provenance as one JSON object on stdout, without tables; --json FILE: same as --out.",
            _OUTPUT,
        ),
    ] = False,
    out: Annotated[
        Path | None, options.out_option("Write the same JSON to a file, and print the tables.", _OUTPUT)
    ] = None,
    csv: Annotated[
        Path | None,
        _output(
            "--csv", metavar="PATH", help="Write a CSV file with one row per method and category. Needs foretoken-lab."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, _output("--markdown", metavar="PATH", help="Write the tables as Markdown.")
    ] = None,
    report: Annotated[
        Path | None,
        _output(
            "--report",
            metavar="PATH",
            help="Write an HTML page with charts and a comparison of the answers. Needs foretoken-lab.",
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> int | None:
    """Measure methods against plain decoding: same prompts, same clock, same run, in interleaved order.

    The baseline is this engine's plain decoding. Figures are medians over the repeats, with the minimum and the
    maximum. Slowdowns are reported. Failures are counted, never timed, and set exit code 1.

    [bold]Examples[/bold]

      foretoken bench

      foretoken bench --methods ngram,draft_model+num_speculative_tokens=4

      foretoken bench --limit 2 --repeats 1 --set ngram.prompt_lookup_max=3

      foretoken bench --model ./my-model --draft-model ./my-draft --out a.json

      foretoken bench --suite question.jsonl --report report.html

      foretoken bench --methods suffix --batch-size 1,8 --prompt-tokens 128,1024

      foretoken bench --suite self_speculation --data DATA --threads 1
    """
    if context.invoked_subcommand is not None:
        for name in sorted(typed(context) - {"verbose"}):
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            inner = f"foretoken bench {context.invoked_subcommand}"
            raise ConfigError(f"{option} precedes '{context.invoked_subcommand}': write {inner} {option} …")
        return None
    if list_suites:
        check_alone(context, "--list-suites", but=("list_suites", "json"))
        _print_suites(as_json=json)
        return None
    named = None if suite is None or is_file(suite) else find_suite(suite)
    if named is None and data is not None:
        raise ConfigError(f"--data {data}: only named suites use the corpora; add --suite NAME, or leave it out")
    said = typed(context)  # before a suite's defaults are applied
    if named is not None:
        chosen = {key: value for key, value in named.options.items() if key not in said}
        repeats = chosen.get("repeats", repeats)
        params = replace(params, **{key: value for key, value in chosen.items() if key in _OF_PARAMS})
        loading = replace(loading, dtype=chosen.get("dtype", loading.dtype))
        model = model if "model" in said else named.model
        methods = methods or ",".join(named.methods)
    offered = draft_model if named is None or "model" in said else draft_model or named.draft_model
    own = f"{method_for(offered)}," if offered or model == DEFAULT_MODEL else ""
    names = methods or f"auto,{own}ngram,suffix"
    rows = parse_methods(names, sets or [], target=model, draft_model=offered)
    check_draft_is_used(draft_model, rows)
    options.check_model_name(model)
    grid = _grid(batch_size, prompt_tokens)
    files = {"--out": out, "--csv": csv, "--markdown": markdown, "--report": report}
    check_outputs(files)
    reports = [
        (path, extensions.required(extensions.REPORTS, name, option))
        for option, name in _REPORTS.items()
        if (path := files[option]) is not None
    ]
    if report is not None:
        check_pictures("--report")
    prompts = limit_per_category(read_suite(suite, data), limit)
    options.check_methods(model, [row.config for row in rows], **loading.origin)
    llm = options.load_model(
        model, rows[0].config, verbose=verbose, loading=loading, max_num_seqs=max(cell.batch_size for cell in grid)
    )
    chat = llm.is_chat_model and not raw
    asked = {
        cell.prompt_tokens: _prompts_of(cell.prompt_tokens, prompts, llm, chat, params.max_tokens) for cell in grid
    }
    engines = {rows[0].label: llm}
    for row in rows[1:]:
        engines[row.label] = llm.with_method(row.config)
        options.explain(engines[row.label])
    counters = {} if named is None else {name: partial(read, llm) for name, read in named.counters.items()}
    results: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    interrupted = False
    for place, cell in enumerate(grid, start=1):
        plan = Plan(
            _in_full_groups(asked[cell.prompt_tokens], cell.batch_size),
            params,
            repeats=repeats,
            batch_size=cell.batch_size,
            chat=chat,
            counters=counters,
        )
        calls = len(engines) * len(plan.groups()) * plan.repeats
        with progress_bar(f"{place} of {len(grid)}: " if len(grid) > 1 else "", calls) as advance:
            records = measure(engines, plan, progress=advance)
        if records.samples:
            results += _results(records, rows, engines, params, cell)
            answers = answers or _answers(records, rows, llm)
        if records.interrupted:
            interrupted = True
            break
    if not results:
        note("interrupted before every method had run once: nothing to report")
        return _INTERRUPTED

    sections: list[Section] = []
    if named is not None and named.study is not None and not interrupted and len(grid) == 1:
        try:
            with status_line() as progress:
                sections = named.study(Run(engines, rows, prompts, params, chat, data, limit, progress))
        except KeyboardInterrupt:  # keep the earlier measurements
            interrupted = True
    arguments = context.find_root().obj or sys.argv[1:]
    plan = Plan(prompts, params, repeats=repeats, chat=chat)
    facts = _facts(arguments, llm, model, suite, plan, grid, interrupted=interrupted)
    record: dict[str, Any] = {"provenance": facts, "results": results, "samples": answers}
    if sections:
        record["studies"] = {section.name: list(section.rows) for section in sections}
    columns = () if named is None else named.columns
    if json:
        emit_json(record)
    else:
        _print_tables(results, facts, columns, sections)
    _write(files, record, columns, sections)
    for path, text_of_report in reports:
        write_text(path, text_of_report(record, columns, sections))
    for result in results:
        engine = engines[result["method"]]
        if not result["num_draft_tokens"] and engine.why_undrafted:
            note(f"{result['method']} never drafted: {engine.why_undrafted}")
    for engine in engines.values():
        engine.close()
    if interrupted:
        return _INTERRUPTED
    failed = [result for result in results if result["failures"]]
    for result in failed:
        why = result["errors"][0]["error"] if result["errors"] else "unknown"
        count = result["failures"]
        note(f"error: {count} answer{'s' * (count != 1)} of {result['method']} failed: {why}")
    return int(bool(failed))


@dataclass(frozen=True, slots=True)
class _Cell:
    """One setting of the grid; ``prompt_tokens`` None: unchanged prompts."""

    batch_size: int
    prompt_tokens: int | None


def _grid(batch_sizes: str, prompt_tokens: str | None) -> list[_Cell]:
    sizes = parse_numbers(batch_sizes, "--batch-size", int, least=1)
    lengths = [None] if prompt_tokens is None else parse_numbers(prompt_tokens, "--prompt-tokens", int, least=1)
    return [_Cell(size, length) for length in lengths for size in sizes]


def _prompts_of(
    num_tokens: int | None, prompts: Sequence[Prompt], llm: Any, chat: bool, max_tokens: int
) -> Sequence[Prompt]:
    """Return the prompts at one length; runs before any measurement."""
    if num_tokens is None:
        return prompts
    if num_tokens + max_tokens > llm.target.max_length:
        raise ConfigError(
            f"--prompt-tokens {num_tokens}: with --max-tokens {max_tokens} that exceeds the context of "
            f"{llm.target.max_length} tokens"
        )
    from foretoken.bench.prompt_lengths import of_length

    def count(text: str) -> int:
        if chat:
            return len(llm.chat_prompt([{"role": "user", "content": text}])["prompt_token_ids"])
        return len(llm.tokenizer(text)["input_ids"])

    return of_length(prompts, num_tokens, count)


def _in_full_groups(prompts: Sequence[Prompt], batch_size: int) -> Sequence[Prompt]:
    """Repeat prompts until every batch is full; batches never mix categories."""
    filled = filled_up(prompts, batch_size)
    if len(filled) > len(prompts):
        note(f"batch {batch_size}: {len(filled) - len(prompts)} prompts run twice, so that every batch is full")
    return filled


def _results(
    records: Records, rows: Sequence[Method], engines: Mapping[str, Any], params: SamplingParams, cell: _Cell
) -> list[dict[str, Any]]:
    """Return one record per method, with its setting and the memory in use."""
    from foretoken.bench.memory import tensor_bytes
    from foretoken.bench.summary import summarise

    promises = {label: engine.recipe.promise_for(params) for label, engine in engines.items()}
    results = summarise(records, rows, promises)
    for result in results:
        engine = engines[result["method"]]
        cache = engine.engine.cache
        result["batch_size"], result["prompt_tokens"] = cell.batch_size, cell.prompt_tokens
        result["memory"] = {
            "cache_bytes": cache.num_bytes,
            "drafter_bytes": tensor_bytes(engine.recipe.drafter, apart_from=(engine.target, cache)),
        }
    return results


def _answers(records: Records, rows: Sequence[Method], llm: Any) -> list[dict[str, Any]]:
    from foretoken.bench.samples import side_by_side
    from foretoken.engine.text.detokenise import text_of

    return side_by_side(records, rows, partial(text_of, llm.tokenizer))


def _print_suites(*, as_json: bool) -> None:
    questions = {name: find_suite(name).question for name in suites()}
    if as_json:
        emit_json({"suites": [{"name": name, "question": question} for name, question in questions.items()]})
        return
    for name, question in questions.items():
        emit(f"{name:<18}{question}")
    if not questions:
        note(f"named suites are part of foretoken-lab; {extensions.GET_LAB}")


def _facts(
    arguments: Sequence[str],
    llm: Any,
    model: str,
    suite: str | None,
    plan: Plan,
    grid: Sequence[_Cell],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    import torch

    from foretoken.bench.memory import peak_device_bytes, tensor_bytes
    from foretoken.core.provenance import provenance
    from foretoken.models.memory import peak_resident_bytes

    sizes = list(dict.fromkeys(cell.batch_size for cell in grid))
    lengths = list(dict.fromkeys(cell.prompt_tokens for cell in grid))
    prompts: Sequence[Prompt] = plan.prompts
    return provenance(
        arguments,
        model=model,
        dtype=llm.target.precision,
        device=str(llm.target.device),
        threads=torch.get_num_threads(),
        seed=plan.params.seed,
        temperature=plan.params.temperature,
        max_tokens=plan.params.max_tokens,
        ignore_eos=plan.params.ignore_eos,
        chat_template=plan.chat,
        batch_size=sizes[0] if len(sizes) == 1 else sizes,
        prompt_tokens=lengths[0] if len(lengths) == 1 else lengths,
        repeats=plan.repeats,
        interrupted=interrupted,
        memory={
            "peak_resident_bytes": peak_resident_bytes(),
            "peak_device_bytes": peak_device_bytes(),
            "target_bytes": tensor_bytes(llm.target),
        },
        suite={
            "file": suite or "bundled",
            "sha256": fingerprint(suite, prompts),
            "num_prompts": len(prompts),
            "categories": sorted({prompt.category for prompt in prompts}),
        },
    )


def _print_tables(
    results: list[dict[str, Any]], facts: dict[str, Any], columns: Sequence[Column], sections: Sequence[Section]
) -> None:
    from foretoken.bench.page import terminal_page
    from foretoken.bench.sheets import in_words

    emit_laid_out(terminal_page(results, in_words(facts), columns, sections))
    if facts["interrupted"]:
        emit("interrupted: only repeats that every method completed are counted")


def _write(
    files: Mapping[str, Path | None], record: dict[str, Any], columns: Sequence[Column], sections: Sequence[Section]
) -> None:
    if (path := files["--out"]) is not None:
        write_json(path, record)
    if (path := files["--markdown"]) is not None:
        from foretoken.bench.page import markdown_page

        write_text(path, markdown_page(record["results"], record["provenance"], columns, sections))
