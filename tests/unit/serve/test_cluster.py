"""Messages where Ray's own part fails, with a stand-in for Ray. With Ray: tests/e2e/test_serve_ray.py."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.serve import cluster
from foretoken.serve.model_pool import ModelSettings
from foretoken.serve.service import Limits
from helpers.tiny_models import save_model

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
VARIABLES = ("RAY_ADDRESS", LOOPBACK, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of Ray's as they are before the command; its changes are undone after a test."""
    for name in (*VARIABLES, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, version: str = "2.60.0", node: str = "127.0.0.1") -> list[Any]:
    """Ray, which only records its calls."""
    calls: list[Any] = []

    def init(**options: Any) -> None:
        calls.append((options["address"], {name: os.environ[name] for name in VARIABLES if name in os.environ}))

    ray = ModuleType("ray")
    ray.__dict__.update(is_initialized=lambda: False, init=init, __version__=version)
    ray.__dict__.update(util=SimpleNamespace(get_node_ip_address=lambda: node), shutdown=lambda: calls.append("ended"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    return calls


@pytest.mark.parametrize("address", [None, "", "local"])
def test_a_cluster_begun_here_is_closed_to_others(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    calls = stand_in(monkeypatch)
    cluster.begin(verbose=True)
    ((where, told),) = calls
    assert where == "local"  # and none that runs on this machine already
    assert told[LOOPBACK] == "0"
    assert told["RAY_AUTH_MODE"] == "token"
    assert len(told["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    cluster.begin(verbose=True)
    assert calls[1][1]["RAY_AUTH_TOKEN"] != told["RAY_AUTH_TOKEN"]


def test_a_token_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/etc/token")
    calls = stand_in(monkeypatch)
    cluster.begin(verbose=True)
    assert "RAY_AUTH_TOKEN" not in calls[0][1]


def test_a_given_cluster_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    calls = stand_in(monkeypatch, version="2.40.0", node="10.0.0.2")
    cluster.begin(verbose=True)
    assert calls == [("10.0.0.1:6379", {"RAY_ADDRESS": "10.0.0.1:6379"})]


def test_a_cluster_that_would_be_open_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, node="192.0.2.2")
    with pytest.raises(ForetokenError, match=r"Ray listens at 192\.0\.2\.2"):
        cluster.begin(verbose=True)
    assert calls[-1] == "ended"
    stand_in(monkeypatch, version="2.51.3")
    with pytest.raises(ConfigError, match=r"Ray 2\.51\.3 cannot require a token"):
        cluster.begin(verbose=True)


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
    ray.__dict__.update(is_initialized=lambda: False, init=init, __version__="2.60.0")
    monkeypatch.setitem(sys.modules, "ray", ray)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ForetokenError, match=told):
        cluster.begin(verbose=True)


@pytest.mark.parametrize(("seconds", "told"), [(0.0, [cluster._LOOK, cluster._TELLING]), (60.0, [cluster._LOOK])])
def test_the_proxies_outlive_replicas_that_were_killed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, told: list[float]
) -> None:
    """Replicas report cut answers; if everything ended in time, the server does not wait for that."""
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


def test_a_replica_with_a_model_that_sleeps_is_sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray replaces a replica that fails its check, and the requests that it computes are lost."""
    stand_in(monkeypatch)
    metrics = ModuleType("ray.serve.metrics")
    quiet = SimpleNamespace(inc=lambda *given: None, set=lambda *given: None)
    metrics.__dict__.update(Counter=lambda *given, **more: quiet, Gauge=lambda *given, **more: quiet)
    monkeypatch.setitem(sys.modules, "ray.serve", ModuleType("ray.serve"))
    monkeypatch.setitem(sys.modules, "ray.serve.metrics", metrics)
    monkeypatch.setattr(cluster, "_keep_to_loopback", lambda: None)
    model = ModelSettings(model=str(save_model("llama", tmp_path)), config={"method": "none"}, names=("a",))
    settings = cluster.Replicas(least=1, most=1, threads=torch.get_num_threads(), model=model, limits=Limits())
    replica = cluster.Replica(settings)
    pool = replica._pool
    try:
        replica.check_health()
        asyncio.run(pool.unload(pool.models[0]))
        assert pool.models[0].state == "sleeping"
        replica.check_health()
        pool.begin(pool.models[0])
        loop = pool.models[0].loop
        assert loop is not None
        loop.failure = ValueError("planted")
        with pytest.raises(RuntimeError, match="the engine has died: planted"):
            replica.check_health()
    finally:
        pool.close()
        pool.release()
