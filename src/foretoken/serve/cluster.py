"""The same application on Ray Serve: several replicas, on one or more machines.

    client ── Ray's proxy ──┬── replica: engine's loop and application, with cores of its own
                            └── replica …

Ray adds routing, health checks, restarts and autoscaling; a replica equals one ``foretoken serve`` process. Requests
with the same ``x-session-id`` header go to the same replica, which has their prompts in its cache.
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.engine.totals import Totals
from foretoken.serve import proxy
from foretoken.serve.model_pool import ModelPool, ModelSettings
from foretoken.serve.server import is_loopback
from foretoken.serve.service import Limits

_PUSH = 1.0  # seconds between two reports of a replica's metrics to Ray
_LOOK = 0.2  # seconds between two checks whether the replicas have ended
_GOING = 30.0  # seconds for a replica to end, in addition to its running requests
_TELLING = 3.0  # seconds for the proxies to report interrupted answers to the clients
_APPLICATION = "foretoken"  # its name in Ray Serve
_ASKS_TOKEN = (2, 52)  # the first version of Ray that supports it


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The number of replicas and the settings of each.

    Attributes:
        least, most: numbers of replicas; Ray scales between them by the number of running requests.
        threads: cores per replica.
        model, limits, api_key, origins: as for the server.
        drain_seconds: time for running requests when a replica ends.
    """

    least: int
    most: int
    threads: int
    model: ModelSettings
    limits: Limits
    api_key: str | None = None
    drain_seconds: float = 60.0
    origins: tuple[str, ...] = ()


class Replica:
    """One engine in a process of Ray; see :func:`run`."""

    def __init__(self, settings: Replicas) -> None:
        import torch

        _keep_to_loopback()
        torch.set_num_threads(settings.threads)  # Ray sets OMP_NUM_THREADS to its own number of cores
        self._settings = settings
        self._pool = ModelPool([settings.model], settings.limits)
        self._pool.begin(self._pool.models[0])
        _Pushed(self._pool).start()

    def __serve_build_asgi_app__(self) -> Any:
        from foretoken.serve.app import create_app

        own = self._settings
        return create_app(self._pool, api_key=own.api_key, origins=own.origins)

    def check_health(self) -> None:
        """Check the health for Ray, which replaces a replica that raises."""
        if self._pool.failure is not None:  # a model that sleeps is none
            raise RuntimeError(f"the engine has died: {self._pool.failure}")

    def __del__(self) -> None:
        if pool := getattr(self, "_pool", None):
            pool.close()
            pool.release()


def _keep_to_loopback() -> None:
    """Make this process listen on loopback if its node does.

    Ray Serve gives every replica a gRPC server that listens on all interfaces and unpickles its input.
    """
    import grpc.aio
    import ray

    node = ray.util.get_node_ip_address()
    if is_loopback(node):
        for kind in grpc.aio.Server.__subclasses__():
            for name in ("add_insecure_port", "add_secure_port"):
                plain = getattr(kind, name)

                def add(server: Any, address: str, *more: Any, plain: Any = plain) -> int:
                    port: int = plain(server, address.replace("[::]", node), *more)
                    return port

                setattr(kind, name, add)


class _Pushed(threading.Thread):
    """Report a replica's counters to Ray: Ray's metrics cover all replicas, ``/metrics`` reaches only one."""

    def __init__(self, pool: ModelPool) -> None:
        from ray.serve.metrics import Counter, Gauge

        super().__init__(name="foretoken-metrics", daemon=True)
        self._pool, (self._model,) = pool, pool.models
        self._labels = {"model_name": self._model.name}
        keys = tuple(self._labels)
        counted = ("prompt_tokens", "cached_tokens", "tokens", "steps", "draft_tokens", "accepted_tokens")
        self._counters = {
            each: Counter(f"foretoken_{each}", description=f"{each}, see docs/serve.md", tag_keys=keys)
            for each in counted
        }
        self._running = Gauge("foretoken_running", description="Requests that have a slot.", tag_keys=keys)
        self._waiting = Gauge("foretoken_waiting", description="Requests that wait for a slot.", tag_keys=keys)
        self._said = Totals()

    def run(self) -> None:
        while self._pool.failure is None:
            for name, counter in self._counters.items():
                now = getattr(self._model.totals, name)
                if now > getattr(self._said, name):
                    counter.inc(now - getattr(self._said, name), self._labels)
                    setattr(self._said, name, now)
            loop = self._model.loop
            self._running.set(0 if loop is None else loop.num_running, self._labels)
            self._waiting.set(0 if loop is None else loop.num_waiting, self._labels)
            time.sleep(_PUSH)


