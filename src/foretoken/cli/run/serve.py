"""``foretoken serve``: an OpenAI-compatible server over one model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict
from typing import Annotated, Any

import typer

from foretoken.cli.shared.console import note
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.options import (
    DraftModel,
    Loading,
    Method,
    Settings,
    Verbose,
    check_model_name,
    load_model,
)
from foretoken.cli.shared.settings import DEFAULT_MODEL, chosen_recipe
from foretoken.core.errors import ConfigError, nearest
from foretoken.options.model import EngineOptions

_ORIGIN = re.compile(r"\*|https?://[^/\s]+|null")
_REASONING = {"auto": None, "on": True, "off": False}
_SERVER, _LIMITS, _CLUSTER = "Server", "Limits", "Cluster"


@with_flags
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, a GGUF file, a hub id, zoo:NAME, or grown:NAME:SIZE.")
    ] = DEFAULT_MODEL,
    method: Method = None,
    sets: Settings = None,
    draft_model: DraftModel = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0: every one.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0: one that is free.", rich_help_panel=_SERVER)
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model.",
            show_default="as it is loaded",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="FORETOKEN_API_KEY",
            help="What clients must send under /v1.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            help="A web page's origin that may use it from a browser, several times; *: any.",
            show_default="none",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            min=0,
            metavar="S",
            help="Time that running requests get to finish after SIGTERM.",
            rich_help_panel=_SERVER,
        ),
    ] = 60.0,
    engine: Annotated[
        EngineOptions,
        Flags(_LIMITS, ("max_num_seqs",), helps={"max_num_seqs": "Requests that run at the same time."}),
    ],
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, metavar="N", help="Requests that may wait; more get 429.", rich_help_panel=_LIMITS
        ),
    ] = 256,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            "--max-seconds",
            min=0.1,
            metavar="S",
            help="Longest time of a request; default: no limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_body: Annotated[
        int,
        typer.Option("--max-body", min=1, metavar="BYTES", help="Of a request, at most.", rich_help_panel=_LIMITS),
    ] = 8 * 2**20,
    no_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-prefix-caching",
            help="Read every prompt from its start, also one that begins like another.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    reasoning: Annotated[
        str,
        typer.Option(
            "--reasoning",
            metavar="auto|on|off",
            help="Tell <think>…</think> in answers apart; auto: if the chat template knows it.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto",
    on_ray: Annotated[bool, typer.Option("--ray", help="Run replicas on Ray Serve.", rich_help_panel=_CLUSTER)] = False,
    replicas: Annotated[
        str,
        typer.Option(
            "--replicas",
            metavar="N|MIN:MAX",
            help="With --ray: how many; a range goes by load.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "1",
    loading: Loading,
    verbose: Verbose = False,
) -> None:
    """Serve a model to any OpenAI client: chat, completions, responses; streams, log-probabilities, tools.

    Also /health, /metrics (Prometheus, vLLM's names) and /docs. SIGTERM lets running requests end and answers new
    ones with 503. Needs the extra 'serve': pip install "foretoken\\[serve]".

    [bold]Examples[/bold]

      foretoken serve

      foretoken serve ./my-model --method suffix --port 8080 --api-key secret

      foretoken serve --ray --replicas 1:4 --threads 2

      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"model": "zoo:base", "prompt": "Hi"}'
    """
    check_installed()
    check_model_name(model)
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key is empty: leave it out, or give one")
    if reasoning not in _REASONING:
        raise ConfigError(f"--reasoning {reasoning}: {nearest(reasoning, _REASONING)}")
    for origin in origins or ():
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allow-origin {origin}: write http://HOST:PORT or https://HOST as browsers do, or *")
    config = chosen_recipe(method, sets, target=model, draft_model=draft_model)

    least, most = _parse_replicas(replicas)
    if most > 1 and not on_ray:
        raise ConfigError(f"--replicas {replicas} needs --ray")
    options: dict[str, Any] = {
        **asdict(loading),
        "max_num_seqs": engine.max_num_seqs,
        "enable_prefix_caching": not no_prefix_caching,
    }

    from foretoken.serve import server

    if api_key is None and not server.is_loopback(host):
        note("anybody who can reach this address may use it: --api-key asks for a key")
    if on_ray:
        from foretoken.serve import cluster

        settings = cluster.Replicas(
            least=least,
            most=most,
            threads=loading.threads or 1,
            model=model,
            config=config,
            name=name or model,
            options=options | {"threads": loading.threads or 1},
            api_key=api_key,
            max_queue=max_queue,
            max_seconds=max_seconds,
            max_body=max_body,
            drain_seconds=drain_seconds,
            reasoning=_REASONING[reasoning],
            origins=tuple(origins or ()),
        )
        what = f"{settings.name} with {config['method']}, {replicas} replicas"
        cluster.run(
            settings, host, port, verbose=verbose, ready=lambda at: note(f"serving {what} at {at} (Ctrl-C to stop)")
        )
        return
    with server.bind(host, port) as listening:
        llm = load_model(model, config, verbose=verbose, **options)
        from foretoken.serve.app import create_app
        from foretoken.serve.loop import EngineLoop
        from foretoken.serve.service import Limits, Service

        loop = EngineLoop(llm, max_queue=max_queue, max_seconds=max_seconds).start()
        service = Service(loop, name or model, Limits(body=max_body), reasoning=_REASONING[reasoning])
        place = f"[{host}]" if ":" in host else host
        at = f"http://{place}:{listening.getsockname()[1]}"
        if llm.engine.prefixes is None and not no_prefix_caching:
            note("prompts that begin alike are read again: this model or recipe cannot reuse what was read")
        note(f"serving {service.name} with {config['method']} at {at} (Ctrl-C to stop)")
        try:
            app = create_app(service, api_key=api_key, origins=origins or ())
            server.serve(app, loop, listening, drain_seconds=drain_seconds)
        finally:
            llm.close()  # an executor may have threads, or a helper process


def _parse_replicas(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    try:
        found = int(least), int(most if colon else least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--replicas {text}: write a number from 1 up, or MIN:MAX")
    return found


def check_installed() -> None:
    """Refuse with the remedy where the extra 'serve' is not installed.

    Raises:
        ConfigError: names the package.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"foretoken serve and batch need {package}: pip install 'foretoken[serve]'")
