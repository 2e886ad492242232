"""The form that ``/v1/chat/completions`` and ``/v1/completions`` share: an object with choices, or chunks of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from foretoken.engine.request import Request
from foretoken.engine.updates import Update
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import ChatRequest, CompletionRequest
from foretoken.serve.service import FINGERPRINT, Service, new_id, refuse_failure
from foretoken.serve.stream import DONE, Chunks, event


class ChoicesAnswer(ABC):
    """One request of such a path to answer. A path sets ``requests`` when it is made.

    Attributes:
        object: the answer's kind; a chunk's is ``chunk_object``.
        prefix: of the answer's id.
        requests: one for each choice.
    """

    object: str
    chunk_object: str
    prefix: str
    requests: list[Request]

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest) -> None:
        self.model = service.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options requires stream=true", param="stream_options")
        self.service = service
        self.id, self.created = new_id(self.prefix), int(time.time())
        self._options = body.stream_options
        self._metrics_of = body
        self._shows = body.speculation is not None and body.speculation.show

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        deltas = await self.service.whole(self.requests)
        return {
            **self._common(self.object),
            "choices": [self._choice(delta) | self._shown(delta) for delta in deltas],
            "usage": self._usage(),
            **self.service.metrics(self.requests, self._metrics_of),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in pieces."""
        wanted = self._options is not None and bool(self._options.include_usage)
        every = wanted and self._options is not None and bool(self._options.continuous_usage_stats)
        chunk = Chunks(self._common(self.chunk_object), usage=wanted)
        with self.service.running(self.requests) as ticket:
            delivered = 0
            for opening in self._openings():
                yield chunk([opening], self._usage(delivered) if every else None)
            async for deltas in ticket.deltas():
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        yield event(error.body)
                        return
                    streamed = self._streamed(delta) | self._shown(delta)
                    delivered += len(delta.token_ids)
                    yield chunk([streamed], self._usage(delivered) if every else None)
        if wanted:
            yield chunk([], self._usage(), self.service.metrics(self.requests, self._metrics_of))
        yield DONE

    @abstractmethod
    def _choice(self, delta: Update) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def _streamed(self, delta: Update) -> dict[str, Any]:
        """A piece of a choice."""

    @abstractmethod
    def _usage(self, delivered: int | None = None) -> dict[str, Any]:
        """Counts of tokens; of those delivered so far where that is given."""

    def _openings(self) -> Sequence[dict[str, Any]]:
        """Pieces before the first token."""
        return ()

    def _common(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _shown(self, delta: Update) -> dict[str, Any]:
        return {"speculation": self.service.shown(delta)} if self._shows else {}
