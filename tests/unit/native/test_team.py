"""Teams of native threads: one each for what overlaps, none lost in a fork, none left."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from foretoken.core.threads import usable_cores
from foretoken.models.load import use_threads
from foretoken.native import build
from foretoken.native.team import Team, current, torch_on_one_thread
from helpers import warm
from helpers.golden import Session
from helpers.zoo_llms import target

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

TOKENS = [5, 9, 14, 23, 41, 7, 88, 3, 120, 77, 15, 16, 99]


def logits(tokens: list[int] = TOKENS) -> torch.Tensor:
    session = Session(target())
    return session.chunk(session.cache.acquire(), tokens)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_team_has_the_threads_that_it_was_given() -> None:
    expected = logits()
    for threads in (1, 2, 3):
        with Team(threads) as team:
            assert current() is team
            assert team.threads == threads
            assert torch.equal(logits(), expected)
        assert current() is not team
        team.close()


def test_a_team_keeps_its_threads_while_torch_has_one() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threads = current().threads
        with torch_on_one_thread():
            assert torch.get_num_threads() == 1
            assert current().threads == threads
        assert (torch.get_num_threads(), current().threads) == (3, threads)
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_cores_compute_on_as_many_as_there_are(monkeypatch, caplog) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("foretoken.core.threads._QUOTA", Path("/nowhere"))
    monkeypatch.setattr("foretoken.native.team._cores", usable_cores)
    try:
        torch.set_num_threads(16)
        assert Team().threads == 2
        assert Team(3).threads == 3  # by its maker's own count
        use_threads(16)
        assert torch.get_num_threads() == 2
        assert "threads=16: this process may use 2 cores" in caplog.text
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_closed_team_ends_its_threads() -> None:
    logits()
    before = num_threads()
    team = Team(4)
    with team:
        logits()
    assert num_threads() == before + 3
    team.close()
    assert num_threads() == before
    with pytest.raises(RuntimeError, match="the team is closed"), team:
        logits()


def test_a_team_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        Team(0)


def test_python_threads_with_caches_of_their_own_share_a_decoder() -> None:
    """On the shared team and on teams of their own; every cache keeps its own rows."""
    texts = [[5 + worker, *TOKENS] for worker in range(4)]
    expected = [logits(each) for each in texts]
    wrong: list[int] = []

    def work(worker: int, own: bool) -> None:
        team = Team(1 + worker % 2)
        for _ in range(20):
            if own:
                with team:
                    found = logits(texts[worker])
            else:
                found = logits(texts[worker])
            if not torch.equal(found, expected[worker]):
                wrong.append(worker)

    for own in (False, True):
        workers = [threading.Thread(target=work, args=(each, own)) for each in range(4)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
    assert not wrong


FORK = """
    import os, threading
    import torch
    torch.set_num_threads(2)
    from foretoken.forward.batch import PackedBatch
    from foretoken.models.load import load
    from foretoken.forward.dense import DensePlan

    model = load("zoo:draft", dtype="float32")

    def forward():
        cache = model.new_cache(1)
        batch = PackedBatch()
        batch.add_chunk(cache.acquire(), 0, [5, 6, 7], wanted=1)
        return model.forward(batch, DensePlan(cache, batch)).best[0]

    expected = forward()
    done = threading.Event()

    def work():
        while not done.is_set():
            forward()

    worker = threading.Thread(target=work)
    for busy in (False, True):
        if busy:
            worker.start()
        for _ in range(12 if busy else 3):
            child = os.fork()
            if not child:
                os._exit(0 if forward() == expected else 1)
            _, status = os.waitpid(child, 0)
            assert status == 0, (busy, status)
        assert forward() == expected
    done.set()
    worker.join()
    print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_of_a_fork_computes() -> None:
    """The team's threads are not in the child, and its locks have no owner there; its parent is idle, then busy."""
    found = warm.run([sys.executable, "-c", textwrap.dedent(FORK)], timeout=120)
    assert (found.returncode, found.stdout.strip()) == (0, "fine"), found.stderr[-2000:]
