"""``foretoken doctor``: is everything in order, and why was a run slow?"""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.shared.console import emit, emit_json, passing_note, quiet_transformers
from foretoken.cli.shared.options import DraftModel, Verbose, check_model_name, json_option
from foretoken.core.errors import ConfigError
from foretoken.doctor.finding import Finding, worst

_MARKS = {"ok": "fine", "warn": "slow", "fail": "FAIL"}


def doctor(
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Also look at this model, without loading its weights."),
    ] = None,
    draft_model: DraftModel = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FILE", help="Explain a slow run: what --json of generate or bench wrote."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Look at a running server, http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="FORETOKEN_API_KEY", help="The server's key.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the run in question.")] = None,
    json: Annotated[bool, json_option("Print the findings as one JSON object on stdout.")] = False,
    verbose: Verbose = False,
) -> int:
    """Look at the machine, the native library, a model or a server: each line is fine, or says what to do.

    Nothing is downloaded or compiled, and no weights are read. The exit code is 0 if all is well, 1 with a warning,
    2 with a failure.

    [bold]Examples[/bold]

      foretoken doctor

      foretoken doctor --model zoo:base

      foretoken bench --json > run.json; foretoken doctor --run run.json

      foretoken doctor --url http://127.0.0.1:8000
    """
    here = {"--model": model, "--draft-model": draft_model, "--threads": threads}
    for option, what, others in (("--run", run, {**here, "--url": url}), ("--url", url, here)):
        given = [name for name, value in others.items() if value is not None]
        if what is not None and given:
            raise ConfigError(f"{option} {what} is looked at alone: leave {', '.join(given)} out")
    if draft_model is not None and model is None:
        raise ConfigError("--draft-model needs the model that it drafts for: add --model")
    for name, option in ((model, "--model"), (draft_model, "--draft-model")):
        if name is not None:
            check_model_name(name, option)
    if url is not None:
        findings = _ask(url, api_key)
    else:
        findings = _explain(run) if run is not None else _look(model, draft_model, threads, verbose=verbose)
    if json:
        emit_json({"findings": [asdict(each) for each in findings]})
    else:
        for each in findings:
            _show(each)
    return worst(findings)


def _explain(run: Path) -> list[Finding]:
    from foretoken.doctor import slow_run

    return slow_run.check(run)


def _ask(url: str, key: str | None) -> list[Finding]:
    from foretoken.doctor import server

    return list(server.check(url, key))


def _look(model: str | None, draft: str | None, threads: int | None, *, verbose: bool) -> list[Finding]:
    with passing_note("looking at the machine" if model is None else f"looking at {model}"):
        quiet_transformers(verbose)
        import torch

        from foretoken.doctor import machine

        findings = machine.check(threads or torch.get_num_threads())
        if model is not None:
            from foretoken.doctor import checkpoint

            findings += checkpoint.check(model, draft)
    return findings


def _show(finding: Finding) -> None:
    width = 16
    line = f"{_MARKS[finding.status]}  {finding.check:<{width}} {finding.found}"
    indent = " " * (width + 7)
    emit(textwrap.fill(line, 118, subsequent_indent=indent, break_on_hyphens=False))
    if finding.remedy:
        remedy = textwrap.fill(finding.remedy, 118, initial_indent=f"{indent}> ", subsequent_indent=f"{indent}  ")
        emit(remedy)
