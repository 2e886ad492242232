"""Faults stay with the request that caused them: it ends with its error, the others go on."""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from foretoken.core.errors import ForetokenError, NothingFits
from foretoken.core.protocols import Drafter, Features, Outcome
from foretoken.engine.request import Request
from foretoken.engine.scheduler import Scheduler

log = logging.getLogger(__name__)
_News = TypeVar("_News", Outcome, Features)


class Faults:
    """Ends single requests of one engine.

    Args:
        scheduler: the running and the waiting requests.
        drafter: releases every request that leaves.
    """

    def __init__(self, scheduler: Scheduler, drafter: Drafter) -> None:
        self._scheduler = scheduler
        self._drafter = drafter

    def fail(self, request: Request, error: Exception) -> None:
        """End one request with its error."""
        if not isinstance(error, ForetokenError):
            log.exception("request %d failed", request.request_id, exc_info=error)
        request.finish_reason = "error"
        request.error = str(error) or type(error).__name__
        request.unfit = isinstance(error, NothingFits)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Free a request's slot; a failure of the drafter's ``release`` is only logged."""
        if request.slot < 0 and request not in self._scheduler.waiting:
            return
        request.metrics.seconds = perf_counter() - request.started
        self._scheduler.remove(request)
        try:
            self._drafter.release(request.request_id)
        except Exception:
            log.exception("drafter '%s' failed to release request %d", self._drafter.name, request.request_id)

    def tell(
        self, requests: Sequence[Request], news: Sequence[_News], learn: Callable[[Sequence[_News]], None]
    ) -> None:
        """Let the drafter learn; if it fails, from one request at a time, so that only the culprit ends."""
        try:
            learn(news)
            return
        except Exception as error:
            if len(news) == 1:
                if not requests[0].finished:
                    self.fail(requests[0], error)
                return
        for request, each in zip(requests, news, strict=True):
            self.tell([request], [each], learn)
