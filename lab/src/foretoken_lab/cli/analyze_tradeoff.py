"""``foretoken analyze tradeoff``: what lossy verification costs in quality and gains in speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import catalog
from foretoken.cli.shared.console import emit, emit_json, emit_laid_out, note, progress_bar
from foretoken.cli.shared.flags import with_flags
from foretoken.cli.shared.options import (
    DraftModel,
    Loading,
    Model,
    Verbose,
    check_model_name,
    data_option,
    json_option,
    limit_option,
    load_model,
    out_option,
    repeats_option,
)
from foretoken.cli.shared.outputs import check_outputs, check_pictures, write_json, write_text
from foretoken.cli.shared.settings import (
    DEFAULT_MODEL,
    parse_numbers,
    parse_setting,
    parse_settings,
    speculative_config,
    split_settings,
)
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.options.sampling import SamplingParams
from foretoken_lab.cli.eval import check_fits, find_tasks, num_tokens
from foretoken_lab.cli.options import answer_length_option, prompt_length_option, seed_option

if TYPE_CHECKING:
    from foretoken_lab.studies.tradeoff.points import Point
    from foretoken_lab.studies.tradeoff.run import Questions
    from foretoken_lab.studies.tradeoff.study import Tradeoff
    from foretoken_lab.tasks.catalog import Setting, Task

_INTERRUPTED = 130
_MANY = 100  # questions of a task; below this the output suggests a larger --limit
_METHOD, _RULES, _MEASURE, _OUTPUT = "Method", "Rules", "Measuring", "Output"


@with_flags
def tradeoff(
    *,
    context: typer.Context,
    target: Model = DEFAULT_MODEL,
    draft: DraftModel = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Another drafter; 'foretoken methods' lists them.",
            show_default="draft_model",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the method, or num_speculative_tokens; not for rules with a drafter of their own. "
            "Repeatable.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="A,B,…",
            help="Lossy verifiers, options of one with '+': sprinter+stop=confidence. Plain decoding, the draft alone "
            "and exact verification are always measured.",
            show_default="every lossy rule",
            rich_help_panel=_RULES,
        ),
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option(
            "--knob",
            metavar="RULE.OPTION=A,B,…",
            help="Values to try, from strict to loose; a single value fixes an option. Options of a rule's own "
            "drafter (sprinter.threshold) count as the rule's. Repeatable.",
            show_default="three values a rule",
            rich_help_panel=_RULES,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="X,…",
            help="Every rule at its last value also within these budgets (max_distortion).",
            rich_help_panel=_RULES,
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option("--task", metavar="A,B,…", help="'foretoken eval --list' shows them.", rich_help_panel=_MEASURE),
    ] = "code,profiles",
    limit: Annotated[
        int, limit_option(_MEASURE, "Questions per task at most; four times as many halve the intervals.", least=None)
    ] = 30,
    data: Annotated[Path | None, data_option(_MEASURE)] = None,
    prompt_length: Annotated[int | None, prompt_length_option(_MEASURE)] = None,
    temperature: Annotated[
        str, typer.Option("--temperature", metavar="X,…", help="0 is greedy decoding.", rich_help_panel=_MEASURE)
    ] = "0",
    max_tokens: Annotated[int | None, answer_length_option(_MEASURE)] = None,
    repeats: Annotated[int, repeats_option("Interleaved repeats; they give the range of speeds.", _MEASURE)] = 2,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Questions that run together.", rich_help_panel=_MEASURE)
    ] = 1,
    seed: Annotated[int, seed_option(_MEASURE)] = 0,
    loading: Loading,
    json: Annotated[
        bool,
        json_option("Results and provenance as one JSON object on stdout, no tables; --json FILE: as --out.", _OUTPUT),
    ] = False,
    out: Annotated[Path | None, out_option("Write the same JSON there, next to the tables.", _OUTPUT)] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Write a picture.", rich_help_panel=_OUTPUT)
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Quality against speed over the knob of every lossy rule, with the Pareto front.

    All points answer the same questions in one run, in interleaved order.
    Quality is compared with exact verification question by question, with a
    95 % interval; speeds have the range of the repeats. The advice below the
    tables claims no difference that these do not show.

    The default takes about five minutes for the bundled pair, and its
    intervals are wide. For narrow ones take more questions and repeats
    (--limit 100 --repeats 3: five times as long) or fewer rules.

    [bold]Examples[/bold]

      foretoken analyze tradeoff

      foretoken analyze tradeoff --rules sprinter,mixture --limit 100 --repeats 3

      foretoken analyze tradeoff --knob sprinter.threshold=0.9,0.7,0.5

      foretoken analyze tradeoff --rules typical --budget 0.01,0.05

      foretoken analyze tradeoff --temperature 0,1 --out a.json --picture a.png

      foretoken analyze tradeoff --model ./big --draft-model ./small --task json
    """
    from foretoken_lab.studies.tradeoff.points import EXACT_LENGTHS, LENGTH, default_rules, make_points

    temperatures = parse_numbers(temperature, "--temperature", float)
    exact = _exact_config(method, parse_settings(sets or []), target, draft)
    alone = exact["model"] if exact["method"] == "draft_model" else None
    points = make_points(
        default_rules() if rules is None else _parse_rules(rules),
        _parse_knobs(knobs or []),
        [] if budget is None else parse_numbers(budget, "--budget", float),
        draft=alone is not None,
        lengths=() if LENGTH in exact else EXACT_LENGTHS,
        own=lambda rule, drafter, fixed: _own_config(
            rule, drafter, fixed, target, exact.get("model"), strict=rules is not None
        ),
    )
    check_model_name(target)
    if alone is not None:
        check_model_name(str(alone))
    _check_outputs(out, picture)

    from foretoken_lab.tasks.catalog import Setting

    tasks = find_tasks(task)
    setting = Setting(data=data, context=prompt_length)
    params = {each.name: _params(each, max_tokens, seed) for each in tasks}
    for each in tasks:
        each.check(limit, setting)
    for value in temperatures:
        replace(params[tasks[0].name], temperature=value)  # its own check

    placement: dict[str, Any] = {**asdict(loading), "max_num_seqs": batch_size}
    llm = load_model(target, {"method": "none"}, verbose=verbose, **placement)
    check_fits(prompt_length, llm)
    engines = _engines(llm, points, exact, alone, strict=rules is not None, verbose=verbose, placement=placement)
    every = _questions(engines, tasks, replace(setting, count=lambda text: num_tokens(llm, text)), limit, params)
    studies, interrupted = _measure(engines, points, every, temperatures, repeats, llm)
    if not studies:
        note("interrupted before every point had answered once: nothing to report")
        return _INTERRUPTED

    facts = _facts(
        context.find_root().obj or sys.argv[1:],
        llm,
        exact,
        every,
        seed=seed,
        batch_size=batch_size,
        repeats=repeats,
        interrupted=interrupted,
        data=None if setting.folder is None else str(setting.folder),
        context=prompt_length,
    )
    record = _record(studies, facts)
    if json:
        emit_json(record)
    else:
        _print(studies, facts)
    if out is not None:
        write_json(out, record)
    if picture is not None:
        from foretoken_lab.studies.tradeoff.picture import draw_tradeoff

        write_text(picture, draw_tradeoff(studies, f"{facts['target']}, {', '.join(facts['tasks'])}"))
    for engine in engines.values():
        engine.close()
    if interrupted:
        return _INTERRUPTED
    return int(any(row.failed for study in studies for row in study.rows))


