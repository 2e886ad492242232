"""``foretoken analyze``: how far verification rules are from the best that any rule could do, on real prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import zoo
from foretoken.bench.suite import fingerprint, read_suite
from foretoken.cli.shared.console import emit, emit_json, emit_laid_out, note, progress_bar
from foretoken.cli.shared.flags import with_flags
from foretoken.cli.shared.options import (
    DraftModel,
    Loading,
    Model,
    Verbose,
    check_model_name,
    json_option,
    limit_option,
    load_model,
    out_option,
    suite_option,
)
from foretoken.cli.shared.outputs import check_outputs, check_pictures, write_json
from foretoken.cli.shared.settings import DEFAULT_DRAFT, DEFAULT_MODEL, parse_numbers
from foretoken.core.errors import ConfigError, InputError
from foretoken.core.files import check_writable
from foretoken.data.prompts import Prompt, limit_per_category
from foretoken.options.sampling import SamplingParams
from foretoken_lab.cli.analyze_scaling import scaling
from foretoken_lab.cli.analyze_tradeoff import tradeoff

if TYPE_CHECKING:
    from foretoken_lab.studies.acceptance.study import Setting

_INTERRUPTED = 130
_MOST_DRAFTS = 64
_GRID, _OUTPUT = "Grid", "Output"

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)


@app.callback(epilog="Example: foretoken analyze acceptance --limit 2")
def analyze() -> None:
    """Measure how much acceptance verification rules leave unused, their cost, and the scaling of drafting heads."""


@app.command()
@with_flags
def acceptance(
    *,
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    draft: DraftModel = None,
    suite: Annotated[str | None, suite_option(_GRID)] = None,
    limit: Annotated[int | None, limit_option(_GRID, "Prompts per category at most, not in all.")] = None,
    temperature: Annotated[
        str, typer.Option("--temperature", metavar="X,…", help="Above 0.", rich_help_panel=_GRID)
    ] = "0.3,0.7,1.0",
    top_p: Annotated[
        str,
        typer.Option("--top-p", metavar="X,…", help="Smallest set of tokens with this mass.", rich_help_panel=_GRID),
    ] = "1.0,0.9",
    num_drafts: Annotated[
        str, typer.Option("--num-drafts", metavar="N,…", help="Drafts at one position.", rich_help_panel=_GRID)
    ] = "1,2,3,4",
    positions: Annotated[
        int, typer.Option("--positions", min=1, help="Positions of an answer at most.", rich_help_panel=_GRID)
    ] = 8,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Tokens of an answer at most.", rich_help_panel=_GRID)
    ] = 64,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            max=100_000,
            help="Sampled drafts where a rule has no closed form.",
            rich_help_panel=_GRID,
        ),
    ] = 32,
    seed: Annotated[
        int, typer.Option("--seed", help="Seeds answers, positions and sampled drafts.", rich_help_panel=_GRID)
    ] = 0,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", "--no-chat", help="Give prompts as they are, without the chat template.", rich_help_panel=_GRID
        ),
    ] = False,
    loading: Loading,
    json: Annotated[
        bool,
        json_option("Results and provenance as one JSON object on stdout, no tables; --json FILE: as --out.", _OUTPUT),
    ] = False,
    out: Annotated[Path | None, out_option("Write the same JSON there, next to the tables.", _OUTPUT)] = None,
    pictures: Annotated[
        Path | None,
        typer.Option("--pictures", metavar="DIR", help="Write pictures (PNG) there.", rich_help_panel=_OUTPUT),
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Acceptance of every rule, and the most that any rule could accept, over temperature, top_p and drafts.

    The target samples answers; target and draft then give their distributions at some
    positions of them. The rules are computed from these distributions, not simulated.
    Intervals are 95 % over prompts: positions of one answer are not
    independent, prompts are.

    [bold]Examples[/bold]

      foretoken analyze acceptance

      foretoken analyze acceptance --limit 2 --temperature 1 --top-p 1

      foretoken analyze acceptance --model ./big --draft-model ./small --out a.json --pictures .
    """
    grid = _Grid(
        parse_numbers(temperature, "--temperature", float),
        parse_numbers(top_p, "--top-p", float),
        parse_numbers(num_drafts, "--num-drafts", int),
    )
    plans = [
        (each, p, SamplingParams(temperature=each, top_p=p, seed=seed, max_tokens=max_tokens))
        for each in grid.temperatures
        for p in grid.top_ps
    ]
    grid.check()
    check_model_name(model)
    if draft is None and not zoo.drafts_for(DEFAULT_DRAFT, model):
        raise ConfigError(f"give --draft-model: for {model} no draft model is known, its tokenizer must be the same")
    small_name = draft or DEFAULT_DRAFT
    check_model_name(small_name)
    _check_outputs(out, pictures)
    prompts = limit_per_category(read_suite(suite), limit)
    from foretoken.engine import before_weights

    before_weights.check_vocabulary(model, small_name, **loading.origin)
    llm = load_model(model, {"method": "none"}, verbose=verbose, loading=loading)
    from foretoken_lab.studies.acceptance.observe import load_draft, observe
    from foretoken_lab.studies.acceptance.study import study

    small = load_draft(small_name, llm.target)
    if max(grid.num_drafts) > llm.target.vocab_size:
        raise ConfigError(
            f"--num-drafts {max(grid.num_drafts)} is above the vocabulary of {llm.target.vocab_size} tokens"
        )
    chat = llm.is_chat_model and not raw
    fitting = _fitting([_prompt_ids(llm, prompt, chat) for prompt in prompts], llm, small, max_tokens)
    settings: list[Setting] = []
    interrupted = False
    try:
        with progress_bar("prompts x settings", len(plans) * len(fitting)) as advance:
            for each, p, params in plans:
                observed = observe(llm, small, fitting, params, positions, progress=advance)
                settings += study(observed, grid.num_drafts, temperature=each, top_p=p, num_samples=samples, seed=seed)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        llm.close()
    if not settings:
        note("interrupted before the first setting was done: nothing to report")
        return _INTERRUPTED
    facts = _facts(
        context.find_root().obj or sys.argv[1:],
        llm,
        small_name,
        suite,
        prompts,
        fitting,
        chat=chat,
        interrupted=interrupted,
    )
    facts.update(seed=seed, max_tokens=max_tokens, positions_per_prompt=positions, samples=samples)
    record = {"provenance": facts, "settings": [setting.fields() for setting in settings]}
    if json:
        emit_json(record)
    else:
        _print(settings, facts)
    if out is not None:
        write_json(out, record)
    if pictures is not None:
        from foretoken_lab.studies.acceptance.pictures import draw

        for file in draw(settings, pictures):
            note(f"wrote {file}")
    return _INTERRUPTED if interrupted else 0


