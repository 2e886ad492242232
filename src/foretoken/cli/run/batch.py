"""``foretoken batch``: answer a file of requests offline."""

import functools
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.run.serve import check_installed
from foretoken.cli.shared import options
from foretoken.cli.shared.console import note, progress_bar
from foretoken.cli.shared.flags import with_flags
from foretoken.cli.shared.settings import DEFAULT_MODEL
from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.core.files import check_writable

_CLUSTER = "Cluster"
_cluster = functools.partial(typer.Option, rich_help_panel=_CLUSTER)


@with_flags
def batch(
    *,
    file: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one JSON object per line.")],
    out: Annotated[
        Path | None, options.out_option("Output file.", show_default="FILE with the suffix .answers.jsonl")
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    recipe: options.Recipe,
    name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Name of the model in the requests.",
            show_default="the value of --model",
        ),
    ] = None,
    on_ray: Annotated[bool, _cluster("--ray", help="Use Ray workers.")] = False,
    workers: Annotated[int, _cluster("--workers", min=1, metavar="N", help="Number of workers, with --ray.")] = 1,
    loading: options.Loading,
    engine: options.Engine,
    verbose: options.Verbose = False,
) -> int:
    """Answer a file of requests, one answer per line, in the order of completion.

    If the command is stopped or killed, or a request gets an error, the same command resumes with the requests that
    have no answer yet. The exit code is 1 while there are errors.

    [bold]Examples[/bold]

      foretoken batch requests.jsonl --out answers.jsonl

      foretoken batch requests.jsonl --ray --workers 4 --threads 2
    """
    check_installed()
    options.check_model_name(model)
    if workers > 1 and not on_ray:
        raise ConfigError(f"--workers {workers} needs --ray")
    if on_ray and importlib.util.find_spec("ray") is None:  # check before creating the file of answers
        raise ConfigError("--ray needs Ray: pip install 'foretoken[ray]'")
    config = recipe.config(model)

    from foretoken.serve import batch as batches

    lines = batches.read(file)
    place = check_writable(out or file.with_suffix(".answers.jsonl"), "--out")
    known = batches.answered(place)
    left = [line for line in lines if not known.get(line.custom_id)]
    strangers = {each for each, fine in known.items() if fine} - {line.custom_id for line in lines}
    if strangers:
        raise InputError(f"{place} answers '{min(strangers)}', which is not in {file}: give another --out")
    settings: dict[str, Any] = {**asdict(loading), **asdict(engine), "enable_prefix_caching": True}
    called, errors = name or model, list[str]()
    llm = options.load_model(model, config, verbose=verbose, **settings) if left and not on_ray else None
    if not all(known.values()):
        batches.forget_errors(place)
    with place.open("ab", buffering=0) as answers, progress_bar("requests", len(left)) as advance:

        def write(answer: dict[str, Any]) -> None:
            line = (json.dumps(answer, ensure_ascii=False) + "\n").encode()
            try:
                while line:  # a full disk may write a part
                    line = line[answers.write(line) :]
            except OSError as error:
                raise ForetokenError(f"{place}: cannot be written ({error.strerror or error})") from None
            if answer["response"]["status_code"] != 200:
                errors.append(f"{answer['custom_id']}: {answer['response']['body']['error']['message']}")
            if advance is not None:
                advance()

        if left and on_ray:
            apart = settings | {"threads": loading.threads or 1}
            for answer in batches.run_on_ray(
                model,
                config,
                called,
                left,
                workers=workers,
                threads=loading.threads or 1,
                options=apart,
                verbose=verbose,
            ):
                write(answer)
        elif llm is not None:
            batches.run(llm, called, left, write)
    fine = len(left) - len(errors)
    note(f"{fine} answered now, {len(lines) - len(left)} before, {len(errors)} left with an error: {place}")
    if errors:
        note(f"the same command tries those again; the first: {errors[0]}")
    return int(bool(errors))
