"""Errors in the form of OpenAI's API: ``{"error": {message, type, param, code}}`` and a status.

400 invalid request          401 missing or wrong key    404 unknown model or path   405 method not allowed
408 sent too slowly             413 too large            414 the path is too long     429 the queue is full
431 too many header fields      500 the request failed   503 shutting down, or dead
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from foretoken.core.errors import ConfigError, InputError
from foretoken.serve import responses_schema, schema
from foretoken.serve.loop import Overloaded, Stopped

_NAMED = re.compile(r"^(?:unknown sampling parameter ')?([a-z_]+)(?:=|\[| has | with |'|\.)")
_KINDS = (vars(schema) | vars(responses_schema)).items()
_ADDED = {"body", "str", "int", *(name for name, each in _KINDS if isinstance(each, type))}
_INPUTS = {  # the field that holds the prompt -> its path
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}
_TYPES = dict.fromkeys((400, 405, 408, 413, 414, 431), "invalid_request_error")
_TYPES |= {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: the HTTP status.
        message: the field, the value and the remedy.
        param: the field, if one field causes it.
        code: a machine-readable reason.
        headers: additional headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        # a lone surrogate from the request cannot be encoded
        message, param = (
            each and each.encode("utf-8", "backslashreplace").decode() for each in (str(self), self.param)
        )
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> Response:
        """Return the whole HTTP response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """Convert an error of the engine for the client.

    Args:
        param: the field that was being read; None: the field at the beginning of the message.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error) or type(error).__name__
    if isinstance(error, Overloaded):
        return ApiError(429, message, code="overloaded", headers={"Retry-After": str(math.ceil(error.retry_after))})
    if isinstance(error, Stopped):
        return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, (ConfigError, InputError)):
        named = _NAMED.match(message)
        code = "context_length_exceeded" if "maximum context length" in message else None
        return ApiError(400, message, param=param or (named[1] if named else None), code=code)
    return ApiError(500, message)


def invalid(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """Describe the first mistake in a body.

    Args:
        found: pydantic's list of errors.
    """
    for each in found:  # a part of another kind has other fields, too
        if each["type"] == "item_type" or (each["type"] == "literal_error" and each["loc"][-1] == "type"):
            return ApiError(400, _in_words(found, each), param=_place(each["loc"]))
    for each in found:  # a misspelt field explains a missing one
        if each["type"] in ("unknown_field", "conflict"):
            name = ".".join(filter(None, (_place(each["loc"]), each["ctx"]["name"])))
            if each["type"] == "conflict":
                return ApiError(400, f"{name} {each['msg']}", param=name)
            return ApiError(400, f"unknown field '{name}'{each['msg']}", param=name, code="unknown_field")
    # for a field that accepts a text or a list, the mistake inside the list is more specific
    meant = [each for each in found if each["type"] != "string_type" or not isinstance(each.get("input"), list)]
    first = (meant or found)[0]
    return ApiError(400, _in_words(found, first), param=_place(first["loc"]) or None)


def _in_words(found: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> str:
    name = _place(first["loc"])
    # if a field accepts several types, each type reports its own requirement
    ways = dict.fromkeys(each["msg"][:1].lower() + each["msg"][1:] for each in found if _place(each["loc"]) == name)
    given = first.get("input")
    if first["type"] == "item_type" and isinstance(given, dict):
        given = given.get("type")
    shown = "" if first["type"] == "missing" or isinstance(given, (dict, list)) else f" (got {given!r:.60})"
    remedy = ""
    if first["type"] == "missing" and name in _INPUTS and isinstance(given, dict):
        remedy = next((f"; {path} takes '{field}'" for field, path in _INPUTS.items() if field in given), "")
    return f"{name or 'the body'}: {', or '.join(ways)}{shown}{remedy}"


def _place(location: Sequence[int | str]) -> str:
    """Return the path to a field, without the names of union types that pydantic adds."""
    parts = [str(each) for each in location if str(each) not in _ADDED and not set("[-") & set(str(each))]
    return ".".join(each for place, each in enumerate(parts) if not _is_tag(parts, place))


def _is_tag(parts: Sequence[str], place: int) -> bool:
    before = list(parts[:place][-2:])
    return before[-1:] in (["response_format"], ["format"]) or (
        before[:-1] in (["input"], ["tools"]) and before[-1].isdigit()
    )
