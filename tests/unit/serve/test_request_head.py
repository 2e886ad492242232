"""Bounds on the request line, the header fields and the time they take, under both of uvicorn's parsers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from foretoken.serve import guard, request_head
from helpers.serving import NAME, Served, served
from helpers.zoo_llms import with_config

KEY = b"Authorization: Bearer secret\r\n"
GOOD = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n"


@pytest.fixture(scope="module", params=["httptools", "h11"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(with_config({"method": "suffix"}), api_key="secret", http=request.param) as running:
        yield running


def answer(server: Served, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces until the server closes; return its answer, although it may stop reading before the end."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as line:
        for piece in pieces:
            try:
                line.sendall(piece)
            except OSError:
                break
            time.sleep(pause)
        found = b""
        while piece := line.recv(65536):
            found += piece
    return found


def fields(count: int, size: int = 10) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (index, b"a" * size) for index in range(count))


def head(more: bytes = b"", *, target: bytes = b"/v1/models", end: bytes = b"\r\n") -> bytes:
    """A request without a key: these refusals come before the check of the key."""
    return b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n" + more + end


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(fields(request_head.MAX_FIELDS)), 431),
        (head(fields(100_000)), 431),
        (head(fields(20, 2**12)), 431),
        (head(b"x: " + b"a" * request_head.MAX_BYTES + b"\r\n"), 431),
        (head(b"x: " + b"a" * 20_000_000 + b"\r\n"), 431),
        (head(b"x: " + b"a" * 200_000, end=b""), 431),
        (head(b"a" * 200_000, end=b""), 431),
        (head(target=b"/v1/models?" + b"a" * request_head.MAX_TARGET), 414),
        (b"GET /" + b"a" * 20_000_000, 414),
    ],
    ids=[
        "101-fields",
        "100000-fields",
        "20-long-fields",
        "one-long-field",
        "20-MB",
        "a-value-without-an-end",
        "a-name-without-an-end",
        "long-query",
        "a-line-without-an-end",
    ],
)
def test_a_head_is_bounded_before_the_key_is_checked(server: Served, sent: bytes, status: int) -> None:
    began = time.process_time()
    found = answer(server, sent.replace(b"Host: a", b"Host: a\r\nConnection: close"))
    assert int(found.split(b" ")[1]) == status
    assert json.loads(found.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
    assert time.process_time() - began < 1


def test_a_head_within_the_bounds_is_read(server: Served) -> None:
    most = fields(request_head.MAX_FIELDS - 3, 600) + KEY + b"Connection: close\r\n"
    assert answer(server, head(most)).startswith(b"HTTP/1.1 200 ")
    query = b"/v1/models?" + b"a" * (request_head.MAX_TARGET - 100)
    assert answer(server, head(KEY + b"Connection: close\r\n", target=query)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("together", [True, False])
def test_a_later_request_of_a_connection_is_bounded_too(server: Served, together: bool) -> None:
    """Earlier requests are answered."""
    for bad in (head(fields(101), end=b"Connection: close\r\n\r\n"), head(b"x: " + b"a" * 200_000, end=b"")):
        pieces = [GOOD + GOOD + bad] if together else [GOOD, GOOD, bad]
        found = answer(server, *pieces, pause=0.0 if together else 0.2)
        assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"431"]


def test_bytes_after_a_body_are_bounded(server: Served) -> None:
    """Trailers are header fields, too."""
    body = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 1}).encode()
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + KEY
    begun += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)
    whole = answer(server, begun + b"0\r\n\r\n" + GOOD.replace(b"Host", b"Connection: close\r\nHost"))
    assert whole.count(b"HTTP/1.1 200 ") == 2
    for trailer in (b"0\r\nx: " + b"a" * 1_000_000, b"0\r\n" + fields(10_000), b"1;" + b"a" * 1_000_000):
        found = answer(server, begun + trailer)
        assert found[9:12] in (b"431", b"400"), found[:100]
        assert found.count(b"HTTP/1.1") == 1


def test_a_slow_sender_of_a_head_is_cut_off(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_head, "SECONDS", 0.4)
    began = time.monotonic()
    slow = [head(fields(3))[place : place + 1] for place in range(40)]
    assert answer(server, *slow, pause=0.02)[9:12] == b"408"
    assert answer(server, GOOD, *slow, pause=0.02).split(b"HTTP/1.1 ")[2][:3] == b"408"
    assert answer(server) == b""  # nothing is sent at all
    assert time.monotonic() - began < 12


def test_a_slow_sender_of_a_body_is_cut_off(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.5)
    monkeypatch.setattr(request_head, "SECONDS", 0.5)
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n"
    slow = [b"{"] + [b" "] * 60
    assert answer(server, begun + KEY + b"\r\n", *slow, pause=0.02)[9:12] == b"408"
    refused = time.monotonic()
    assert answer(server, begun + b"\r\n", *slow, pause=0.02)[9:12] == b"401"  # and the rest is not waited for
    assert time.monotonic() - refused < 8


def test_a_long_answer_is_not_cut_off(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_head, "SECONDS", 0.2)
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.2)
    body = {"model": NAME, "prompt": "Hi", "max_tokens": 300, "ignore_eos": True}
    status, found, _ = server.send("/v1/completions", body, headers={"Authorization": "Bearer secret"})
    assert (status, found["usage"]["completion_tokens"]) == (200, 300)


def test_a_reader_that_takes_nothing_is_not_waited_for(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of its answers is lost; one that goes on reading gets all of them."""
    count, ask = 2000, b"GET / HTTP/1.1\r\nHost: a\r\n"
    size = len(answer(server, ask + b"Connection: close\r\n\r\n")) - len(b"connection: close\r\n")
    monkeypatch.setattr(request_head, "STALL_SECONDS", 0.5)

    def received(pause: float) -> int:
        found = 0
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as line:
            threading.Thread(target=send_all, args=(line, (ask + b"\r\n") * count), daemon=True).start()
            time.sleep(pause)
            with contextlib.suppress(ConnectionResetError):
                while found < count * size and (piece := line.recv(2**20)):
                    found += len(piece)
        return found

    assert received(0.0) == count * size
    assert received(3.0) < count * size


def send_all(line: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        line.sendall(data)
