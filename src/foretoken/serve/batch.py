"""Offline batches of requests in OpenAI's batch format: one answer per line, safe against interruption.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

Answers are appended in the order of completion; the same command resumes with the requests that have no answer or an
error.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.engine.llm import LLM
from foretoken.serve.body import read_json
from foretoken.serve.chat import Chat
from foretoken.serve.completions import Completion
from foretoken.serve.errors import ApiError, api_error, invalid
from foretoken.serve.loop import EngineLoop
from foretoken.serve.responses import Response
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import ChatRequest, CompletionRequest, Ignored
from foretoken.serve.service import Service, new_id

_WAYS: dict[str, tuple[type[Ignored], type[Any]]] = {
    "/v1/chat/completions": (ChatRequest, Chat),
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/responses": (ResponsesRequest, Response),
}
_BEGINS = b'{"id": "batch_req'  # of an answer
_BLOCK = 32  # requests in a block for one of Ray's workers


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read(path: Path) -> list[Line]:
    """Read the requests of a file.

    Raises:
        InputError: a line is not a request, or repeats a ``custom_id``; the message names the line.
    """
    found: dict[str, Line] = {}
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _line(raw, f"{path}, line {number}")
        if line.custom_id in found:
            raise InputError(f"{path}, line {number}: the custom_id '{line.custom_id}' is used twice")
        found[line.custom_id] = line
    if not found:
        raise InputError(f"{path} has no requests")
    return list(found.values())


def _line(raw: bytes, place: str) -> Line:
    try:
        value = read_json(raw, place)
    except ApiError as error:
        said = str(error)
        raise InputError(said if said.startswith(place) else f"{place}: {said}") from None
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        raise InputError(f"{place}: the line must be an object with a string 'custom_id'")
    if value.get("method", "POST") != "POST" or value.get("url") not in _WAYS:
        raise InputError(f"{place}: 'url' must be one of {', '.join(_WAYS)}, 'method' POST")
    if not isinstance(value.get("body"), dict):
        raise InputError(f"{place}: 'body' must be an object, the request")
    return Line(value["custom_id"], value["url"], value["body"])


def answered(path: Path) -> dict[str, bool]:
    """Return the requests in a file of answers: True with an answer, False with an error.

    An incomplete last answer is removed.

    Raises:
        InputError: the file is not a file of answers.
    """
    if not path.is_file():  # a pipe or a device has no earlier answers
        return {}
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    found: dict[str, bool] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            answer = json.loads(line)
            custom_id, fine = answer["custom_id"], _is_fine(answer)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}, line {number} is not an answer of a batch: give another --out") from None
        found[custom_id] = fine or found.get(custom_id, False)
    torn = raw[len(whole) :]
    if torn[: len(_BEGINS)] != _BEGINS[: len(torn)]:
        raise InputError(f"the end of {path} is not an answer of a batch: give another --out")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return found


def forget_errors(path: Path) -> None:
    """Remove the errors from a file of answers, so that their requests run again."""
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if _is_fine(json.loads(line))]
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_bytes(b"".join(kept))
    os.replace(beside, path)


def _is_fine(answer: dict[str, Any]) -> bool:
    return bool(answer["response"]["status_code"] == 200)


class Answering:
    """Answers requests with one model.

    Args:
        llm: the model.
        name: the model's name in the requests.
    """

    def __init__(self, llm: LLM, name: str) -> None:
        self._loop = EngineLoop(llm, max_queue=2**30).start()
        self._service = Service(self._loop, name)
        self._most = 2 * llm.max_num_seqs  # concurrent requests: enough that no slot is ever empty

    async def answers(self, lines: Sequence[Line]) -> AsyncIterator[dict[str, Any]]:
        """Yield one answer for each request, in the order of completion.

        Raises:
            ForetokenError: the engine has died.
        """
        waiting = iter(lines)
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while True:
                for line in waiting:
                    running.add(asyncio.ensure_future(self._answer(line)))
                    if len(running) >= self._most:
                        break
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if self._loop.failure is not None:  # the answers would report it, and stay in the file as final
                    raise ForetokenError(f"the engine has died: {self._loop.failure}")
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    def close(self) -> None:
        """End the engine's thread and the executor's processes."""
        self._loop.close()
        self._loop.llm.close()

    async def _answer(self, line: Line) -> dict[str, Any]:
        schema, way = _WAYS[line.url]
        try:
            body = schema.model_validate(line.body)
            if getattr(body, "stream", None):
                raise ApiError(400, "stream=true is not supported in a batch: leave it out", param="stream")
            answer, status = await way(self._service, body).answer(), 200
        except ValidationError as error:
            error_response = invalid(error.errors())
            answer, status = error_response.body, error_response.status
        except (ApiError, ForetokenError) as error:
            error_response = api_error(error)
            answer, status = error_response.body, error_response.status
        response = {"status_code": status, "request_id": new_id("req_"), "body": answer}
        return {"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": response, "error": None}


def run(llm: LLM, name: str, lines: Sequence[Line], write: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests in this process; write each answer when it is complete."""
    answering = Answering(llm, name)

    async def work() -> None:
        async for answer in answering.answers(lines):
            write(answer)

    try:
        asyncio.run(work())
    finally:
        answering.close()


class Worker:
    """One of Ray's workers: answers blocks of requests with one model."""

    def __init__(self, model: str, config: dict[str, Any], name: str, options: dict[str, Any]) -> None:
        self._answering = Answering(LLM(model, speculative_config=config, **options), name)

    def __call__(self, block: dict[str, Any]) -> dict[str, list[str]]:
        lines = [Line(**json.loads(each)) for each in block["line"]]

        async def work() -> list[str]:
            return [json.dumps(each, ensure_ascii=False) async for each in self._answering.answers(lines)]

        return {"answer": asyncio.run(work())}


def run_on_ray(
    model: str,
    config: dict[str, Any],
    name: str,
    lines: Sequence[Line],
    *,
    workers: int,
    threads: int,
    options: dict[str, Any],
    verbose: bool,
) -> Iterator[dict[str, Any]]:
    """Answer requests with workers on a Ray cluster (at ``RAY_ADDRESS``, else a new one).

    A failed worker is replaced, and its whole block is answered again: none of its answers had been returned.

    Raises:
        ConfigError: Ray is not installed.
    """
    if not verbose:
        os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")  # Ray's loggers check these variables in each run
    from foretoken.serve.cluster import begin, close_own_cluster

    close_own_cluster()
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray ({error}): pip install 'foretoken[ray]'") from None
    begin(verbose=verbose)
    ray.data.DataContext.get_current().enable_progress_bars = verbose
    items = [{"line": json.dumps({"custom_id": e.custom_id, "url": e.url, "body": e.body})} for e in lines]
    size = min(_BLOCK, -(-len(items) // workers))
    # make the blocks here: a task would wait for a core that the workers hold
    blocks = ray.data.from_items(items, override_num_blocks=-(-len(items) // size))
    answers = blocks.map_batches(
        Worker,
        fn_constructor_args=(model, config, name, options),
        batch_size=None,
        concurrency=workers,
        num_cpus=threads,
    )
    try:
        for row in answers.iter_rows():
            yield json.loads(row["answer"])
    finally:
        ray.shutdown()