def _exact_config(method: str | None, settings: Mapping[str, Any], target: str, draft: str | None) -> dict[str, Any]:
    if "verifier" in settings:
        raise ConfigError("--set verifier=…: name lossy rules with --rules; exact verification is always measured")
    config = speculative_config(method or "draft_model", settings, target=target, draft_model=draft)
    if config["method"] == "none":
        raise ConfigError("--method none drafts nothing, so there is nothing to verify: use draft_model, or suffix")
    return config


def _own_config(
    rule: str, method: str, fixed: Mapping[str, Any], target: str, draft: str | None, *, strict: bool
) -> dict[str, Any] | None:
    """The config of a drafter that belongs to a rule; None: it is missing, and the rule was not requested by name."""
    named = {key: fixed[key] for key in ("model",) if key in fixed}
    if draft is not None and catalog.find(method, "drafter").load().declared.draft_model:
        named.setdefault("model", draft)
    try:
        return speculative_config(method, named, target=target)
    except ConfigError:
        reason = f"rule '{rule}' drafts with a model of its own: name one with --knob {rule}.model=PATH"
        if strict:
            raise ConfigError(reason) from None
        note(f"{rule} left out: {reason}")
        return None


def _parse_knobs(texts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """``RULE.OPTION=A,B,…`` as rule -> option -> values, in the order given."""
    knobs: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        rule, dot, key = name.strip().partition(".")
        if not equals or not dot or not rule or not key:
            raise ConfigError(f"--knob '{text}': write RULE.OPTION=A,B,…, for example typical.epsilon=0.05,0.1,0.3")
        parsed = [parse_setting(f"{key}={value.strip()}", "--knob")[1] for value in values.split(",")]
        if "" in parsed:
            raise ConfigError(f"--knob '{text}': write values with commas between them, for example {name}=0.1,0.3")
        if len(set(map(str, parsed))) < len(parsed):
            raise ConfigError(f"--knob '{text}' names a value twice: keep one")
        if key in knobs.setdefault(rule, {}):
            raise ConfigError(f"--knob gives '{name}' twice: put all values into one")
        knobs[rule][key] = parsed
    return knobs


def _parse_rules(text: str) -> dict[str, dict[str, Any]]:
    """Labels, with the options that stand in them."""
    rules: dict[str, dict[str, Any]] = {}
    for label in (piece.strip() for piece in text.split(",")):
        name, *options = split_settings(label)
        if not name:
            raise ConfigError(f"--rules '{text}': write names with commas between them, for example typical,mixture")
        if label in rules:
            raise ConfigError(f"--rules names '{label}' twice: keep one")
        rules[label] = parse_settings(options, f"--rules {name}+")
    return rules


def _check_outputs(out: Path | None, picture: Path | None) -> None:
    """Find out before the measuring, not after, that results cannot be written."""
    check_outputs({"--out": out, "--picture": picture})
    if picture is None:
        return
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"--picture {picture}: pictures are PNG; name a file that ends in .png")
    check_pictures("--picture")


