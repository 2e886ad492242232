"""Strict JSON parsing of request bodies.

Python's parser accepts NaN, infinite numbers and lone surrogates, which are not JSON, and keeps the later value of a
duplicate name. Such values would cause an error while the answer is written, or change it silently.
"""

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from foretoken.serve.errors import ApiError

_DEEPEST = 128  # nesting depth: far above that of a schema, far below the parser's recursion limit
_SUSPECT = re.compile(r"NaN|Infinity|[0-9][eE]\+?[0-9]{3}|[0-9]{300}|\\u[dD][89a-fA-F]")


class StrictRoute(APIRoute):
    """A route that parses its body with :func:`read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            asked = _Asked(request.scope, request.receive)
            if request.method == "POST":
                await asked.read()
            return await answer(asked)

        return handler


class _Asked(Request):
    """A request with a parsed body, which FastAPI then uses."""

    async def read(self) -> None:
        # JSON needs its content type: browsers send other types across origins without a preflight request
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(400, "the body must be JSON: send 'Content-Type: application/json'")
        coding = self.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(400, f"'Content-Encoding: {coding:.40}' is not supported: send the body without compression")
        try:
            body = await self.body()
        except ClientDisconnect:
            raise ApiError(400, "the body is incomplete") from None
        self._value = read_json(body) if body else None

    async def json(self) -> Any:
        return self._value


def read_json(body: bytes, what: str = "the body") -> Any:
    """Parse a body or another JSON text.

    Args:
        what: its name in messages.
    Raises:
        ApiError: 400; the message has the mistake and its place.
    """

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return _object(pairs, what)

    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=of_pairs)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{what} is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"{what} is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ApiError(400, _too_deep(what)) from None
    except ValueError:  # an integer of thousands of digits
        raise ApiError(400, f"{what} has a number with too many digits") from None
    if _SUSPECT.search(text) or text.count("[") + text.count("{") > _DEEPEST:
        _check(value, what)
    return value


def _too_deep(what: str) -> str:
    return f"{what} is nested to more than {_DEEPEST} levels"


def _object(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"{what} has '{twice:.60}' twice in one object: keep one", param=twice)
    return found


def _check(body: Any, what: str) -> None:
    """Refuse values that JSON cannot represent, and report their place."""
    waiting: list[tuple[str, int, Any]] = [("", 0, body)]
    while waiting:
        place, depth, value = waiting.pop()
        if depth > _DEEPEST:
            raise ApiError(400, _too_deep(what))
        if isinstance(value, dict):
            for name, each in value.items():
                _check_text(name, place, what)
                waiting.append((f"{place}.{name}" if place else name, depth + 1, each))
        elif isinstance(value, list):
            waiting += [
                (f"{place}.{index}" if place else str(index), depth + 1, each) for index, each in enumerate(value)
            ]
        elif isinstance(value, str):
            _check_text(value, place, what)
        elif isinstance(value, float) and not math.isfinite(value):
            message = f"{place or what} is {value}: JSON has finite numbers only"
            raise ApiError(400, message, param=place or None)


def _check_text(text: str, place: str, what: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        message = f"{place or what} has a lone surrogate, which is not valid Unicode"
        raise ApiError(400, message, param=place or None)
