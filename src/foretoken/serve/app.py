"""The ASGI application: paths, keys, limits, and errors in one form. uvicorn and Ray run the same application."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.serve import token_paths
from foretoken.serve.body import StrictRoute
from foretoken.serve.chat import Chat
from foretoken.serve.completions import Completion
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.guard import Guard, needs_key
from foretoken.serve.infill_answer import InfillAnswer
from foretoken.serve.messages import Messages, count_tokens
from foretoken.serve.messages_schema import CountRequest, MessagesRequest
from foretoken.serve.metrics import LoopCollector, exposition
from foretoken.serve.model_pool import ModelPool, PooledModel
from foretoken.serve.ollama import OllamaAnswer, OllamaChat, OllamaGenerate, OllamaRequest, ollama_card, stamp
from foretoken.serve.refusals import Error, on_error
from foretoken.serve.responses import Response as MadeResponse
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import (
    AdapterName,
    ChatRequest,
    CompletionRequest,
    InfillRequest,
    LoadAdapter,
    ModelName,
    Sampling,
)
from foretoken.serve.service import FINGERPRINT, Service, first_of
from foretoken.serve.stream import CLIENT_GONE, EventStream, answered, unless_gone

_IGNORED, _STRICT = "x-foretoken-ignored", "x-foretoken-strict"
_MOST_IGNORED = 1000  # bytes of the header that names ignored fields
_PAGE = (Path(__file__).parent / "page.html").read_bytes()
_NOTHING_FROM_ELSEWHERE = {
    "Content-Security-Policy": "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
}
_CODES = (400, 401, 404, 408, 413, 414, 429, 431, 500, 503)
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events", "content": {"application/json": {}, "text/event-stream": {}}}
}
_NUMBERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "In Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def create_app(pool: ModelPool, *, api_key: str | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """The application over one model or several.

    Args:
        pool: the models; the caller ends them.
        api_key: the bearer token that clients must send under ``/v1`` and for tokens; None: no key.
        origins: origins of the pages that may call it from a browser; "*": any.
    """
    app = _App(
        title="Foretoken",
        version=FINGERPRINT.removeprefix("foretoken-"),
        description="An OpenAI-compatible server over speculative decoding.",
        responses={code: {"description": HTTPStatus(code).phrase, "model": Error} for code in _CODES},
    )
    pool.histograms.registry.register(LoopCollector(pool.models))
    app.add_middleware(Guard, limit=pool.limits.body, api_key=api_key)
    if origins:  # outermost, so that a page can read the reason of a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.router.route_class = StrictRoute
    _add_paths(app, pool)
    _add_operation(app, pool)
    app.asks_key = api_key is not None
    return app


class _App(FastAPI):
    """Describes itself once a client asks, since that takes half a second.

    The description lacks FastAPI's 422, since invalid fields get a 400, and marks the paths that need a key.
    """

    asks_key = False

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        described = super().openapi()
        for path, methods in described["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if self.asks_key and needs_key(path):
                    operation["security"] = [{"key": []}]
        if self.asks_key:
            described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        return described


def _add_paths(app: FastAPI, pool: ModelPool) -> None:
    @app.post("/v1/chat/completions", summary="Answer a conversation", tags=["openai"], responses=_STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answer(Chat, body, request)

    @app.post("/v1/completions", summary="Continue a text", tags=["openai"], responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(Completion, body, request)

    @app.post("/infill", summary="Fill in a text, in llama.cpp's form", tags=["llama.cpp"], responses=_STREAMED)
    async def infill(body: InfillRequest, request: Request) -> Response:
        return await answer(InfillAnswer, body, request)

    @app.post("/v1/responses", summary="Create a response, stateless", tags=["openai"], responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await answer(MadeResponse, body, request)

    @app.post(
        "/v1/messages", summary="Answer a conversation, in Anthropic's form", tags=["anthropic"], responses=_STREAMED
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await answer(Messages, body, request)

    @app.post("/v1/messages/count_tokens", summary="Tokens of a conversation", tags=["anthropic"])
    async def count(body: CountRequest, request: Request) -> Response:
        return await look_up(count_tokens, body, request)

    async def ollama(body: OllamaChat | OllamaGenerate, request: Request) -> Response:
        began = monotonic()
        if body.model is not None and not any(each.knows(body.model) for each in pool.models):
            body.model = body.model.removesuffix(":latest")
        model = pool.find(body.model)
        if body.keep_alive is not None:
            model.keep = body.keep_alive
        if body.messages if isinstance(body, OllamaChat) else body.prompt:
            return await answer(partial(OllamaAnswer, began=began), body, request)
        if body.keep_alive == 0:
            await pool.unload(model)
        else:
            async with pool.serving(body.model):
                pass
        text = {"message": {"role": "assistant", "content": ""}} if isinstance(body, OllamaChat) else {"response": ""}
        reason = "unload" if body.keep_alive == 0 else "load"
        return JSONResponse(
            {"model": body.model, "created_at": stamp(time()), **text, "done": True, "done_reason": reason}
        )

    @app.post("/api/chat", summary="Answer a conversation, in Ollama's form", tags=["ollama"], responses=_STREAMED)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        return await ollama(body, request)

    @app.post("/api/generate", summary="Answer a prompt, in Ollama's form", tags=["ollama"], responses=_STREAMED)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        return await ollama(body, request)

    async def answer(way: Callable[[Service, Any], Any], body: Sampling | OllamaRequest, request: Request) -> Response:
        if body.unknown and (pool.limits.strict or request.headers.get(_STRICT, "0") != "0"):
            name = body.unknown[0]
            message = f"unknown field '{name}', which strict parsing refuses: leave it out"
            raise ApiError(400, message, param=name, code="unknown_field")
        async with AsyncExitStack() as held:  # the model, until the answer has ended
            service = await unless_gone(request.receive, held.enter_async_context(pool.serving(body.model)))
            if service is None:
                return Response(status_code=CLIENT_GONE)
            asked = await asyncio.to_thread(way, service, body)  # templates, tokens and grammars take time
            headers = {"x-request-id": asked.id, "request-id": asked.id}
            if body.ignored:
                headers[_IGNORED] = _listed(body.ignored)
                service.timings.count_ignored(len(body.ignored))
            if body.stream:
                # wait for the first event, so that a refusal still sets the HTTP status
                events = await unless_gone(request.receive, first_of(asked.events()))
                if events is None:
                    return Response(status_code=CLIENT_GONE)
                kind, end = getattr(asked, "media_type", "text/event-stream"), held.pop_all().aclose
                return EventStream(events, patience=pool.limits.patience, kind=kind, headers=headers, end=end)

            async def whole() -> Response:
                return JSONResponse(await asked.answer(), headers=headers)

            return await answered(request, whole())

    async def look_up(way: Callable[[Service, Any], Any], body: Any, request: Request) -> Response:
        async def found() -> Response:
            async with pool.serving(body.model) as service:
                return JSONResponse(await asyncio.to_thread(way, service, body))

        return await answered(request, found())

    for root in ("", "/v1"):  # vLLM and llama.cpp have them at the root, and clients append them to their base URL

        @app.post(f"{root}/tokenize", summary="Token ids of a text or a conversation", tags=["tokens"])
        async def tokenize(body: token_paths.TokenizeRequest, request: Request) -> Response:
            return await look_up(token_paths.tokenize, body, request)

        @app.post(f"{root}/detokenize", summary="The text of token ids", tags=["tokens"])
        async def detokenize(body: token_paths.DetokenizeRequest, request: Request) -> Response:
            return await look_up(token_paths.detokenize, body, request)

        @app.post(f"{root}/apply-template", summary="The prompt of a conversation", tags=["tokens"])
        async def apply_template(body: token_paths.TemplateRequest, request: Request) -> Response:
            return await look_up(token_paths.apply_template, body, request)

        @app.get(f"{root}/tokenizer_info", summary="The tokenizer's special tokens and template", tags=["tokens"])
        async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
            async with pool.serving(model) as service:
                return token_paths.tokenizer_info(service)


def _add_operation(app: FastAPI, pool: ModelPool) -> None:
    """Add the paths about models, adapters and the server."""

    def model_card(model: PooledModel, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": pool.created, "owned_by": "foretoken"}
        return known | model.card(name)

    @app.get("/api/tags", summary="The served models, in Ollama's form", tags=["ollama"])
    async def tags() -> dict[str, Any]:
        cards = (await models())["data"]
        return {"models": [_tag(pool, each["id"]) for each in cards]}

    @app.get("/api/ps", summary="The models in memory, in Ollama's form", tags=["ollama"])
    async def ps() -> dict[str, Any]:
        cards = (await models())["data"]
        return {"models": [_tag(pool, each["id"]) for each in cards if each["status"]["value"] == "loaded"]}

    @app.post("/api/show", summary="Properties of a model, in Ollama's form", tags=["ollama"])
    async def show(body: ModelName) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(ollama_card, pool.find(body.model).settings)
        except ForetokenError as error:
            raise ApiError(503, str(error)) from None

    @app.get("/models", summary="The same, in llama.cpp's place", tags=["models"])
    @app.get("/v1/models", summary="The served models and their states", tags=["openai"])
    async def models() -> dict[str, Any]:
        cards = [
            model_card(model, name)
            for model in pool.models
            for name in (*model.names, *model.adapters)
            if "*" not in name
        ]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{name:path}", summary="Properties of a model", tags=["openai"])
    async def model(name: str) -> dict[str, Any]:
        return model_card(pool.find(name), name) if name else await models()

    @app.post("/models/load", summary="Load a model now", tags=["models"])
    async def load(body: ModelName) -> dict[str, bool]:
        async with pool.serving(body.model):
            return {"success": True}

    @app.post("/models/unload", summary="Take a model out of memory after its requests", tags=["models"])
    async def unload(body: ModelName) -> dict[str, bool]:
        await pool.unload(pool.find(body.model))
        return {"success": True}

    @app.post("/sleep", summary="Take all models out of memory after their requests", tags=["models"])
    async def sleep() -> dict[str, bool]:
        for model in pool.models:
            await pool.unload(model)
        return {"is_sleeping": True}

    @app.post("/wake_up", summary="Load the models that sleep, as far as they fit", tags=["models"])
    async def wake_up() -> dict[str, bool]:
        for model in pool.models:
            if model.state == "sleeping":
                async with pool.serving(model.name):
                    pass
        return {"is_sleeping": False}

    @app.get("/is_sleeping", summary="Whether no model is in memory", tags=["models"])
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": all(model.stay is None for model in pool.models)}

    if pool.adapters_change:

        @app.post("/v1/load_lora_adapter", summary="Serve a LoRA folder of the server's machine", tags=["adapters"])
        async def load_adapter(body: LoadAdapter) -> dict[str, str]:
            model = pool.find(body.model)
            try:
                if any(each.knows(body.lora_name) for each in pool.models if each is not model):
                    raise ConfigError(f"adapter '{body.lora_name}' has another model's name: choose another one")
                async with pool.serving(body.model) as service:
                    await asyncio.to_thread(service.load_adapter, body.lora_name, body.lora_path)
            except ForetokenError as error:
                raise api_error(ConfigError(str(error)), "lora_path") from None
            model.adapters[body.lora_name] = body.lora_path
            return {"status": f"adapter '{body.lora_name}' is served"}

        @app.post("/v1/unload_lora_adapter", summary="Serve an adapter no more", tags=["adapters"])
        async def unload_adapter(body: AdapterName) -> dict[str, str]:
            model = next((each for each in pool.models if body.lora_name in each.adapters), None)
            if model is None:
                raise ApiError(404, f"there is no adapter '{body.lora_name}'", param="lora_name")
            del model.adapters[body.lora_name]
            if model.service is not None:
                model.service.adapters.pop(body.lora_name, None)
            return {"status": f"adapter '{body.lora_name}' is served no more"}  # what runs keeps it

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers=_NOTHING_FROM_ELSEWHERE)

    @app.get("/page.json", include_in_schema=False)
    async def of_the_page() -> dict[str, str]:
        model = next((each for each in pool.models if each.service is not None), pool.models[0])
        card = model.card(model.name)
        method, promise = card["method"] or "its method", card["promise"] or "its first request loads it"
        return {"model": model.name, "method": method, "promise": promise}

    @app.get("/health", summary="200 while requests can run", tags=["operation"])
    async def health() -> Response:
        if not pool.accepting:
            why = f"the engine has died: {pool.failure}" if pool.failure else "shutting down"
            raise ApiError(503, why, code="unavailable")
        return JSONResponse({"status": "ok"})

    @app.get(
        "/metrics", summary="Metrics for Prometheus", tags=["operation"], response_class=Response, responses=_NUMBERS
    )
    async def metrics() -> Response:
        return Response(exposition(pool.histograms.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/api/version", summary="The same, in Ollama's place", tags=["ollama"])
    @app.get("/version", summary="The version of the server", tags=["operation"])
    async def version() -> dict[str, str]:
        return {"version": app.version}


def _tag(pool: ModelPool, name: str) -> dict[str, Any]:
    """Return a model of Ollama's lists."""
    size = pool.find(name).num_bytes
    return {"name": name, "model": name, "modified_at": stamp(pool.created), "size": size, "digest": "", "details": {}}


def _listed(paths: Sequence[str]) -> str:
    """Join names for a header: characters that a header cannot have are escaped, and the length is bounded."""
    whole = ",".join(quote(path, safe="[].*") for path in paths)
    return whole if len(whole) <= _MOST_IGNORED else f"{whole[:_MOST_IGNORED].rpartition(',')[0]},...".lstrip(",")