def _params(task: Task, max_tokens: int | None, seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=task.max_tokens if max_tokens is None else max_tokens)


def _engines(
    llm: Any,
    points: Sequence[Point],
    exact: Mapping[str, Any],
    alone: Any,
    *,
    strict: bool,
    verbose: bool,
    placement: dict[str, Any],
) -> dict[str, Any]:
    """An engine for every point, in the order of the points."""
    from foretoken_lab.studies.tradeoff.points import DRAFT, PLAIN
    from foretoken_lab.studies.tradeoff.run import build_engines

    def leave_out(point: Point, error: ForetokenError) -> None:
        note(f"{point.label} left out: {error}")

    engines = {PLAIN: llm, **build_engines(llm, points, exact, None if strict else leave_out)}
    if alone is not None:
        dtype, device = str(llm.target.dtype).removeprefix("torch."), str(llm.target.device)
        own: dict[str, Any] = {"kv_cache_dtype": "auto", "revision": None, "max_model_len": None}  # those of the target
        same = {**placement, "dtype": dtype, "device": device, **own}
        small = load_model(str(alone), {"method": "none"}, verbose=verbose, **same)
        small.tokenizer = llm.tokenizer  # the same questions, in the same words; the vocabularies were compared
        engines[DRAFT] = small
    return {point.label: engines[point.label] for point in points if point.label in engines}


