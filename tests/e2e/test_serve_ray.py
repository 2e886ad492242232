"""``foretoken serve --ray``: two replicas answer, one is killed, no process is left. Needs the extra 'ray'."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'foretoken[ray]'")
pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def ask(address: str, **more: Any) -> tuple[int, str]:
    """Status and text; of a stream its text, and the status of the error that it ends with, if it does."""
    body = {"model": "zoo:base", "prompt": "Once upon", "temperature": 0, "max_tokens": 100, "ignore_eos": True, **more}
    request = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=120) as response:
            if not more.get("stream"):
                return response.status, json.loads(response.read())["choices"][0]["text"]
            events = [line[6:] for line in response.read().decode().split("\n") if line.startswith("data: ")]
    except HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    if events[-1] != "[DONE]":
        return 503, json.loads(events[-1])["error"]["message"]
    return 200, "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


def replicas(server: psutil.Process) -> list[psutil.Process]:
    """Ray's processes that run a replica."""
    born = server.create_time()
    every = [each for each in psutil.process_iter(["cmdline"]) if each.create_time() >= born]
    return [each for each in every if any("ServeReplica" in word for word in each.info["cmdline"] or ())]


def start(*more: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A server with two replicas, and its address."""
    options = ["--ray", "--replicas", "2", "--threads", "1", "--dtype", "float32", "--port", "0"]
    options += ["--drain-seconds", "100", *more]  # long answers on a machine that has much else to do
    command = [sys.executable, "-m", "foretoken", "serve", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | environment)
    assert process.stderr is not None
    line = ""
    while "serving zoo:base with suffix, 2 replicas at " not in line:
        line = process.stderr.readline()
        assert line, "it ended"
    return process, line.split(" at ")[1].split(" ")[0]


def asked_while(address: str, happens: Callable[[], None]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The outcome of 16 requests and of 4 streams while something happens."""
    answers: list[tuple[int, str]] = []
    streams: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(address))) for _ in range(16)]
    threads += [threading.Thread(target=lambda: streams.append(ask(address, stream=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    happens()
    for thread in threads:
        thread.join(timeout=180)
    return answers, streams


def assert_told(answers: list[tuple[int, str]], streams: list[tuple[int, str]], expected: str) -> None:
    assert Counter(code for code, _ in answers) == {200: 16}  # no answer had begun: another replica took over
    assert {text for _, text in answers} == {expected}
    assert len(streams) == 4
    for code, text in streams:
        assert text == expected if code == 200 else "died in the middle" in text


def test_a_cluster_of_which_a_node_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own proxy is on the node that stays."""
    from ray.cluster_utils import Cluster

    callback = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "foretoken.serve.proxy:middlewares"}
    for name, value in callback.items():
        monkeypatch.setenv(name, value)  # of the nodes, which are begun here
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        process, address = start(RAY_ADDRESS=cluster.address, **callback)
        status, expected = ask(address)
        assert status == 200
        told = asked_while(address, lambda: cluster.remove_node(other, allow_graceful=False))
        assert_told(*told, expected)
        assert ask(address) == (200, expected)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0
        assert process.stderr is not None
        process.stderr.close()
    finally:
        cluster.shutdown()


def others_ports(server: psutil.Process) -> set[str]:
    """Addresses other than loopback at which processes begun since the server listen."""
    born = server.create_time()
    ours = {each.pid for each in psutil.process_iter() if each.create_time() >= born}
    open_ports = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.pid in ours]
    assert len(open_ports) > 5
    return {f"{at.laddr.ip}:{at.laddr.port}" for at in open_ports if not at.laddr.ip.endswith(("127.0.0.1", "::1"))}


def server_family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def joins(gcs: str, token: str) -> bool:
    """Whether a process with this token becomes a member of the cluster; Ray tries on and on with a wrong one."""
    command = [sys.executable, "-c", f"import ray; ray.init(address={gcs!r}); print('joined', ray.get(ray.put(1)))"]
    environment = ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # otherwise it looks for the node at another address
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return False
    return b"joined 1" in done.stdout


def test_the_cluster_is_closed_to_others() -> None:
    """Also where the server itself is public: only its own port is open, and Ray asks for a token."""
    process, address = start("--host", "0.0.0.0")
    try:
        port = address.rsplit(":", 1)[1]
        assert others_ports(psutil.Process(process.pid)) == {f"0.0.0.0:{port}"}
        assert ask(f"http://127.0.0.1:{port}")[0] == 200
        raylet = next(
            each
            for each in server_family(process.pid)
            if each.name() == "raylet" and any(word.startswith("--gcs-address=") for word in each.cmdline())
        )
        gcs = next(word for word in raylet.cmdline() if word.startswith("--gcs-address=")).partition("=")[2]
        token = raylet.environ()["RAY_AUTH_TOKEN"]
        assert joins(gcs, token)
        assert not joins(gcs, "another" * 8)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=150) == 0
        assert process.stderr is not None
        process.stderr.close()


def test_two_replicas_one_of_which_is_killed() -> None:
    process, address = start()
    server = psutil.Process(process.pid)
    status, expected = ask(address)
    assert status == 200
    assert ask(address, model="gpt-4")[0] == 404
    assert len(replicas(server)) == 2

    told = asked_while(address, lambda: replicas(server)[0].kill())
    assert_told(*told, expected)
    deadline = time.monotonic() + 90
    while len(replicas(server)) < 2:
        assert time.monotonic() < deadline, "no replica took its place"
        time.sleep(0.5)
    assert ask(address) == (200, expected)

    left = replicas(server)
    last: list[tuple[int, str]] = []
    long = {"max_tokens": 3000, "cache_salt": "last"}
    running = [
        threading.Thread(target=lambda stream=stream: last.append(ask(address, stream=stream, **long)))
        for stream in (False, True)
    ]
    for thread in running:
        thread.start()
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    while (late := ask(address, max_tokens=1))[0] == 200:  # until the proxy has heard of it
        time.sleep(0.05)
    assert late[0] == 503, late
    for thread in running:
        thread.join(timeout=120)
    assert [code for code, _ in last] == [200, 200], last
    assert last[0] == last[1]
    assert process.wait(timeout=90) == 0
    process.stderr.close()
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in left)
