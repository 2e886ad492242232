"""A stream of events and its reader: one that takes nothing is waited for as long as it has patience, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any

import pytest

from foretoken.serve.stream import EventStream

PATIENCE = 0.4


async def read(pauses: dict[int, float], *, count: int = 4) -> tuple[list[bytes], bool, float]:
    """Stream to a reader that takes piece ``n`` after ``pauses[n]`` seconds.

    Returns:
        The pieces that it got, whether the source was closed, and the seconds until the stream gave up or ended.
    """
    closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            for number in range(count):
                yield b"%d" % number
        finally:
            closed = True

    got: list[bytes] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the client stays
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(pauses.get(len(got), 0.0))
            got.append(message["body"])

    began = monotonic()
    stream = EventStream(events(), patience=PATIENCE)
    await asyncio.wait_for(stream({"type": "http"}, receive, send), 20)
    return got, closed, monotonic() - began


@pytest.mark.parametrize("stuck", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_reader_that_takes_nothing_is_waited_for_as_long_as_there_is_patience(stuck: int) -> None:
    got, closed, seconds = asyncio.run(read({stuck: 3600.0}))
    assert got == [b"%d" % number for number in range(stuck)]
    assert closed
    assert PATIENCE <= seconds < 10


def test_a_slow_reader_gets_everything() -> None:
    """Its pauses are shorter than the patience, and longer together."""
    got, closed, seconds = asyncio.run(read(dict.fromkeys(range(5), PATIENCE / 2)))
    assert got == [b"0", b"1", b"2", b"3", b""]
    assert closed
    assert seconds > PATIENCE