@dataclass(frozen=True, slots=True)
class _Grid:
    """The requested values."""

    temperatures: list[float]
    top_ps: list[float]
    num_drafts: list[int]

    def check(self) -> None:
        """Refuse settings without an acceptance rate to compare; SamplingParams checks the engine's own bounds."""
        if 0.0 in self.temperatures:
            raise ConfigError(
                "--temperature 0: greedy decoding has nothing to choose between rules, all accept the argmax; "
                "use a value above 0"
            )
        for n in self.num_drafts:
            if not 1 <= n <= _MOST_DRAFTS:
                raise ConfigError(f"--num-drafts {n}: give numbers from 1 to {_MOST_DRAFTS}")


def _check_outputs(out: Path | None, pictures: Path | None) -> None:
    """Find out before the measuring, not after, that results cannot be written."""
    check_outputs({"--out": out})
    if pictures is None:
        return
    if not pictures.is_dir():
        raise ConfigError(f"--pictures {pictures}: there is no such folder; make it first")
    check_writable(pictures / "acceptance.png", "--pictures")
    check_pictures("--pictures")


def _prompt_ids(llm: Any, prompt: Prompt, chat: bool) -> list[int]:
    if chat:
        return llm.chat_prompt([{"role": "user", "content": prompt.text}])["prompt_token_ids"]
    return list(llm.tokenizer(prompt.text)["input_ids"])


