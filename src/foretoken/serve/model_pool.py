"""The models of one server: each is loaded by its first request, and leaves memory for another one or when it is idle.

    request ──► model's name ──► ModelPool ──► Service, held until the answer has ended
                                     │
                                     └──► not in memory: one load at a time, in the order of the requests; the models
                                          that were used longest ago leave for it, after their running requests

The pool belongs to the server's event loop, and needs no lock; loading and unloading run in threads.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.pages import give_back_free_memory
from foretoken.engine.llm import LLM
from foretoken.engine.totals import Totals
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.loop import EngineLoop, Stopped
from foretoken.serve.metrics import Histograms
from foretoken.serve.service import Limits, Service, adapter_in, matches, not_served

log = logging.getLogger(__name__)
_CARD = ("root", "max_model_len", "method", "promise", "explanations")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How to load and to serve one model.

    Attributes:
        model, config, options: as for ``LLM``; the config is its ``speculative_config``.
        names, reasoning, tool_parser, adapters: as for :class:`Service`.
    """

    model: str
    config: dict[str, Any]
    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: bool | None = None
    tool_parser: str = "auto"
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> dict[str, Any]:
        """The arguments that config and tokenizer are loaded with."""
        return {name: self.options[name] for name in ("revision", "trust_remote_code") if name in self.options}

    def num_bytes(self) -> int:
        """Return the bytes that its weights and those of its draft model take at least; 0: known after the load.

        Raises:
            ForetokenError: the model cannot be loaded.
        """
        from foretoken.models.load import bytes_of_weights

        found = bytes_of_weights(self.model, dtype=self.options.get("dtype", "auto"), **self.origin)
        with suppress(ForetokenError):  # the folder of a draft head, which is small
            found += bytes_of_weights(self.config["model"]) if "model" in self.config else 0
        return found


@dataclass(slots=True)
class _Stay:
    """A model's time in memory, from the first request that waits for it.

    Attributes:
        users: requests that wait for it or run on it.
    """

    service: Service | None = None
    loading: asyncio.Task[None] | None = None
    users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None


class PooledModel:
    """One model of a pool.

    Attributes:
        name, names: for clients, see :class:`Service`.
        adapters: folders of its adapters by name.
        totals: counters, of all its times in memory.
        num_bytes: of its weights; 0 until they are known.
        keep: seconds that it stays in memory without requests, set by a client; negative: for ever.
        used: when it was used last.
        stay: None: it is not in memory, and nothing waits for it.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.names, self.name = settings.names, settings.names[0]
        self.adapters = dict(settings.adapters)
        self.totals = Totals()
        self.num_bytes = 0
        self.keep: float | None = None
        self.used = 0.0
        self.stay: _Stay | None = None
        self._card = {**dict.fromkeys(_CARD), "root": settings.model}

    @property
    def service(self) -> Service | None:
        """The model in memory; None: it is not there."""
        return None if self.stay is None else self.stay.service

    @property
    def loop(self) -> EngineLoop | None:
        """The loop of the model in memory."""
        return None if self.service is None else self.service.loop

    @property
    def bytes_in_memory(self) -> int:
        """Of its weights, and of the target's keys and values at present."""
        return self.num_bytes + (0 if self.service is None else self.service.llm.engine.cache.num_bytes)

    @property
    def state(self) -> str:
        """Its state in llama.cpp's words."""
        if self.stay is not None:
            return "loading" if self.stay.service is None else "loaded"
        return "unloaded" if self._card["method"] is None else "sleeping"

    def knows(self, name: str) -> bool:
        """Whether a name selects this model or an adapter of it."""
        return matches(name, self.names) or adapter_in(name, self.names, self.adapters) is not None

    def card(self, name: str) -> dict[str, Any]:
        """Return its properties under one of its names; some are known once it has been loaded."""
        if self.service is not None:
            target, recipe = self.service.llm.target, self.service.llm.recipe
            values = (target.name, target.max_length, recipe.method, recipe.promise, recipe.explanations)
            self._card = dict(zip(_CARD, values, strict=True))
        adapter = adapter_in(name, self.names, self.adapters)
        base = {} if adapter is None else {"root": self.adapters[adapter], "parent": self.name}
        return {**self._card, "parent": None, **base, "status": {"value": self.state}}


