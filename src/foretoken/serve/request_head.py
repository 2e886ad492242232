"""Bounds on a connection: the bytes, the number and the time of its header fields, and the time of its reader.

uvicorn's own protocols bound neither the size of a request head nor the time to receive it. Two functions add bounds:

* :func:`check_head` refuses a complete head in the application, under any host, before the check of the key;
* :func:`bounded_protocol` makes uvicorn stop reading an endless head, chunk extension or trailer, and
  drop a connection that does not read its answers.
"""

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.serve.errors import ApiError

MAX_BYTES = 64 * 2**10  # of all header fields
MAX_FIELDS = 100
MAX_TARGET = 8 * 2**10  # bytes of the path and its query
SECONDS = 10.0  # from the start of the wait for a head to its end
STALL_SECONDS = 60.0  # longest time without progress while a client reads an answer
_LINGER = 2.0  # seconds for a refused client to finish sending: closing the socket earlier would lose the refusal
_SLICE = 16 * 2**10  # bytes to parse between two checks of the bounds


def check_head(scope: Scope) -> None:
    """Refuse a request with a line or header fields that are too long.

    Raises:
        ApiError: 414 or 431.
    """
    target = scope.get("raw_path") or scope["path"].encode()
    if len(target) + 1 + len(scope.get("query_string", b"")) > MAX_TARGET:
        raise _target_too_long()
    fields = scope["headers"]
    if len(fields) > MAX_FIELDS or sum(len(name) + len(value) + 4 for name, value in fields) > MAX_BYTES:
        raise _fields_too_long()


def _target_too_long() -> ApiError:
    return ApiError(414, f"the request line has more than {MAX_TARGET} bytes: shorten the path or its query")


def _fields_too_long() -> ApiError:
    return ApiError(431, f"more than {MAX_FIELDS} header fields or {MAX_BYTES} bytes of them: send fewer")


def bounded_config(app: Any, *, http: str = "auto", **options: Any) -> uvicorn.Config:
    """Configure uvicorn with bounds on everything before a body.

    Args:
        http: "httptools", "h11", or "auto": httptools if it is installed.
        options: of ``uvicorn.Config``.
    """
    protocol = bounded_protocol(http)
    return uvicorn.Config(app, http=protocol, h11_max_incomplete_event_size=MAX_BYTES, **options)


def bounded_protocol(http: str = "auto") -> type[asyncio.Protocol]:
    """Return one of uvicorn's protocols with these bounds; for ``http`` see :func:`bounded_config`."""
    if http == "h11":
        return _BoundedH11
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        if http == "httptools":
            raise
        return _BoundedH11

    class BoundedHttpTools(_Bounded, HttpToolsProtocol):
        """Count the bytes since the last event of the parser, which does not expose unfinished fields."""

        _unparsed = 0

        def _parse(self, data: bytes) -> None:
            self._unparsed += len(data)
            HttpToolsProtocol.data_received(self, data)
            if self._unparsed > MAX_BYTES or len(self.headers or ()) > MAX_FIELDS:
                too_long = len(self.url) > MAX_TARGET
                self._refuse(_target_too_long() if too_long else _fields_too_long())

        def on_headers_complete(self) -> None:
            self._unparsed = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unparsed = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unparsed = 0
            super().on_message_complete()

    return BoundedHttpTools


class _Bounded(asyncio.Protocol, ABC):
    """Shared part of both protocols: the deadline of a head, and refusals in the form of OpenAI's errors.

    A mixin for uvicorn's protocols; it reads their attributes ``cycle`` (the newest request and its answer),
    ``transport`` and ``server_state``.
    """

    cycle: Any
    flow: Any
    transport: Any
    server_state: Any
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refusal: ApiError | None = None
    _received = False  # whether any byte of the expected head has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_stalled()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # closing would wait for the reader, too
        self._stalled = asyncio.get_running_loop().call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalled()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE):
            if self._refusal is not None or self.transport.is_closing():
                return  # the remaining input is discarded
            self._received = True
            self._parse(data[start : start + _SLICE])
        if self._refusal is None and self._answering:
            self._stop_deadline()

    def on_response_complete(self) -> None:
        """End the answer, see uvicorn."""
        super().on_response_complete()  # type: ignore[misc]
        if self.transport.is_closing() or self._answering:
            return
        if self._refusal is None:
            self._await_head()
        else:
            self._send_refusal(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid input; uvicorn calls it after an error of the parser."""
        error = sys.exc_info()[1]
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(self._too_long())
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))

    @abstractmethod
    def _parse(self, data: bytes) -> None:
        """Hand the next bytes of a request to the parser that uvicorn has."""

    def _too_long(self) -> ApiError:
        return _fields_too_long()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_deadline()
        self._received = False
        self._deadline = asyncio.get_running_loop().call_later(SECONDS, self._too_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _too_late(self) -> None:
        body_goes_on = self.cycle is not None and self.cycle.more_body  # of an answered request
        if self._received and not body_goes_on:
            self._refuse(ApiError(408, f"the request line and header fields took more than {SECONDS:g} s"))
        else:
            self.transport.close()

    def _refuse(self, refusal: ApiError) -> None:
        """Read no more, and send the reason after the answers to earlier requests."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = refusal
        if not self._answering:
            self._send_refusal(refusal)
        elif self.cycle.more_body:  # the answer to the refused request has begun
            begun = self.cycle.response_started or getattr(self, "pipeline", ())
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if begun:
                self.transport.close()
            else:
                self._send_refusal(refusal)

    def _send_refusal(self, refusal: ApiError) -> None:
        self.flow.resume_reading()
        body = json.dumps(refusal.body).encode()
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        line = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n".encode()
        self.transport.write(line + b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_deadline()
        self._deadline = asyncio.get_running_loop().call_later(_LINGER, self.transport.close)


class _BoundedH11(_Bounded, H11Protocol):
    """h11 bounds its buffer itself, see ``h11_max_incomplete_event_size``."""

    def _parse(self, data: bytes) -> None:
        H11Protocol.data_received(self, data)

    def _too_long(self) -> ApiError:
        of_head = self.conn.their_state in (h11.IDLE, h11.ERROR) and not self._answering
        in_line = of_head and b"\n" not in self.conn.trailing_data[0]
        return _target_too_long() if in_line else _fields_too_long()
