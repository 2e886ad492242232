"""``foretoken serve``: an OpenAI-compatible server over one model."""

import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.run.several_models import REASONING, read_models
from foretoken.cli.shared import options
from foretoken.cli.shared.console import note
from foretoken.cli.shared.flags import Flags, with_flags
from foretoken.cli.shared.settings import DEFAULT_MODEL
from foretoken.core.errors import ConfigError, nearest
from foretoken.options.model import EngineOptions
from foretoken.serve.tool_formats import NAMES, check_parser

_ORIGIN = re.compile(r"\*|https?://[^/\s]+|null")
_METRICS = ("none", "summary", "detailed")
_BODY = 8 * 2**20
_SERVER, _LIMITS, _MODELS, _CLUSTER = "Server", "Limits", "Several models", "Cluster"
_server = functools.partial(typer.Option, rich_help_panel=_SERVER)
_limits = functools.partial(typer.Option, rich_help_panel=_LIMITS)
_models = functools.partial(typer.Option, rich_help_panel=_MODELS)
_cluster = functools.partial(typer.Option, rich_help_panel=_CLUSTER)


@with_flags
def serve(
    *,
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, a GGUF file, a hub id, or zoo:NAME.")
    ] = DEFAULT_MODEL,
    recipe: options.Recipe,
    host: Annotated[str, _server("--host", help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, _server("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    names: Annotated[
        str | None,
        _server(
            "--served-model-name",
            metavar="NAME",
            help="Name of the model for clients, or several with commas or spaces; * is any text: gpt-4o,claude-*.",
            show_default="the value of --model",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        _server(
            "--api-key", metavar="KEY", envvar="FORETOKEN_API_KEY", help="API key that clients must send under /v1."
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        _server(
            "--allow-origin",
            metavar="URL",
            help="Origin of web pages that may call the server from a browser; *: any. Repeatable.",
            show_default="none",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, _server("--drain-seconds", min=0, metavar="S", help="Time for running requests to finish after SIGTERM.")
    ] = 60.0,
    engine: Annotated[EngineOptions, Flags(_LIMITS, helps={"max_num_seqs": "Maximum concurrent requests."})],
    max_queue: Annotated[
        int, _limits("--max-queue", min=0, metavar="N", help="Maximum waiting requests; more get status 429.")
    ] = 256,
    max_seconds: Annotated[
        float | None,
        _limits("--max-seconds", min=0.1, metavar="S", help="Maximum time of a request; default: no limit."),
    ] = None,
    max_body: Annotated[int, _limits("--max-body", min=1, metavar="BYTES", help="Maximum size of a request.")] = _BODY,
    no_prefix_caching: Annotated[
        bool,
        _limits("--no-prefix-caching", help="Do not reuse the KV cache of an earlier prompt with the same beginning."),
    ] = False,
    strict_fields: Annotated[
        bool,
        _server(
            "--strict-fields",
            help="Refuse requests with unknown fields; else they are ignored and named in x-foretoken-ignored.",
        ),
    ] = False,
    metrics: Annotated[
        str,
        _server(
            "--spec-metrics",
            metavar="none|summary|detailed",
            help="Speculative metrics in each answer, in vLLM's form.",
        ),
    ] = "none",
    metrics_as_in_vllm: Annotated[
        str | None, typer.Option("--per-request-spec-decode-metrics", hidden=True)  # vLLM's name of --spec-metrics
    ] = None,
    reasoning: Annotated[
        str,
        _server(
            "--reasoning",
            metavar="auto|on|off",
            help="Separate <think>…</think> from the answer; auto: if the chat template uses it.",
        ),
    ] = "auto",
    tool_parser: Annotated[
        str,
        _server(
            "--tool-parser",
            metavar="NAME",
            help=f"The form of tool calls: {', '.join(NAMES)}; auto: the one that the chat template writes.",
        ),
    ] = "auto",
    tool_parser_as_in_vllm: Annotated[
        str | None, typer.Option("--tool-call-parser", hidden=True)  # vLLM's name of --tool-parser
    ] = None,
    loras: Annotated[
        list[str] | None,
        _server(
            "--lora",
            metavar="NAME=DIR",
            help="LoRA folder that requests with this model name get, next to the model's weights. Repeatable.",
            show_default="none",
        ),
    ] = None,
    adapters_change: Annotated[
        bool, _server("--allow-adapter-updates", help="Let clients load and unload LoRA folders of this machine.")
    ] = False,
    models: Annotated[
        Path | None, _models("--models", metavar="FILE", help="TOML file of several models to serve, a table for each.")
    ] = None,
    models_gb: Annotated[
        float | None,
        _models("--models-memory", metavar="GB", min=0, help="Limit of weights and caches in memory, 10^9 bytes."),
    ] = None,
    models_max: Annotated[
        int | None, _models("--models-max", metavar="N", min=1, help="Limit of the models in memory.")
    ] = None,
    idle_seconds: Annotated[
        float | None, _models("--idle-seconds", metavar="S", min=0, help="Time until an unused model leaves memory.")
    ] = None,
    on_ray: Annotated[bool, _cluster("--ray", help="Run replicas on Ray Serve.")] = False,
    replicas: Annotated[
        str,
        _cluster(
            "--replicas", metavar="N|MIN:MAX", help="Number of replicas, with --ray; a range scales with the load."
        ),
    ] = "1",
    loading: options.Loading,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model to clients of OpenAI, Anthropic and Ollama: streams, log-probabilities, tools.

    Also /health, /metrics (Prometheus, vLLM's names) and /docs. After SIGTERM, running requests finish and new ones get
    status 503. Needs the extra 'serve': pip install "foretoken\\[serve]".

    [bold]Examples[/bold]

      foretoken serve

      foretoken serve ./my-model --method suffix --port 8080 --api-key secret

      foretoken serve --ray --replicas 1:4 --threads 2

      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"model": "zoo:base", "prompt": "Hi"}'
    """
    check_installed()
    if models is not None:
        source = context.get_parameter_source("model")
        given: dict[str, Any] = {"MODEL": source is not None and source.name == "COMMANDLINE"}
        given |= {"--served-model-name": names, "--set": recipe.sets, "--draft-model": recipe.draft_model}
        given |= {"--plan": recipe.plan, "--lora": loras, "--ray": on_ray}
        for name in (name for name, value in given.items() if value):
            raise ConfigError(f"{name} does not go with --models: write it into the table of a model, or leave it out")
    options.check_model_name(model)
    served = _served_names(names, context.args) or [model]
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key is empty: set a key, or leave it out")
    if reasoning not in REASONING:
        raise ConfigError(f"--reasoning {reasoning}: {nearest(reasoning, REASONING)}")
    tool_parser = tool_parser_as_in_vllm or tool_parser
    check_parser(tool_parser)
    metrics = metrics_as_in_vllm or metrics
    if metrics not in _METRICS:
        raise ConfigError(f"--spec-metrics {metrics}: {nearest(metrics, _METRICS)}")
    for origin in origins or ():
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allow-origin {origin}: write http://HOST:PORT, https://HOST or *")
    if no_prefix_caching and engine.prefix_cache_dir is not None:
        raise ConfigError("--prefix-cache-dir keeps what --no-prefix-caching leaves out: keep one")
    adapters = options.named_folders(loras or ())
    config = recipe.config(model)

    least, most = _parse_replicas(replicas)
    if most > 1 and not on_ray:
        raise ConfigError(f"--replicas {replicas} needs --ray")
    if adapters_change and on_ray:
        raise ConfigError("--allow-adapter-updates reaches one replica only: leave it or --ray out")
    settings: dict[str, Any] = {**asdict(loading), **asdict(engine), "enable_prefix_caching": not no_prefix_caching}

    from foretoken.serve import server

    if api_key is None and not server.is_loopback(host):
        note("every host that can reach this address has access: --api-key requires a key")
    from foretoken.serve.model_pool import ModelSettings
    from foretoken.serve.service import Limits

    limits = Limits(body=max_body, strict=strict_fields, metrics=metrics, queue=max_queue, seconds=max_seconds)
    served_model = ModelSettings(
        model=model,
        config=config,
        names=tuple(served),
        options=settings,
        reasoning=REASONING[reasoning],
        tool_parser=tool_parser,
        adapters=adapters,
    )
    if on_ray:
        from foretoken.serve import cluster

        replicated = cluster.Replicas(
            least=least,
            most=most,
            threads=loading.threads or 1,
            model=replace(served_model, options=settings | {"threads": loading.threads or 1}),
            limits=limits,
            api_key=api_key,
            drain_seconds=drain_seconds,
            origins=tuple(origins or ()),
        )
        what = f"{served[0]} with {config.get('method', 'a plan')}, {replicas} replicas"
        cluster.run(
            replicated, host, port, verbose=verbose, ready=lambda at: note(f"serving {what} at {at} (Ctrl-C to stop)")
        )
        return
    several = [served_model] if models is None else read_models(models, served_model)
    with server.bind(host, port) as listening:
        place = f"[{host}]" if ":" in host else host
        at = f"http://{place}:{listening.getsockname()[1]} (Ctrl-C to stop)"
        from foretoken.serve.app import create_app
        from foretoken.serve.model_pool import ModelPool

        pool = ModelPool(
            several,
            limits,
            budget=_budget(models_gb) if models else None,
            most=models_max,
            idle_seconds=idle_seconds,
            adapters_change=adapters_change,
        )
        if models is None:
            service = pool.begin(pool.models[0], options.load_model(model, config, verbose=verbose, **settings))
            if service.llm.engine.prefixes is None and not no_prefix_caching:
                note("no prefix cache: this model or recipe cannot reuse the KV cache of earlier prompts")
            note(f"serving {service.name} with {service.llm.recipe.method} at {at}")
            del service  # the pool may release it
        else:
            note(f"serving {', '.join(each.name for each in pool.models)} at {at}")
        try:
            app = create_app(pool, api_key=api_key, origins=origins or ())
            server.serve(app, pool, listening, drain_seconds=drain_seconds)
        finally:
            pool.release()  # an executor may own threads or a helper process


def _budget(gigabytes: float | None) -> int | None:
    """Return the bytes that the models may take: of the free memory, a quarter is left for caches that grow."""
    from foretoken.models.memory import free_memory

    free = free_memory()
    return int(gigabytes * 1e9) if gigabytes is not None else None if free is None else free * 3 // 4


def _served_names(given: str | None, more: Sequence[str]) -> list[str]:
    """Return the names for clients.

    Args:
        given: the option's value, perhaps several names with commas.
        more: further arguments: ``--served-model-name A B`` has a second name there.
    """
    if more and given is None:
        raise ConfigError(f"unexpected argument {more[0]!r}: one model is served")
    if given is None:
        return []
    found = [name.strip() for each in (given, *more) for name in each.split(",")]
    for name in found:
        if not name or name.startswith("-"):
            raise ConfigError(f"--served-model-name: {name!r} is not a name")
    if "*" in found[0]:
        raise ConfigError(
            f"--served-model-name: the first name, '{found[0]}', is the one of /v1/models: write no * in it"
        )
    return list(dict.fromkeys(found))


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
    """Refuse to run without the extra 'serve', and name the remedy.

    Raises:
        ConfigError: a package is missing; the message names it.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"foretoken serve and batch need {package}: pip install 'foretoken[serve]'")
