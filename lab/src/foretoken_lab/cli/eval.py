"""``foretoken eval``: how well a model does a task with a method, and what the method does to its outputs."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.shared.console import emit, emit_json, emit_laid_out, finite, note, progress_bar
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.given import check_alone
from foretoken.cli.shared.options import (
    Engine,
    Loading,
    Model,
    Verbose,
    check_model_name,
    data_option,
    json_option,
    limit_option,
    load_model,
)
from foretoken.cli.shared.settings import DEFAULT_MODEL, RecipeFlags, parse_settings, speculative_config
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_readable, check_writable, write_whole
from foretoken.options.sampling import SamplingParams
from foretoken_lab.cli import eval_against
from foretoken_lab.cli.eval_text import read_text
from foretoken_lab.cli.options import answer_length_option, prompt_length_option, seed_option, temperature_option

if TYPE_CHECKING:
    from foretoken_lab.tasks.catalog import Task
    from foretoken_lab.tasks.difference import Difference
    from foretoken_lab.tasks.evaluate import Report
    from foretoken_lab.tasks.example import Example

_INTERRUPTED = 130
_TEXT_TOKENS = 16384
_TASK, _METHOD, _SAMPLING, _OUTPUT = "Task", "Method", "Sampling", "Output"

Key = tuple[str, str]  # task, example


@with_flags
def eval_command(
    *,
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="A,B,…",
            help="Names with commas; --list shows them.",
            show_default=False,
            rich_help_panel=_TASK,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the tasks.", rich_help_panel=_TASK)] = False,
    limit: Annotated[
        int | None, limit_option(_TASK, "Questions per task at most.", least=None, show_default="the task's")
    ] = None,
    data: Annotated[Path | None, data_option(_TASK)] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text or JSON Lines to read: nats a token, next to or instead of tasks. Repeatable.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option(
            "--text-tokens",
            min=2,
            help="Tokens of every text.",
            show_default=f"{_TEXT_TOKENS}; {eval_against.TEXT_TOKENS} with --against",
            rich_help_panel=_TASK,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="DTYPE|MODEL",
            help="Measure rounding instead of tasks: KL from the same weights in float32, or from another model, over "
            "--text or a bundled text.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    prompt_length: Annotated[int | None, prompt_length_option(_TASK)] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A drafter; 'foretoken methods' lists them.",
            show_default="none, plain decoding; with --draft-model draft_model",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    recipe: Annotated[RecipeFlags, Flags(_METHOD, ("sets", "draft_model"))],
    max_tokens: Annotated[int | None, answer_length_option(_SAMPLING)] = None,
    temperature: Annotated[float, temperature_option(_SAMPLING)] = 0.0,
    seed: Annotated[int, seed_option(_SAMPLING)] = 0,
    loading: Loading,
    engine: Engine,
    json: Annotated[bool, json_option("One JSON object a task on stdout, and nothing else.", _OUTPUT)] = False,
    save_outputs: Annotated[
        Path | None,
        typer.Option(
            "--save-outputs", metavar="FILE.jsonl", help="Write every answer with its scores.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    against_outputs: Annotated[
        Path | None,
        typer.Option(
            "--against-outputs",
            metavar="FILE.jsonl",
            help="Outputs that another run saved: adds the difference in accuracy on the same examples.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Measure what a model can do with a method: accuracy on a task, and what the method changes.

    Every run asks the same questions. A lossless method answers like plain
    decoding; an approximate one may lose accuracy. nll is how improbable the
    outputs are under the plain model, in nats a token.

    --text measures the model alone, on texts that it did not write, in nats a
    token.

    --against measures what rounding does: KL(reference || model) per token,
    the share of the same best token, and both perplexities. It takes any
    --dtype, file or folder of rounded weights, and --kv-cache-dtype.

    [bold]Examples[/bold]

      foretoken eval --list

      foretoken eval --task arithmetic

      foretoken eval --task json,code --limit 50 --method draft_model

      foretoken eval --task keys --prompt-tokens 300 --save-outputs plain.jsonl

      foretoken eval --task keys --prompt-tokens 300 --method suffix --against-outputs plain.jsonl

      foretoken eval --task arithmetic,json --text novel.txt --text meetings.jsonl

      foretoken eval --against float32 --dtype int8 --text wiki.txt

      foretoken eval --against ./original --model model-Q4_K_M.gguf
    """
    if show or task == "list":
        check_alone(context, "--list" if show else "--task list", but=("show", "json") if show else ("task", "json"))
        _list_tasks(as_json=json)
        return 0
    if task is None and not text and against is None:
        raise ConfigError("no task: name one with --task, for example --task arithmetic; --list shows them")
    if task is not None and against is not None:
        raise ConfigError(
            "--against measures rounding over texts, and --task asks questions: leave one out (--against-outputs "
            "FILE.jsonl compares the answers of two runs)"
        )
    if task is None:
        of_tasks = {
            "--limit": limit,
            "--data": data,
            "--prompt-tokens": prompt_length,
            "--max-tokens": max_tokens,
            "--method": method,
            "--set": recipe.sets,
            "--draft-model": recipe.draft_model,
            "--temperature": temperature or None,
            "--seed": seed or None,
            "--save-outputs": save_outputs,
            "--against-outputs": against_outputs,
        }
        for option, value in of_tasks.items():
            if value is not None:
                why = "--text is read by the model alone: add --task NAME"
                raise ConfigError(f"{option} is for tasks, and {why if against is None else 'a text has none'}")
    if against is not None:
        arguments = context.find_root().obj or sys.argv[1:]
        return eval_against.run(model, against, text or (), text_tokens, loading, json, verbose, arguments)
    if text_tokens is not None and not text:
        raise ConfigError("--text-tokens is for --text FILE, and none is named")
    for path in text or ():
        check_readable(path, "--text")
    config = speculative_config(
        method or ("draft_model" if recipe.draft_model else "none"),
        parse_settings(recipe.sets or []),
        target=model,
        draft_model=recipe.draft_model,
    )
    check_model_name(model)
    if save_outputs is not None:
        check_writable(save_outputs, "--save-outputs")

    from foretoken_lab.tasks.catalog import Setting

    tasks = [] if task is None else find_tasks(task)
    if data is not None and all(each.data == "generated" for each in tasks):
        raise ConfigError(f"--data {data}: what --task {task} asks is generated; leave it out")
    setting = Setting(data=data, context=prompt_length)
    limits = {each.name: each.limit if limit is None else limit for each in tasks}
    params: dict[str, SamplingParams] = {}
    for each in tasks:
        each.check(limits[each.name], setting)
        longest = each.max_tokens if max_tokens is None else max_tokens
        params[each.name] = SamplingParams(temperature=temperature, seed=seed, max_tokens=longest)
    others = None if against_outputs is None else _read_outputs(against_outputs)

    llm = load_model(model, config, verbose=verbose, loading=loading, max_num_seqs=engine.max_num_seqs)
    setting = Setting(data=data, context=prompt_length, count=lambda text: num_tokens(llm, text))
    results: list[_Result] = []
    interrupted = False
    try:
        check_fits(prompt_length, llm)
        for each in tasks:
            result = _run(llm, each, each.examples(limits[each.name], setting), params[each.name], others)
            results.append(result)
            if json:
                facts = _facts(context.find_root().obj or sys.argv[1:], llm, model, params[each.name], prompt_length)
                emit_json({"model": model, "method": config, **result.fields(), "provenance": facts})
        for path in text or ():
            read_text(llm, model, path, text_tokens or _TEXT_TOKENS, json, context.find_root().obj or sys.argv[1:])
    except KeyboardInterrupt:
        interrupted = True
    finally:
        llm.close()
    if results and not json:
        dtype_name = llm.target.precision
        _print_table(results, f"{model}, {_in_words(config)}, {dtype_name}: {results[0].report.promise}")
    if results and save_outputs is not None:
        write_whole(save_outputs, "".join(line for result in results for line in result.lines()))
        note(f"wrote {save_outputs}")
    if interrupted:
        return _INTERRUPTED
    return int(any(result.report.failed for result in results))


