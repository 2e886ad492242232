"""``foretoken bench serve``: a server under load, ours or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from foretoken.bench.suite import read_suite
from foretoken.cli.shared.console import emit_json, emit_laid_out, note, progress_bar
from foretoken.cli.shared.options import Verbose, json_option, limit_option, out_option, repeats_option, suite_option
from foretoken.cli.shared.outputs import check_outputs, write_json
from foretoken.cli.shared.settings import parse_numbers, parse_setting, split_settings
from foretoken.core.errors import ConfigError
from foretoken.data.prompts import limit_per_category

_SERVERS, _MEASURE, _OUTPUT = "Servers", "Measuring", "Output"


def serve(
    arguments: typer.Context,
    urls: Annotated[
        list[str],
        typer.Option(
            "--url",
            metavar="[LABEL=]URL",
            help="A server, up to /v1; settings of its requests with '+': http://localhost:8000+top_k=1. Repeatable.",
            rich_help_panel=_SERVERS,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--served-model-name", metavar="NAME", help="What the servers call the model.", rich_help_panel=_SERVERS
        ),
    ] = "zoo:base",
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="FORETOKEN_API_KEY",
            help="Sent to the servers.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    clients: Annotated[
        str,
        typer.Option(
            "--clients",
            metavar="N,…",
            help="Clients that ask at the same time; several numbers take turns.",
            rich_help_panel=_MEASURE,
        ),
    ] = "1,8,32",
    suite: Annotated[str | None, suite_option(_MEASURE)] = None,
    limit: Annotated[int | None, limit_option(_MEASURE, "Prompts per category at most, not in all.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Tokens of an answer at most.", rich_help_panel=_MEASURE)
    ] = 128,
    repeats: Annotated[int, repeats_option("Interleaved repeats (the median counts).", _MEASURE)] = 3,
    json: Annotated[
        bool,
        json_option("Results and provenance as one JSON object on stdout, no table; --json FILE: as --out.", _OUTPUT),
    ] = False,
    out: Annotated[Path | None, out_option("Write the same JSON there, next to the table.", _OUTPUT)] = None,
    verbose: Verbose = False,
) -> int:
    """Time a server: the first token, the time between tokens, tokens per second, at so many clients.

    Any endpoint of OpenAI's kind; several take turns in one run.

    [bold]Examples[/bold]

      foretoken bench serve --url http://127.0.0.1:8000

      foretoken bench serve --url ours=http://localhost:8000 --url theirs=http://localhost:8080 --clients 1,8
    """
    from foretoken.core.provenance import provenance
    from foretoken_lab.timing import serving

    counts = parse_numbers(clients, "--clients", int)
    if min(counts) < 1:
        raise ConfigError(f"--clients {clients}: at least one client asks")
    endpoints = [_endpoint(text, model, api_key) for text in urls]
    if len({each.label for each in endpoints}) < len(endpoints):
        raise ConfigError("--url names two servers alike: write LABEL=URL")
    check_outputs({"--out": out})
    texts = [each.text for each in limit_per_category(read_suite(suite), limit)]
    with progress_bar("rounds", repeats * len(counts) * len(endpoints)) as advance:
        results = serving.measure(endpoints, texts, counts, max_tokens=max_tokens, repeats=repeats, advance=advance)
    settings = {"prompts": len(texts), "max_tokens": max_tokens, "repeats": repeats}
    record = {"results": results, "provenance": provenance(arguments.find_root().obj or [], **settings)}
    if json:
        emit_json(record)
    else:
        _print(results)
    if out is not None:
        write_json(out, record)
    return int(any(each["failed"] for each in results))


def _names_host(url: str) -> bool:
    """A host, and a port that is a number up to 65535 if there is one."""
    try:
        parts = urlsplit(url)
        return parts.hostname is not None and parts.port != 0
    except ValueError:
        return False


def _endpoint(text: str, model: str, key: str | None) -> Any:
    from foretoken_lab.timing.serving import Endpoint

    place, *settings = split_settings(text)
    label, equals, url = place.partition("=")
    if not equals or "://" in label:
        label, url = place, place
    if not url.startswith(("http://", "https://")) or not _names_host(url):
        raise ConfigError(f"--url {text}: write http://HOST:PORT or https://…, with LABEL= before it if there are two")
    extra = dict(parse_setting(each, "--url") for each in settings)
    return Endpoint(label=label, url=url.rstrip("/").removesuffix("/v1"), model=model, key=key, extra=extra)


def _print(results: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from foretoken.bench.table import terminal_table
    from foretoken_lab.timing.serving import sheet

    table = sheet(results)
    emit_laid_out(terminal_table(table), Text(table.meaning, style="dim"))
    for each in results:
        if each["first_error"]:
            note(f"error: {each['failed']} requests to {each['endpoint']} failed, the first: {each['first_error']}")