def _fitting(prompts: Sequence[list[int]], llm: Any, draft: Any, max_tokens: int) -> list[list[int]]:
    """Prompts that both models can read with an answer of full length."""
    room = min(llm.target.max_length, draft.max_length) - max_tokens
    kept = [ids for ids in prompts if len(ids) <= room]
    if not kept:
        raise InputError(
            f"no prompt fits: the shortest has {min(map(len, prompts))} tokens, and {max(room, 0)} are left next to an "
            f"answer of {max_tokens}; lower --max-tokens or give shorter prompts"
        )
    if len(kept) < len(prompts):
        note(
            f"{len(prompts) - len(kept)} of {len(prompts)} prompts left out: they and an answer do not fit the context"
        )
    return kept


def _facts(
    arguments: Sequence[str],
    llm: Any,
    draft: str,
    suite: str | None,
    prompts: Sequence[Prompt],
    used: Sequence[Any],
    *,
    chat: bool,
    interrupted: bool,
) -> dict[str, Any]:
    import torch

    from foretoken.core.provenance import provenance

    return provenance(
        arguments,
        target=llm.target.name,
        draft=draft,
        dtype=llm.target.precision,
        device=str(llm.target.device),
        threads=torch.get_num_threads(),
        chat_template=chat,
        interrupted=interrupted,
        intervals="95 %, Student, clustered by prompt",
        suite={
            "file": suite or "bundled",
            "sha256": fingerprint(suite, prompts),
            "num_prompts": len(prompts),
            "num_used": len(used),
        },
    )


def _print(settings: Sequence[Setting], facts: dict[str, Any]) -> None:
    emit_laid_out(*map(_table, settings))
    emit(
        f"{facts['target']} with {facts['draft']}, {facts['dtype']}. Intervals: 95 % over {settings[0].num_prompts} "
        "prompts. Gap: points below the optimum of the scheme. "
        "~: sampled drafts where they are too many to list, else exact. "
        "transport is the optimum itself, if a rule solves it at every token."
    )
    emit("\nWhat accepts most (differences are paired by prompt):")
    for setting in settings:
        emit(f"  {_name(setting)}: {setting.advice}.")
    if facts["interrupted"]:
        emit("interrupted: only the settings above were done")


def _table(setting: Setting) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=_name(setting), box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("scheme", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    for name in ("acceptance", "95 %", "optimum", "gap", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    rivals = {index for index, _, _ in setting.rivals}
    for index, row in sorted(enumerate(setting.rows), key=lambda item: -item[1].acceptance):
        leads = index == setting.best or index in setting.equals
        mark = "best" if leads else "tied" if index in rivals else ""
        table.add_row(
            row.scheme,
            row.rule + (" ~" if row.sampled else ""),
            f"{row.acceptance:.2%}",
            _ends(row.interval),
            f"{row.bound:.2%}",
            _points(row.gap),
            _ends(row.gap_interval),
            mark,
        )
    return table


def _ends(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{_points(interval[0])}…{_points(interval[1])}"


def _points(rate: float) -> str:
    return f"{round(100 * rate, 2) + 0.0:.2f}"  # + 0.0: no minus sign before a zero


def _name(setting: Setting) -> str:
    drafts = "1 draft" if setting.num_drafts == 1 else f"{setting.num_drafts} drafts"
    return f"T={setting.temperature:g}, top_p={setting.top_p:g}, {drafts}"


app.command("scaling")(scaling)
app.command("tradeoff")(tradeoff)
