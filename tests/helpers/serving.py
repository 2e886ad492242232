"""A server in this process: real sockets, real clients, over the bundled target."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import uvicorn

from foretoken.engine.llm import LLM
from foretoken.serve.app import create_app
from foretoken.serve.loop import EngineLoop
from foretoken.serve.model_pool import ModelPool, ModelSettings
from foretoken.serve.request_head import bounded_config
from foretoken.serve.server import bind
from foretoken.serve.service import Limits, Service

NAME = "zoo:base"


class Served:
    """A server that runs, and raw requests to it."""

    def __init__(self, port: int, pool: ModelPool) -> None:
        self.port = port
        self.pool = pool
        self.url = f"http://127.0.0.1:{port}"

    @property
    def service(self) -> Service:
        """The only model."""
        service = self.pool.models[0].service
        assert service is not None
        return service

    @property
    def loop(self) -> EngineLoop:
        return self.service.loop

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(
        self, path: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None
    ) -> tuple[int, Any, HTTPResponse]:
        """One request: status, JSON (text where it is none), and the response with its headers."""
        raw = body if isinstance(body, (bytes, str)) or body is None else json.dumps(body)
        with closing(self.connect()) as connection:
            connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        try:
            return response.status, json.loads(text), response
        except ValueError:
            return response.status, text, response

    def get(self, path: str) -> tuple[int, Any, HTTPResponse]:
        return self.send(path, method="GET")

    @contextmanager
    def begun(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Iterator[HTTPResponse]:
        """A stream that has begun; the client goes away at the end of the block."""
        with closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
            with connection.getresponse() as response:
                yield response

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, "[DONE]" as it is."""
        with self.begun(path, body) as response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode()
        data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


@contextmanager
def served(
    llm: LLM,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    http: str = "auto",
    names: Sequence[str] = (NAME,),
    tool_parser: str = "auto",
    adapters: dict[str, str] | None = None,
    adapters_change: bool = False,
    max_queue: int = 256,
    max_seconds: float | None = None,
) -> Iterator[Served]:
    """Serve an LLM on a free port until the block ends."""
    limits = replace(limits or Limits(), queue=max_queue, seconds=max_seconds)
    own = {"names": tuple(names), "tool_parser": tool_parser, "adapters": adapters or {}}
    settings = ModelSettings(model=llm.target.name, config={"method": "none"}, **own)
    pool = ModelPool([settings], limits, adapters_change=adapters_change)
    pool.begin(pool.models[0], llm)
    with served_pool(pool, api_key=api_key, origins=origins, http=http) as running:
        yield running


@contextmanager
def served_pool(
    pool: ModelPool, *, api_key: str | None = None, origins: Sequence[str] = (), http: str = "auto"
) -> Iterator[Served]:
    """Serve models on a free port until the block ends."""
    listening = bind("127.0.0.1", 0)
    config = bounded_config(
        create_app(pool, api_key=api_key, origins=origins),
        http=http,
        lifespan="off",
        log_level="critical",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        yield Served(listening.getsockname()[1], pool)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        pool.close()
        listening.close()
