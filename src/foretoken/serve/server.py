"""A process that serves models: uvicorn around the application, and an orderly shutdown."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from foretoken.core.errors import ConfigError
from foretoken.serve.request_head import bounded_config

if TYPE_CHECKING:  # it imports what loads models
    from foretoken.serve.model_pool import ModelPool

log = logging.getLogger(__name__)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host in _LOOPBACK


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Bind it before loading a model, which may take minutes.

    Args:
        port: 0 selects a free one.
    Raises:
        ConfigError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {why}; use another port, or 0 for any free one") from None


def serve(app: FastAPI, pool: ModelPool, listening: socket.socket, *, drain_seconds: float) -> None:
    """Serve until a signal: then new requests get 503, running ones may finish, and the remaining ones are cancelled.

    Args:
        pool: the application's models; closed at the end.
        listening: see :func:`bind`.
        drain_seconds: time for running requests after the first SIGTERM or SIGINT; a second signal cancels them, a
            third one does not wait for their readers.
    """
    config = bounded_config(
        app, lifespan="off", access_log=False, log_level="warning", timeout_graceful_shutdown=5, server_header=False
    )
    try:
        _Server(config, pool, drain_seconds).run(sockets=[listening])
    finally:
        pool.close()


class _Server(uvicorn.Server):
    """Keeps listening while it drains, so that a late client gets the reason of its refusal."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool, seconds: float) -> None:
        super().__init__(config)
        self._pool = pool
        self._seconds = seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> Any:
        """Start to drain; uvicorn calls it for SIGINT and SIGTERM."""
        if self.should_exit:
            self.force_exit = True
            return
        log.info("draining after %s", signal.Signals(sig).name)
        seconds = self._seconds if self._pool.accepting else 0.0
        self._pool.drain()
        threading.Thread(target=self._end, args=(seconds,), name="foretoken-drain", daemon=True).start()

    def _end(self, seconds: float) -> None:
        """Cancel the remaining requests after ``drain_seconds``; report it to their clients, and end the server."""
        self._pool.close(seconds)
        self.should_exit = True
