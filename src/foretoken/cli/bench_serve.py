"""``foretoken bench serve``: a server under load, ours or anybody's."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.workloads import BUNDLED_SUITE, limit_per_category, read_prompts
from foretoken.cli.console import emit, finite, progress_bar
from foretoken.cli.options import JsonFile, Verbose
from foretoken.cli.settings import parse_numbers, parse_setting, split_settings
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_writable, write_whole

_SERVERS, _MEASURE = "Servers", "Measuring"


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
        str, typer.Option("--model", "-m", help="What the servers call the model.", rich_help_panel=_SERVERS)
    ] = "zoo:base",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="FORETOKEN_API_KEY", rich_help_panel=_SERVERS),
    ] = None,
    clients: Annotated[
        str,
        typer.Option("--clients", metavar="N,…", help="That ask at the same time.", rich_help_panel=_MEASURE),
    ] = "1,8,32",
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE.jsonl", help="Prompts; default: the bundled suite.", rich_help_panel=_MEASURE
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts of each category.", rich_help_panel=_MEASURE)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Of an answer.", rich_help_panel=_MEASURE)
    ] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds.", rich_help_panel=_MEASURE)] = 3,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> int:
    """Time a server: the first token, the time between tokens, tokens per second, at so many clients.

    Any endpoint of OpenAI's kind; several take turns in one run.

    [bold]Examples[/bold]

      foretoken bench serve --url http://127.0.0.1:8000

      foretoken bench serve --url ours=http://localhost:8000 --url theirs=http://localhost:8080 --clients 1,8
    """
    from foretoken.bench import serving
    from foretoken.core.provenance import provenance

    counts = parse_numbers(clients, "--clients", int)
    if min(counts) < 1:
        raise ConfigError(f"--clients {clients}: at least one client asks")
    endpoints = [_endpoint(text, model, api_key) for text in urls]
    if len({each.label for each in endpoints}) < len(endpoints):
        raise ConfigError("--url names two servers alike: write LABEL=URL")
    texts = [each.text for each in limit_per_category(read_prompts(prompts or BUNDLED_SUITE), limit)]
    if json is not None:
        check_writable(json, "--json")
    with progress_bar("rounds", repeats * len(counts) * len(endpoints)) as advance:
        results = serving.measure(endpoints, texts, counts, max_tokens=max_tokens, repeats=repeats, advance=advance)
    for line in _table(results):
        emit(line)
    if json is not None:
        record = {
            "results": finite(results),
            "provenance": provenance(arguments.obj or [], prompts=len(texts), max_tokens=max_tokens, repeats=repeats),
        }
        write_whole(json, jsonlib.dumps(record, indent=1) + "\n")
    return int(any(each["failed"] for each in results))


def _endpoint(text: str, model: str, key: str | None) -> Any:
    from foretoken.bench.serving import Endpoint

    place, *settings = split_settings(text)
    label, equals, url = place.partition("=")
    if not equals or "://" in label:
        label, url = place, place
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {text}: write http://HOST:PORT or https://…, with LABEL= before it if there are two")
    extra = dict(parse_setting(each, "--url") for each in settings)
    return Endpoint(label=label, url=url.rstrip("/").removesuffix("/v1"), model=model, key=key, extra=extra)


def _table(results: list[dict[str, Any]]) -> list[str]:
    wide = max(len(each["endpoint"]) for each in results)
    lines = [
        f"{'server':{wide}}  clients  tokens/s (spread)      first token p50 / p99   between tokens p50 / p99  failed"
    ]
    for each in results:
        low, high = each["spread"]
        rate = f"{each['tokens_per_second']:7.0f} ({low:.0f}-{high:.0f})"
        first, between = _milliseconds(each["first_token_seconds"]), _milliseconds(each["between_tokens_seconds"])
        lines.append(
            f"{each['endpoint']:{wide}}  {each['clients']:7}  {rate:21}  {first:22}  {between:24}  {each['failed']}"
        )
        if each["first_error"]:
            lines.append(f"  first error: {each['first_error']}")
    return lines


def _milliseconds(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{1000 * found['p50']:.1f} / {1000 * found['p99']:.1f} ms"
