"""Streamed answers, and the detection of disconnected clients."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
_json = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode  # created once: json.dumps creates one per call
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's status for a closed connection; only logs contain it


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_json(value)}\n\n".encode("utf-8", "replace")


class Chunks:
    """Events of one answer, with their common fields encoded once.

    Args:
        common: fields of every chunk, in addition to ``choices`` and ``usage``.
        usage: whether chunks have ``usage``, which may be null.
    """

    def __init__(self, common: Mapping[str, Any], *, usage: bool) -> None:
        self._head = f'data: {_json(common)[:-1]},"choices":['
        self._usage = usage

    def __call__(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One chunk; ``more`` has further fields."""
        tail = f',"usage":{_json(usage)}' if self._usage else ""
        if more:
            tail += f",{_json(more)[1:-1]}"
        return f"{self._head}{','.join(map(_json, choices))}]{tail}}}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """A stream of server-sent events that ends when the client disconnects or stops reading.

    Args:
        events: closed at the end in every case.
        patience: maximum seconds to send one piece.
        kind: the content type.
        headers: additional headers.
        end: called when the answer has ended, in every case.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        patience: float,
        kind: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}, media_type=kind
        )
        del self.headers["content-length"]
        self._events = events
        self._patience = patience
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._pump(send))
        finally:
            if self._end is not None:
                await self._end()

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
            pass  # the client has disconnected: the code below cancels its requests
        finally:
            watch.stop()
            await self._events.aclose()


class _Watch:
    """Cancels the current task if one piece takes too long. It polls, because a timer per piece would be expensive.

    Args:
        patience: maximum seconds for one piece.
    Attributes:
        since: start of sending the current piece; None: none is being sent.
    """

    def __init__(self, patience: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.since: float | None = None
        self._task = task
        self._patience = patience
        self._look()

    def stop(self) -> None:
        """Stop polling."""
        self._timer.cancel()

    def _look(self) -> None:
        if self.since is not None and monotonic() - self.since >= self._patience:
            self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._patience / 4, self._look)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Await a result for a client; cancel it and return None when the client disconnects first."""
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
    """Await the answer, unless the client disconnects first."""
    return await unless_gone(request.receive, work) or Response(status_code=CLIENT_GONE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: Awaitable[Any]) -> None:
    await asyncio.wait({asyncio.ensure_future(task)})
