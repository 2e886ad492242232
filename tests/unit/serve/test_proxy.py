"""In front of replicas that die: an unanswered request is sent again, a broken answer ends with an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.serve import chat, proxy
from foretoken.serve.proxy import AskAgain
from foretoken.serve.stream import Chunks, event

CHAT = "/v1/chat/completions"


def start(kind: str, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def part(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Replicas:
    """Stand after the proxy, one after the other: each reads the body and sends its messages; none: it has died."""

    def __init__(self, *answers: Sequence[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(body)
        for message in self.answers.pop(0):
            await send(dict(message))


def asked(replicas: Replicas, path: str = CHAT, *, leaves: bool = False) -> tuple[dict[str, Any] | None, bytes]:
    """Head and body of what a client gets."""
    given = [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"c"}]
    if leaves:
        given[1] = {"type": "http.disconnect"}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return given.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(AskAgain(replicas)({"type": "http", "path": path}, receive, send))
    if not sent:
        return None, b""
    assert [each["type"] for each in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    assert [each["more_body"] for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0], b"".join(each["body"] for each in sent[1:])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_PAUSE", 0.0)


JSON, STREAM = start("application/json"), start("text/event-stream; charset=utf-8")


def test_an_unanswered_request_is_sent_again_as_a_whole() -> None:
    replicas = Replicas([], [JSON], [JSON, part(b"{}")])  # the second dies between head and body
    assert asked(replicas) == (JSON, b"{}")
    assert replicas.bodies == [b"abc"] * 3


def test_a_stream_that_was_only_opened_is_requested_again() -> None:
    opening = part(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n', more=True)
    words = [part(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', more=True), part(b"")]
    replicas = Replicas([STREAM, opening], [STREAM, opening, *words])
    head, body = asked(replicas)
    assert head == STREAM
    assert body == opening["body"] + words[0]["body"]
    created = part(b"event: response.created\ndata: {}\n\n", more=True)
    assert asked(Replicas([STREAM, created], [JSON, part(b"{}")]), "/v1/responses") == (JSON, b"{}")


def test_what_opens_a_stream_is_known() -> None:
    """As the application writes it."""
    pieces = (
        Chunks({}, usage=False)([chat._piece(0, {"role": "assistant", "content": ""})]),
        event({}, "response.created"),
    )
    for piece in pieces:
        assert any(each in piece for each in proxy._OPENING)


def test_without_replicas_the_proxy_refuses() -> None:
    head, body = asked(Replicas([], [], [], []))
    assert head is not None
    assert head["status"] == 503
    assert dict(head["headers"])[b"retry-after"] == b"1"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_stream_that_breaks_off_ends_with_an_error(path: str) -> None:
    replicas = Replicas([STREAM, part(b'data: {"a": 1}\n\n', more=True)], [JSON, part(b"{}")])
    head, body = asked(replicas, path)
    assert head == STREAM
    assert len(replicas.bodies) == 1  # what a client has seen is not written twice
    first, last = body.decode().strip().split("\n\n")
    assert first == 'data: {"a": 1}'
    told = json.loads(last.split("data: ")[1])
    if path == CHAT:
        assert "in the middle" in told["error"]["message"]
    else:
        assert last.startswith("event: error\n")
        assert (told["type"], told["param"]) == ("error", None)


@pytest.mark.parametrize(("path", "status"), [("/v1/messages", 529), ("/api/chat", 503)])
def test_a_refusal_has_the_form_of_its_api(path: str, status: int) -> None:
    head, body = asked(Replicas([], [], [], []), path)
    assert head is not None
    assert head["status"] == status
    error = json.loads(body)["error"]
    assert "no other could answer" in (error if path == "/api/chat" else error["message"])


def test_a_broken_stream_of_messages_ends_with_an_error_event() -> None:
    _, body = asked(Replicas([STREAM, part(b"event: ping\ndata: {}\n\n", more=True)]), "/v1/messages")
    last = body.decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    said = json.loads(last.split("data: ")[1])
    assert (said["type"], said["error"]["type"]) == ("error", "overloaded_error")


def test_broken_lines_end_with_an_error() -> None:
    lines = start("application/x-ndjson")
    _, body = asked(Replicas([lines, part(b'{"done": false}\n', more=True)]), "/api/chat")
    assert "in the middle" in json.loads(body.decode().splitlines()[-1])["error"]


def test_errors_of_rays_own_have_our_form() -> None:
    head, body = asked(Replicas([start("text/plain", 503), part(b"too many", more=True), part(b" requests")]))
    assert head is not None
    assert (head["status"], dict(head["headers"])[b"content-type"]) == (503, b"application/json")
    assert json.loads(body)["error"]["message"] == "too many requests"


def test_no_application_is_one_that_goes() -> None:
    """It is at every path, so that Ray's own 404 says that it is not there any more."""
    head, body = asked(Replicas([start("text/plain", 404), part(b"Path '/v1/models' not found.")]))
    assert head is not None
    assert head["status"] == 503
    assert dict(head["headers"])[b"retry-after"] == b"1"
    assert "shutting down" in json.loads(body)["error"]["message"]


def test_errors_of_a_replica_are_left_as_they_are() -> None:
    refused = start("application/json", 500)
    assert asked(Replicas([refused, part(b'{"error": 1}')])) == (refused, b'{"error": 1}')


def test_nothing_is_sent_again_for_a_client_that_left() -> None:
    replicas = Replicas([], [JSON, part(b"{}")])
    assert asked(replicas, leaves=True) == (None, b"")
    assert replicas.bodies == []


def test_a_body_too_long_to_be_kept_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_MOST", 2)
    replicas = Replicas([], [JSON, part(b"{}")])
    head, _ = asked(replicas)
    assert head is not None
    assert head["status"] == 503
    assert replicas.bodies == [b"abc"]