@dataclass(frozen=True)
class _Result:
    """A task's figures, and the difference to the run that it was compared with."""

    report: Report
    difference: Difference | None

    def fields(self) -> dict[str, Any]:
        compared = {} if self.difference is None else {"difference": asdict(self.difference)}
        return {**self.report.fields(), **compared}

    def lines(self) -> Iterator[str]:
        """One line of JSON per answer, line end included."""
        for answer in self.report.answers:
            fields = {
                "task": self.report.task,
                "id": answer.example.id,
                "category": answer.example.category,
                "prompt": answer.example.prompt,
                "answer": answer.example.answer,
                "output": answer.output,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "nll": answer.nll / max(1, len(answer.token_ids)),
                "error": answer.error,
                "scores": dict(answer.scores),
            }
            yield jsonlib.dumps(finite(fields), ensure_ascii=False) + "\n"


def _list_tasks(*, as_json: bool) -> None:
    from foretoken_lab.tasks.catalog import TASKS

    if as_json:
        told = ({"name": each.name, "description": each.description, "data": each.data} for each in TASKS.values())
        emit_json({"tasks": list(told)})
        return
    data = {"generated": "", "sample": "200 bundled; more with --data", "folder": "needs --data"}
    for task in TASKS.values():
        note_on_data = f" ({data[task.data]})" if data[task.data] else ""
        emit(f"{task.name:<12}{task.description}{note_on_data}")


def find_tasks(text: str) -> list[Task]:
    """The tasks that ``--task`` names.

    Raises:
        ConfigError: one is unknown, empty or named twice.
    """
    from foretoken_lab.tasks.catalog import find

    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"--task '{text}': write names with commas between them, for example json,code")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--task names '{name}' twice: keep one")
    return [find(name) for name in names]