class ModelPool:
    """The models of a server.

    Args:
        models: at least one.
        limits: of the server.
        budget: bytes that weights, keys and values may take together when a model is loaded; None: no bound.
        most: models in memory at once; None: no bound.
        idle_seconds: time without requests after which a model leaves memory; None: it stays.
        adapters_change: whether clients may load and unload adapters.
    Attributes:
        histograms: metrics of all requests.
    """

    def __init__(
        self,
        models: Iterable[ModelSettings],
        limits: Limits | None = None,
        *,
        budget: int | None = None,
        most: int | None = None,
        idle_seconds: float | None = None,
        adapters_change: bool = False,
    ) -> None:
        self.models = list(map(PooledModel, models))
        self.limits = limits or Limits()
        self.adapters_change = adapters_change
        self.histograms = Histograms()
        self.created = int(time.time())
        self._budget, self._most, self._idle = budget, most, idle_seconds
        self._changing = asyncio.Lock()  # lets the waiting ones through in their order
        self._in_memory: list[Service] = []
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps no reference

    def begin(self, model: PooledModel, llm: LLM | None = None) -> Service:
        """Serve a model that is not in memory.

        Args:
            llm: the model; None: loads it.
        Raises:
            ForetokenError: it cannot be loaded, or an adapter does not fit.
        """
        own = model.settings
        with suppress(ForetokenError):  # a load says why
            model.num_bytes = model.num_bytes or own.num_bytes()
        llm = llm or LLM(own.model, speculative_config=own.config, **own.options)
        loop = EngineLoop(llm, max_queue=self.limits.queue, max_seconds=self.limits.seconds, totals=model.totals)
        try:
            service = Service(
                loop,
                own.names,
                self.limits,
                reasoning=own.reasoning,
                tool_parser=own.tool_parser,
                adapters=model.adapters,
                histograms=self.histograms,
            )
        except BaseException:
            llm.close()
            raise
        loop.start()
        model.stay = model.stay or _Stay()
        model.stay.service = service
        self._in_memory.append(service)
        if self._draining:
            loop.drain()
        return service

    def find(self, name: str | None) -> PooledModel:
        """Return the model that a name selects; a model's own name precedes those with ``*``.

        Raises:
            ApiError: 404: there is none; 400: the name is missing, and there are several models.
        """
        names = [each.name for each in self.models]
        if name is None:
            if len(self.models) > 1:
                raise ApiError(400, f"model is missing, and several are served: name one of {names}", param="model")
            return self.models[0]
        for model in (*(each for each in self.models if name in each.names), *self.models):
            if model.knows(name):
                return model
        raise not_served(name, names, [each for model in self.models for each in model.adapters])

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[Service]:
        """Hold a model in memory inside a ``with`` block, and load it first if necessary.

        Raises:
            ApiError: there is no such model, it does not fit into the budget, or it cannot be loaded.
        """
        model = self.find(name)
        if len(self.models) > 1 and model.loop is not None and model.loop.failure is not None:
            await self.unload(model)  # its engine has died
        stay = model.stay
        if stay is None:
            stay = model.stay = _Stay()
            stay.loading = self._start(self._load(model, stay))
        stay.users += 1
        stay.unused.clear()
        if stay.timer is not None:
            stay.timer.cancel()
        try:
            if stay.service is None:
                assert stay.loading is not None
                await asyncio.shield(stay.loading)  # others may wait for it, too
            assert stay.service is not None
            yield stay.service
        finally:
            stay.users -= 1
            model.used = time.monotonic()
            if not stay.users:
                stay.unused.set()
                keep = self._idle if model.keep is None else model.keep
                if model.stay is stay and keep is not None and keep >= 0:
                    stay.timer = asyncio.get_running_loop().call_later(keep, self._sleep, model)

    async def unload(self, model: PooledModel, *, only_unused: bool = False) -> None:
        """Take a model out of memory after its running requests."""
        stay = model.stay
        async with self._changing:
            if stay is not None and model.stay is stay and not (only_unused and stay.users):
                await self._unload(model, stay)

    def _sleep(self, model: PooledModel) -> None:
        self._start(self.unload(model, only_unused=True))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, model: PooledModel, stay: _Stay) -> None:
        try:
            async with self._changing:
                if self._draining:
                    raise api_error(Stopped("the server is shutting down"))
                model.num_bytes = await asyncio.to_thread(model.settings.num_bytes)
                await self._make_room(model)
                log.info("loading %s", model.name)
                await asyncio.to_thread(self.begin, model)
        except Exception as error:
            if model.stay is stay:
                model.stay = None
            if isinstance(error, ApiError):
                raise
            if not isinstance(error, (ForetokenError, OSError, MemoryError)):
                log.exception("the model '%s' cannot be loaded", model.name)
            message = f"the model '{model.name}' cannot be loaded: {error or type(error).__name__}"
            raise ApiError(503, message, param="model", code="model_not_loaded") from None

    async def _make_room(self, model: PooledModel) -> None:
        """Take models out of memory until another one fits."""
        needed, budget = model.num_bytes, self._budget
        if budget is not None and needed > budget:
            message = (
                f"the model '{model.name}' takes {needed / 1e9:.1f} GB, and all models together may take "
                f"{budget / 1e9:.1f} GB: raise --models-memory, or serve it with fewer bits (dtype int8 or int4)"
            )
            raise ApiError(400, message, param="model", code="model_too_large")
        while others := [(each, each.stay) for each in self.models if each.stay is not None and each.service]:
            taken = needed + sum(each.bytes_in_memory for each, _ in others)
            if (budget is None or taken <= budget) and (self._most is None or len(others) < self._most):
                return
            # an idle model goes at once; others end their requests first
            await self._unload(*min(others, key=lambda pair: (pair[1].users > 0, pair[0].used)))

    async def _unload(self, model: PooledModel, stay: _Stay) -> None:
        """Let a model's requests end, and release its memory; later requests wait for the next load."""
        if stay.service is None:
            return
        model.card(model.name)  # keeps its last properties
        model.stay = None
        if stay.users:
            await stay.unused.wait()
        service, stay.service = stay.service, None
        self._in_memory.remove(service)
        log.info("unloading %s", model.name)
        await asyncio.to_thread(service.loop.close)
        await asyncio.to_thread(service.llm.close)
        del service
        await asyncio.to_thread(gc.collect)  # models refer to themselves
        give_back_free_memory()

    # ------------------------------------------------------------------ the end, from any thread

    @property
    def accepting(self) -> bool:
        """Whether requests can run."""
        return not self._draining and all(each.loop.accepting for each in list(self._in_memory))

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine of a model."""
        return next((each.loop.failure for each in list(self._in_memory) if each.loop.failure), None)

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        self._draining = True
        for service in list(self._in_memory):
            service.loop.drain()

    def close(self, seconds: float = 0.0) -> None:
        """Drain, wait for running requests, and cancel the remaining ones."""
        self.drain()
        end = time.monotonic() + seconds
        for service in list(self._in_memory):
            service.loop.close(max(0.0, end - time.monotonic()))

    def release(self) -> None:
        """End the threads and processes of the models after the end of their loops."""
        for service in list(self._in_memory):
            service.llm.close()