def _questions(
    engines: Mapping[str, Any],
    tasks: Sequence[Task],
    setting: Setting,
    limit: int,
    params: Mapping[str, SamplingParams],
) -> list[Questions]:
    from foretoken_lab.studies.tradeoff.points import PLAIN
    from foretoken_lab.studies.tradeoff.run import Questions, fitting

    shortest = min(engine.target.max_length for engine in engines.values())
    every = []
    for task in tasks:
        asked = Questions(task, task.examples(limit, setting), params[task.name])
        kept = fitting(asked, engines[PLAIN], shortest)
        if missing := len(asked.examples) - len(kept.examples):
            note(f"{task.name}: {missing} of {len(asked.examples)} questions left out: they do not fit the context")
        every.append(kept)
    return every


def _measure(
    engines: Mapping[str, Any],
    points: Sequence[Point],
    every: Sequence[Questions],
    temperatures: Sequence[float],
    repeats: int,
    llm: Any,
) -> tuple[list[Tradeoff], bool]:
    """A study for each temperature that was measured, and whether it was cut short."""
    from foretoken_lab.studies.tradeoff.modelled import modelled
    from foretoken_lab.studies.tradeoff.run import measure
    from foretoken_lab.studies.tradeoff.study import tradeoff as study

    studies: list[Tradeoff] = []
    total = len(engines) * repeats * len(temperatures) * sum(len(each.examples) for each in every)
    with progress_bar("answers", total) as advance:
        for value in temperatures:
            warm = [replace(each, params=replace(each.params, temperature=value)) for each in every]
            found = measure(engines, warm, repeats=repeats, scorer=llm.target, progress=advance)
            if found.trials:
                speeds = {} if found.interrupted else modelled(engines, warm[0], found.trials)
                studies.append(study(points, found.trials, value, speeds))
            if found.interrupted:
                return studies, True
    return studies, False


def _facts(
    arguments: Sequence[str], llm: Any, exact: Mapping[str, Any], every: Sequence[Questions], **settings: Any
) -> dict[str, Any]:
    import torch

    from foretoken.core.provenance import provenance

    return provenance(
        arguments,
        target=llm.target.name,
        exact=dict(exact),
        dtype=llm.target.precision,
        device=str(llm.target.device),
        threads=torch.get_num_threads(),
        chat_template=llm.is_chat_model,
        intervals="95 %: Wilson (accuracy), Newcombe paired (difference), Student by question (nll, other measures)",
        tasks={
            each.task.name: {"num_questions": len(each.examples), "max_tokens": each.params.max_tokens}
            for each in every
        },
        **settings,
    )


def _print(studies: Sequence[Tradeoff], facts: Mapping[str, Any]) -> None:
    from foretoken_lab.studies.tradeoff.advice import advice
    from foretoken_lab.studies.tradeoff.table import tables

    asked = ", ".join(f"{each['num_questions']} {name}" for name, each in facts["tasks"].items())
    drafter = " ".join(str(value) for key, value in facts["exact"].items() if key in ("method", "model"))
    for study in studies:
        emit(
            f"{facts['target']} with {drafter}, {facts['dtype']}, temperature {study.temperature:g}; {asked}; "
            f"{facts['threads']} threads, batch {facts['batch_size']}, {facts['cpu']}"
        )
        emit_laid_out(tables(study), width=100)
        emit(f"{advice(study)}\n")
    fewest = min(each["num_questions"] for each in facts["tasks"].values())
    if fewest < _MANY:
        emit(f"{fewest} questions of a task show large differences only: --limit {4 * fewest} halves the intervals.")
    emit("No interval is corrected for the number of points: of twenty, one may look different by chance.")
    if facts["interrupted"]:
        emit("interrupted: only what every point had answered is counted")


def _record(studies: Sequence[Tradeoff], facts: Mapping[str, Any]) -> dict[str, Any]:
    from foretoken_lab.studies.tradeoff.advice import advice

    return {"provenance": facts, "settings": [{**study.fields(), "advice": advice(study)} for study in studies]}
