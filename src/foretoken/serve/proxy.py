"""Middleware of Ray's proxy for failed replicas: retry with another one, or answer with an error in OpenAI's form.

It runs inside the proxy, in front of the replicas. ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` installs it: the
command sets the variable for a new cluster; an existing cluster needs it in its environment.

A request is retried if no part of its answer was sent, even if a replica had begun to compute it. An interrupted answer
cannot be retried: a stream then ends with an error.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

IMPORT_PATH = "foretoken.serve.proxy:middlewares"
_ATTEMPTS = 4
_PAUSE = 0.25  # seconds between two attempts, in which a router learns of failed replicas
_MOST = 64 * 2**20  # maximum bytes of a request that are stored for a retry

# events that a replica sends before it starts the computation
_OPENING = (
    b'"delta":{"role":"assistant","content":""}',
    b"event: response.created\n",
    b"event: response.in_progress\n",
)
_LINES = b"application/x-ndjson"  # Ollama's streams

Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Message]]
_Send = Callable[[Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray puts around its proxy."""
    return [Middleware(AskAgain)]


class AskAgain:
    """ASGI middleware around the proxy that retries.

    Args:
        app: the proxy; it returns without an answer, or in the middle of one, when a replica fails.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        for attempt in range(_ATTEMPTS):
            answer = _Answer(send, scope["path"])
            await self._app(dict(scope), body.again(), answer.send)
            if answer.begun or body.gone or body.lost:
                break
            await asyncio.sleep(_PAUSE * (attempt + 1))
        await answer.close(gone=body.gone)


class _Body:
    """A request's body that can be read repeatedly.

    Attributes:
        gone: whether the client has disconnected.
        lost: whether the body is too long to store.
    """

    def __init__(self, receive: _Receive) -> None:
        self._receive = receive
        self._kept: list[Message] = []
        self._size = 0
        self.gone = self.lost = False

    def again(self) -> _Receive:
        """Return a reader from the start."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if place < len(self._kept):
                place += 1
                return self._kept[place - 1]
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
            else:
                self._size += len(message.get("body", b""))
                self.lost = self._size > _MOST
                if not self.lost:
                    self._kept.append(message)
                    place += 1
            return message

        return receive


class _Answer:
    """An answer in progress. It begins with its first text, not with its head or the opening events of a stream."""

    def __init__(self, send: _Send, path: str) -> None:
        self._send, self._path = send, path
        self._head: Message | None = None
        self._opening: list[Message] = []
        self._words: list[bytes] | None = None  # of an error of Ray
        self.begun = self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        more, body = message.get("more_body", False), message.get("body", b"")
        if not self.begun and more and any(each in body for each in _OPENING):
            self._opening.append(message)
            return
        if not self.begun:
            assert self._head is not None
            self.begun = True
            if self._head["status"] >= 400 and not _kind(self._head).startswith(b"application/json"):
                self._words = []
            else:
                for each in (self._head, *self._opening):
                    await self._send(each)
        self.ended = not more
        if self._words is not None:
            self._words.append(body)
        else:
            await self._send(message)

    async def close(self, *, gone: bool) -> None:
        """Send the missing end of the answer."""
        if gone or (self.ended and self._words is None):
            return
        if self._words is not None:
            assert self._head is not None
            status, words = self._head["status"], b"".join(self._words).decode("utf-8", "replace")
            if status == 404:  # the application has every path, so it has been removed
                status, words = 503, "the server is shutting down"
            await self._refuse(status, words, self._head["headers"])
        elif not self.begun:
            await self._refuse(503, "the replica failed, and no other could answer: try again", [])
        elif self._head is not None and _kind(self._head).startswith((b"text/event-stream", _LINES)):
            message = "the replica failed in the middle of the answer: send the request again"
            failed = _error(self._path, message, 503)
            if self._path.startswith("/v1/responses"):
                failed = {"type": "error", "code": "unavailable", "message": message, "param": None}
            text = json.dumps(failed) + "\n"
            if not _kind(self._head).startswith(_LINES):
                text = "event: error\n" * ("type" in failed) + f"data: {text}\n"
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})

    async def _refuse(self, status: int, message: str, headers: Any) -> None:
        if self._path.startswith("/v1/messages") and status == 503:
            status = 529
        body = json.dumps(_error(self._path, message, status)).encode()
        kept = [(name, value) for name, value in headers if name.lower() not in (b"content-type", b"content-length")]
        if status in (429, 503, 529) and b"retry-after" not in {name.lower() for name, _ in kept}:
            kept.append((b"retry-after", b"1"))
        kept += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _kind(head: Message) -> bytes:
    found: bytes = dict(head["headers"]).get(b"content-type", b"")
    return found


def _error(path: str, message: str, status: int) -> dict[str, Any]:
    # as in refusals.py; importing it here would load the whole engine into the proxy
    if path.startswith("/api/"):
        return {"error": message}
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status, "server_error")
    if path.startswith("/v1/messages"):
        kind = kind.replace("server_error", "overloaded_error" if status in (503, 529) else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": "unavailable"}}
