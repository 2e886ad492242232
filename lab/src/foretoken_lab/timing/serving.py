"""Measuring a server from outside: any OpenAI endpoint, so many clients at a time, each with one request after another.

Time to the first token is from sending a request to the first piece with text; between tokens, from the first piece to
the last, over the tokens after the first. Tokens are counted by the server (``usage``). Rounds of all numbers of
clients and of all endpoints take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from foretoken.bench.fields import quantiles
from foretoken.bench.table import DASH, Cell, Sheet, milliseconds, number
from foretoken.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server.

    Attributes:
        label: in tables.
        url: up to and without ``/v1``.
        model: the model's name there.
        key: sent as a bearer token; None: nothing.
        extra: fields of every request next to the usual ones.
    """

    label: str
    url: str
    model: str
    key: str | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, in seconds from when it was sent; a failed one has its error."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str | None = None


def ask(endpoint: Endpoint, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy chat completion."""
    return _read(_receive(endpoint, prompt, max_tokens))


def _receive(endpoint: Endpoint, prompt: str, max_tokens: int) -> Answer | list[tuple[float, bytes]]:
    """The pieces of a stream and when each came; or what went wrong. Reading them is for later: it takes cores."""
    place = urlsplit(endpoint.url)
    kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
    connection = kind(place.hostname or "", place.port, timeout=600)
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(endpoint.extra or {}),
    }
    headers = {"content-type": "application/json"}
    if endpoint.key is not None:
        headers["authorization"] = f"Bearer {endpoint.key}"
    pieces: list[tuple[float, bytes]] = []
    began = perf_counter()
    try:
        connection.request("POST", f"{place.path.rstrip('/')}/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return Answer(error=f"{response.status}: {response.read(300).decode(errors='replace')}")
        while piece := response.read1():
            pieces.append((perf_counter() - began, piece))
    except (OSError, HTTPException) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    return pieces


def _lines(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The lines of a stream and when the last of each came; a piece may have several, or a part of one."""
    begun = b""
    for moment, piece in pieces:
        *whole, begun = (begun + piece).split(b"\n")
        yield from ((moment, line) for line in whole)


def _read(received: Answer | list[tuple[float, bytes]]) -> Answer:
    """What a stream says."""
    if isinstance(received, Answer):
        return received
    first = last = 0.0
    tokens = 0
    try:
        for moment, line in _lines(received):
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return Answer(error=str(chunk["error"])[:300])
            if chunk.get("usage"):
                tokens = int(chunk["usage"]["completion_tokens"])
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                last = moment
                first = first or last
    except (ValueError, KeyError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    if not tokens:
        return Answer(error="the server did not report the number of tokens (usage)")
    return Answer(first, last, tokens)


def load(endpoint: Endpoint, prompts: Sequence[str], clients: int, max_tokens: int) -> tuple[list[Answer], float]:
    """All prompts, by so many clients at a time; the answers and the seconds that it took."""
    waiting = list(enumerate(prompts))
    received: list[Answer | list[tuple[float, bytes]]] = [Answer(error="never sent")] * len(prompts)
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                place, prompt = waiting.pop(0)
            received[place] = _receive(endpoint, prompt, max_tokens)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = perf_counter() - began
    return [_read(each) for each in received], took


def measure(
    endpoints: Sequence[Endpoint],
    prompts: Sequence[str],
    clients: Sequence[int],
    *,
    max_tokens: int,
    repeats: int,
    advance: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """One JSON-ready object for each endpoint and number of clients.

    Args:
        advance: called after every round.
    Raises:
        ConfigError: an endpoint answers nothing.
    """
    for endpoint in endpoints:
        found = ask(endpoint, prompts[0], 2)
        if found.error is not None:
            raise ConfigError(f"{endpoint.url} does not answer for model '{endpoint.model}': {found.error}")
    rounds: dict[tuple[int, int], list[tuple[list[Answer], float]]] = {}
    for _ in range(repeats):
        for count in clients:
            for place, endpoint in enumerate(endpoints):
                rounds.setdefault((place, count), []).append(load(endpoint, prompts, count, max_tokens))
                if advance is not None:
                    advance()
    return [
        {"endpoint": endpoint.label, "url": endpoint.url, "model": endpoint.model, "clients": count}
        | _figures(rounds[place, count])
        for count in clients
        for place, endpoint in enumerate(endpoints)
    ]


def _figures(rounds: Sequence[tuple[list[Answer], float]]) -> dict[str, Any]:
    every = [answer for answers, _ in rounds for answer in answers]
    good = [answer for answer in every if answer.error is None]
    rates = sorted(sum(each.tokens for each in answers if each.error is None) / took for answers, took in rounds)
    firsts = [each.first for each in good]
    between = [(each.last - each.first) / (each.tokens - 1) for each in good if each.tokens > 1]
    return {
        "requests": len(every),
        "failed": len(every) - len(good),
        "first_error": next((each.error for each in every if each.error is not None), None),
        "tokens": sum(each.tokens for each in good),
        "tokens_per_second": median(rates),
        "spread": [rates[0], rates[-1]],
        "repeats": len(rounds),
        "first_token_seconds": quantiles(firsts),
        "between_tokens_seconds": quantiles(between),
    }


def sheet(results: Sequence[Mapping[str, Any]]) -> Sheet:
    """What :func:`measure` returned, as a table.

    Args:
        results: of any number of endpoints and clients.
    """
    rows = []
    for each in results:
        low, high = each["spread"]
        several = each["repeats"] > 1
        first, between = each["first_token_seconds"], each["between_tokens_seconds"]
        rows.append(
            (
                Cell(each["endpoint"]),
                Cell(str(each["clients"])),
                number(each["tokens_per_second"], "{:.0f}"),
                Cell(f"{low:.0f}–{high:.0f}" if several else DASH),
                *(milliseconds(found, name) for found in (first, between) for name in ("p50", "p99")),
                Cell(str(each["failed"]), bad=bool(each["failed"])),
            )
        )
    return Sheet(
        "servers",
        "Milliseconds. Between tokens: from an answer's first piece to its last, over the tokens after the first.",
        (
            "server",
            "clients",
            "tokens per second",
            "lowest to highest",
            "first token P50",
            "P99",
            "between tokens P50",
            "P99",
            "failed",
        ),
        rows,
        labels=2,
    )
