"""Answers in pieces, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's number for it: only a log will ever show it


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """A stream of server-sent events, which ends when the client goes away or does not read.

    Args:
        events: closed at the end, whatever the reason.
        patience: seconds that one piece may take to be sent.
        headers: beside the usual ones.
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
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._events:
                await self._patiently(send({"type": "http.response.body", "body": piece, "more_body": True}))
            await self._patiently(send({"type": "http.response.body", "body": b"", "more_body": False}))
        except OSError:
            pass  # the client is gone: what ran for it is cancelled below
        finally:
            await self._events.aclose()

    async def _patiently(self, sending: Awaitable[None]) -> None:
        """Wait for a piece to be taken; the pump ends where that lasts too long. A hot path: no task of its own."""
        pump = asyncio.current_task()
        assert pump is not None
        timer = asyncio.get_running_loop().call_later(self._patience, pump.cancel)
        try:
            await sending
        finally:
            timer.cancel()


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