def deploy(settings: Replicas, host: str, port: int, *, verbose: bool = False) -> str:
    """Start the replicas and Ray's proxy; return the address when they answer.

    ``RAY_ADDRESS`` names a running cluster; without it, a new one starts on this machine.

    Raises:
        ConfigError: Ray is not installed, or the port is taken.
        ForetokenError: the replicas do not start; the message has Ray's reason.
    """
    close_own_cluster()
    try:
        from ray import serve
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig
        from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray ({error}): pip install 'foretoken[ray]'") from None
    port = port or _free_port(host)
    begin(verbose=verbose)
    slots = int(settings.model.options.get("max_num_seqs") or 16)  # where it follows memory, replicas are added early
    scale: dict[str, Any] = {"num_replicas": settings.least}
    if settings.most > settings.least:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.least, max_replicas=settings.most, target_ongoing_requests=slots
            )
        }
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=_APPLICATION,
        max_ongoing_requests=2 * slots,
        max_queued_requests=settings.limits.queue,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": settings.threads},
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
        **scale,
    )
    try:
        # on other nodes a loopback address is unreachable; on one machine, nodes would share it, even a dead one
        where = "HeadOnly" if is_loopback(host) else "EveryNode"
        serve.start(proxy_location=where, http_options={"host": host, "port": port})
        serve.run(deployment.bind(settings), name=_APPLICATION, route_prefix="/", logging_config=_quiet(verbose))
    except (RuntimeError, TimeoutError) as error:
        _end()
        raise ForetokenError(f"the replicas do not start: {error}") from None
    return f"http://{host}:{port}"


def close_own_cluster() -> None:
    """Make a new cluster listen on loopback only, and require a token. Call it before Ray is imported.

    By default Ray opens a dozen ports on every interface, and each of them executes the code that it receives.
    """
    if _given_cluster() is None:
        # Ray's switch for systems with a firewall prompt: a cluster of one node, which listens on loopback
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            # for this run only: Ray would write its own token into the home folder, readable by every user
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _given_cluster() -> str | None:
    """Return the address of the running cluster; None: a new one must be started."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return None if address in ("", "local") else address


def begin(*, verbose: bool) -> None:
    """Join the cluster at ``RAY_ADDRESS``, or start one on this machine, see :func:`close_own_cluster`.

    Raises:
        ConfigError: this version of Ray cannot require a token.
        ForetokenError: it does not start; the message has Ray's reason.
    """
    close_own_cluster()
    import ray

    if not verbose:
        logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", proxy.IMPORT_PATH)
    # a busy machine takes longer to start a proxy than Ray's 5 s, after which it is killed
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    address = _given_cluster()
    version = tuple(map(int, ray.__version__.split(".")[:2]))
    if address is None and version < _ASKS_TOKEN:
        raise ConfigError(
            f"Ray {ray.__version__} cannot require a token, so other users could run code on a new cluster:"
            " pip install 'foretoken[ray]', or let RAY_ADDRESS name a cluster"
        )
    try:
        # "local" without an address: otherwise Ray joins any cluster that runs on this machine
        ray.init(
            address=address or "local",
            include_dashboard=False,
            log_to_driver=verbose,
            logging_level="info" if verbose else "error",
        )
    except Exception as error:  # Ray's errors have no common base class
        where = f"Ray's cluster at RAY_ADDRESS={address} does not answer" if address else None
        raise ForetokenError(f"{where or 'Ray does not start on this machine'}: {error}") from None
    if address is None and not is_loopback(node := ray.util.get_node_ip_address()):
        ray.shutdown()
        raise ForetokenError(f"Ray listens at {node}, not on loopback: it was imported before its settings were made")


def run(settings: Replicas, host: str, port: int, *, verbose: bool, ready: Any) -> None:
    """Serve until SIGTERM or SIGINT; running requests then have ``drain_seconds`` to end, unless a second signal comes.

    Args:
        ready: called with the address when the replicas answer.
    """
    over, at_once = threading.Event(), threading.Event()
    address = deploy(settings, host, port, verbose=verbose)
    for sign in (signal.SIGTERM, signal.SIGINT):  # after Ray has installed its own handlers
        signal.signal(sign, lambda *_: (at_once if over.is_set() else over).set())
    ready(address)
    over.wait()
    _drain(settings.drain_seconds, at_once)
    stop()


def _drain(seconds: float, at_once: threading.Event) -> None:
    """Remove the application from the proxies, and wait for its replicas, which finish their running requests.

    If that takes too long, Ray kills the replicas: the proxies, which end next, need time to report it to the clients.
    """
    from ray import serve

    serve.delete(_APPLICATION, _blocking=False)
    began = time.monotonic()
    while _APPLICATION in serve.status().applications and time.monotonic() < began + seconds + _GOING:
        if at_once.wait(_LOOK):
            return
    if time.monotonic() >= began + seconds:
        at_once.wait(_TELLING)


def stop() -> None:
    """End the replicas, and the cluster if it was started here. Other applications on the cluster continue."""
    import ray

    _end()
    ray.shutdown()


def _end() -> None:
    from ray import serve

    if set(serve.status().applications) - {_APPLICATION}:
        serve.delete(_APPLICATION, _blocking=False)
    else:
        serve.shutdown()


def _quiet(verbose: bool) -> Any:
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(log_level="INFO" if verbose else "ERROR", enable_access_log=verbose)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
