"""What is said where Ray's own part fails; a stand-in is Ray. With Ray: tests/e2e/test_serve_ray.py."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.serve import cluster


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (None, "Ray does not start on this machine: the node timed out"),
        ("10.0.0.1:6379", "Ray's cluster at RAY_ADDRESS=10.0.0.1:6379 does not answer: the node timed out"),
    ],
)
def test_a_cluster_that_does_not_come_up_is_an_error_and_no_bug(
    monkeypatch: pytest.MonkeyPatch, address: str | None, told: str
) -> None:
    def init(**options: Any) -> None:
        raise Exception("the node timed out")  # as bare as Ray's

    ray = ModuleType("ray")
    ray.__dict__.update(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ForetokenError, match=told):
        cluster.begin(verbose=True)


@pytest.mark.parametrize(("seconds", "told"), [(0.0, [cluster._LOOK, cluster._TELLING]), (60.0, [cluster._LOOK])])
def test_the_proxies_outlive_replicas_that_were_killed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, told: list[float]
) -> None:
    """They have to tell whose answers were cut off; where everything had ended in time nobody waits for that."""
    looks = iter([{cluster._APPLICATION}, set[str]()])
    serve = SimpleNamespace(
        delete=lambda name, _blocking: None, status=lambda: SimpleNamespace(applications=next(looks))
    )
    ray = ModuleType("ray")
    ray.__dict__["serve"] = serve
    monkeypatch.setitem(sys.modules, "ray", ray)
    waited: list[float] = []
    over = threading.Event()
    monkeypatch.setattr(over, "wait", waited.append)
    cluster._drain(seconds, over)
    assert waited == told
