"""Messages over gloo arrive in order and from the peer alone, and a peer that has gone is noticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from foretoken.drafting import gloo
from foretoken.drafting.gloo import GlooChannel

pytestmark = pytest.mark.skipif(not gloo.available(), reason="this build of torch has no gloo")
KEY = bytes(range(32))


def echo(path: str, key: bytes) -> None:
    """The other end: everything comes back, until nothing more comes."""
    channel = GlooChannel(1, path, key)
    try:
        while True:
            channel.send_bytes(channel.recv_bytes())
    except (EOFError, BrokenPipeError):
        os._exit(0)


@pytest.fixture
def peer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[GlooChannel, BaseProcess]]:
    theirs = getattr(request, "param", KEY)
    process = multiprocessing.get_context("fork").Process(target=echo, args=(str(tmp_path / "met"), theirs))
    process.start()
    channel = GlooChannel(0, str(tmp_path / "met"), KEY)
    assert channel.connected(30.0)
    yield channel, process
    process.kill()
    process.join()
    channel.join(5.0)


def test_messages_of_any_size_arrive_in_order(peer: tuple[GlooChannel, BaseProcess]) -> None:
    channel, _ = peer
    assert not channel.poll()
    sent = [bytes([size % 251]) * size for size in (1, 39, 40, 41, 5000, 3_000_000)]
    for payload in sent[:5]:  # several on their way at once
        channel.send_bytes(payload)
    assert [channel.recv_bytes() for _ in range(5)] == sent[:5]
    channel.send_bytes(sent[5])
    assert channel.poll(30.0)
    assert channel.recv_bytes() == sent[5]
    assert not channel.poll(0.01)


@pytest.mark.parametrize("peer", [bytes(32)], indirect=True, ids=["another key"])
def test_a_foreign_message_ends_the_connection(peer: tuple[GlooChannel, BaseProcess]) -> None:
    """Without the key: it is never handed out, and so never unpickled."""
    channel, _ = peer
    channel.send_bytes(b"to whom it may concern")
    assert channel.poll(30.0)
    with pytest.raises(EOFError):
        channel.recv_bytes()


def test_a_peer_that_is_killed_is_noticed(peer: tuple[GlooChannel, BaseProcess]) -> None:
    channel, process = peer
    process.kill()
    began = time.monotonic()
    assert channel.poll(30.0)
    with pytest.raises(EOFError):
        channel.recv_bytes()
    with pytest.raises(BrokenPipeError):
        channel.send_bytes(b"hello?")
    assert time.monotonic() - began < 10.0


def test_a_hanging_peer_does_not_block(peer: tuple[GlooChannel, BaseProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no more: gloo sends nothing without a receiver, and the message is given up."""
    monkeypatch.setattr(gloo, "_SENDING", gloo._SENDING / 10)
    channel, process = peer
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError, match="Timed out"):
        channel.send_bytes(bytes(50_000_000))
    assert time.monotonic() - began < 10.0


def test_waiting_ends_when_no_peer_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_CONNECTING", gloo._CONNECTING / 100)
    channel = GlooChannel(0, str(tmp_path / "met"), KEY)
    assert not channel.connected(0.05)
    with pytest.raises(BrokenPipeError, match="is not there"):
        channel.send_bytes(b"hello?")
    channel.join(10.0)
