"""Answers in pieces, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: json.dumps makes one each time
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's number for it: only a log will ever show it


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_json(value)}\n\n".encode("utf-8", "replace")


class Chunks:
    """Events of one answer: what they have in common is written once.

    Args:
        common: of every chunk, next to ``choices`` and ``usage``.
        usage: whether chunks have ``usage``, which is null where nothing is said.
    """

    def __init__(self, common: Mapping[str, Any], *, usage: bool) -> None:
        self._head = f'data: {_json(common)[:-1]},"choices":['
        self._usage = usage

    def __call__(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        """One chunk."""
        tail = f',"usage":{_json(usage)}' if self._usage else ""
        return f"{self._head}{','.join(map(_json, choices))}]{tail}}}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """A stream of server-sent events, which ends when the client goes away or does not read.

    Args:
        events: closed at the end, whatever the reason.
        patience: seconds that one piece may take to be sent.
        headers: next to the usual ones.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, patience: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._events = events
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        watch = _Watch(self._patience)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._events:
                watch.since = monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                watch.since = None
            watch.since = monotonic()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client is gone: what ran for it is cancelled below
        finally:
            watch.stop()
            await self._events.aclose()


class _Watch:
    """Ends the task that made it where one piece takes too long. It looks now and then: pieces are many.

    Args:
        patience: seconds that a piece may take.
    Attributes:
        since: when the piece was given to the client that it has not taken; None: there is none.
    """

    def __init__(self, patience: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.since: float | None = None
        self._task = task
        self._patience = patience
        self._look()

    def stop(self) -> None:
        """Do not look any more."""
        self._timer.cancel()

    def _look(self) -> None:
        if self.since is not None and monotonic() - self.since >= self._patience:
            self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._patience / 4, self._look)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Do something for a client; cancelled, with None, when the client goes away first."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() and not doing.cancelled() else None
    finally:
        for task in (doing, gone):
            if not task.done():
                task.cancel()
                await _ended(task)


async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that is being worked on, unless the client goes away first."""
    return await unless_gone(request.receive, work) or Response(status_code=CLIENT_GONE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: Awaitable[Any]) -> None:
    await asyncio.wait({asyncio.ensure_future(task)})