def num_tokens(llm: Any, text: str) -> int:
    """Length of a text in the model's tokens."""
    return len(llm.tokenizer(text, add_special_tokens=False)["input_ids"])


def check_fits(length: int | None, llm: Any) -> None:
    """Refuse prompts that are longer than the model's context before they are made up.

    Raises:
        ConfigError: names the context.
    """
    if length is not None and length >= llm.target.max_length:
        raise ConfigError(f"--prompt-tokens {length}: beyond the context of {llm.target.max_length} tokens")


def _read_outputs(path: Path) -> dict[Key, bool]:
    """Which answers of another run were right, by task and example."""
    from foretoken_lab.records import read_records

    right: dict[Key, bool] = {}
    for record in read_records(path, ("task", "id", "scores")):
        scores = record["scores"]
        if isinstance(scores, dict) and "correct" in scores:
            right[str(record["task"]), str(record["id"])] = scores["correct"] == 1.0
    if not right:
        raise InputError(f"--against-outputs {path}: no scored answers in it; give a file that --save-outputs wrote")
    return right


def _run(
    llm: Any, task: Task, examples: Sequence[Example], params: SamplingParams, others: Mapping[Key, bool] | None
) -> _Result:
    from foretoken_lab.tasks.difference import paired_difference
    from foretoken_lab.tasks.evaluate import evaluate

    with progress_bar(task.name, len(examples)) as advance:
        report = evaluate(llm, task, examples, params, progress=advance)
    if report.refused:
        note(
            f"{task.name}: {report.refused} of {len(examples)} examples left out: a prompt and {params.max_tokens} "
            f"tokens of answer have to fit the context of {llm.target.max_length}"
        )
    for answer in report.answers:
        if answer.error is not None:
            note(f"error: {task.name} {answer.example.id}: {answer.error}")
    if others is None:
        return _Result(report, None)
    pairs = [
        (answer.correct, others[task.name, answer.example.id])
        for answer in report.answers
        if answer.error is None and (task.name, answer.example.id) in others
    ]
    if not pairs:
        note(f"{task.name}: nothing to compare, --against-outputs has none of these examples")
        return _Result(report, None)
    return _Result(report, paired_difference(*map(list, zip(*pairs, strict=True))))


def _facts(
    arguments: Sequence[str], llm: Any, model: str, params: SamplingParams, context: int | None
) -> dict[str, Any]:
    import torch

    from foretoken.core.provenance import provenance

    return provenance(
        arguments,
        model=model,
        dtype=llm.target.precision,
        device=str(llm.target.device),
        threads=torch.get_num_threads(),
        temperature=params.temperature,
        seed=params.seed,
        max_tokens=params.max_tokens,
        context=context,
        max_num_seqs=llm.max_num_seqs,
        chat_template=llm.is_chat_model,
    )


def _in_words(config: Mapping[str, Any]) -> str:
    return " ".join([config["method"], *(f"{key}={value}" for key, value in config.items() if key != "method")])


def _print_table(results: Sequence[_Result], title: str) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    for name in ("asked", "accuracy", "95 %", "nll", "tok/step", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in (result.report for result in results):
        low, high = report.interval or (0.0, 0.0)
        table.add_row(
            report.task,
            str(report.num_examples),
            "" if report.accuracy is None else f"{report.accuracy:.1%}",
            "" if report.interval is None else f"{low:.0%} to {high:.0%}",
            f"{report.nll:.3f}",
            f"{report.tokens_per_step:.2f}",
            f"{report.tokens_per_second:.0f}",
        )
    emit_laid_out(table)
    for result in results:
        _print_remarks(result)


def _print_remarks(result: _Result) -> None:
    """Print the results without a column: other measures, categories, distortion, cut answers, the comparison."""
    report, difference = result.report, result.difference
    if report.measures:
        emit(f"{report.task}: " + ", ".join(f"{name} {value:.1%}" for name, value in report.measures.items()))
    if len(report.categories) > 1:
        measure = "accuracy" if report.accuracy is not None else next(iter(report.measures))
        shares = ", ".join(f"{name} {values[measure]:.0%}" for name, values in report.categories.items())
        emit(f"{report.task}, {measure} by category: {shares}")
    if math.isnan(report.distortion):
        emit(f"{report.task}: distortion not known (sparse verification)")
    elif report.distortion:
        emit(f"{report.task}: distortion {report.distortion:.3g} and KL {report.kl:.3g} per token")
    if report.truncated:
        emit(f"{report.task}: {report.truncated} of {report.num_examples} answers cut at the token limit")
    if difference is not None:
        emit(
            f"{report.task}: accuracy {difference.mean * 100:+.1f} points against the other run, 95 % interval "
            f"{difference.low * 100:+.1f} to {difference.high * 100:+.1f} ({difference.num_pairs} examples; right only "
            f"here {difference.first_only}, only there {difference.second_only})"
        )
