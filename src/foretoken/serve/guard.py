"""Checks that precede the parsing of a request: its key, its size, and the time that it takes to arrive."""

import asyncio
import hmac
from collections.abc import Mapping
from time import monotonic

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import ApiError
from foretoken.serve.refusals import refusal
from foretoken.serve.request_head import check_head

_LIKE_V1 = (  # paths that need the key, too
    *("/infill", "/tokenize", "/detokenize", "/apply-template", "/tokenizer_info"),
    *("/models", "/models/load", "/models/unload", "/sleep", "/wake_up", "/is_sleeping"),
)
_BODY_SECONDS, _BODY_RATE = 30.0, 1000.0  # the time limit of a body, and one more second per this many bytes


class Guard:
    """Refuse requests without the key, and requests that are too large or too slow, before parsing them."""

    def __init__(self, app: ASGIApp, *, limit: int, api_key: str | None) -> None:
        self._app = app
        self._limit = limit
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the host discards the body
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        try:
            check_head(scope)
            if self._key is not None and needs_key(scope["path"]):
                self._check_key(headers)
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self._limit:
                raise ApiError(413, self._too_long)
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        read, whole, began = 0, False, monotonic()

        async def bounded() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            left = began + _BODY_SECONDS + read / _BODY_RATE - monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.0))
            except asyncio.TimeoutError:  # FastAPI lets only HTTPException through while it reads a body
                raise HTTPException(408, "the body comes too slowly: send it at once") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self._limit:
                raise HTTPException(413, self._too_long)
            return message

        await self._app(scope, bounded, send)

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        assert self._key is not None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # Anthropic's header
        if not hmac.compare_digest(key.strip(), self._key.strip()):
            message = "the API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    @property
    def _too_long(self) -> str:
        return f"the request has more than {self._limit} bytes: shorten it"


def needs_key(path: str) -> bool:
    """Whether a path requires the key, if the server has one."""
    return path.startswith(("/v1", "/api/")) or path in _LIKE_V1
