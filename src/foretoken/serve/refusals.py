"""Refusals as responses, in the form of the API that the path belongs to: OpenAI's, Anthropic's or Ollama's."""

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from foretoken.serve.errors import ApiError, invalid
from foretoken.serve.messages import error_body
from foretoken.serve.ollama import MANAGEMENT
from foretoken.serve.service import new_id

_OVERLOADED = 529  # Anthropic's status of a server that cannot answer now
_KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models")
_OF_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Problem(BaseModel):
    """The reason of a refusal, and the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of a refusal."""

    error: Problem


def refusal(error: ApiError, path: str) -> Response:
    """Return an error in the form of the API that the path belongs to."""
    if path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, error.status, headers=error.headers)
    if not path.startswith("/v1/messages"):
        return error.response()
    request_id = new_id("req_")
    status = _OVERLOADED if error.status == 503 else error.status
    return JSONResponse(error_body(error, request_id), status, headers={**error.headers, "request-id": request_id})


async def on_error(request: Request, error: Exception) -> Response:
    """Convert what a path raised; an error of no known kind is a bug of the server."""
    path = request.url.path
    if isinstance(error, RequestValidationError):
        error = invalid(error.errors())
    elif isinstance(error, HTTPException):
        error = _with_remedy(error, request.method, path)
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"internal: {type(error).__name__}: {error}")
    return refusal(error, path)


def _with_remedy(error: HTTPException, method: str, path: str) -> ApiError:
    if path.startswith("/api/") and path.split("/")[2] in MANAGEMENT:
        return ApiError(501, f"{path}: the models are those of the server's command line: see --models")
    nearest = next((known for known in _KNOWN if path.rstrip("/").endswith(known.removeprefix("/v1"))), None)
    remedy = "" if nearest in (None, path) else f": use {nearest}; the base URL ends in /v1"
    if path in _OF_ADAPTERS:
        remedy = " unless the server is started with --allow-adapter-updates"
    words = {404: f"there is no {path}{remedy}", 405: f"{method} is not allowed for {path}"}
    return ApiError(error.status_code, words.get(error.status_code, str(error.detail)), headers=error.headers)
