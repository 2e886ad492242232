"""``POST /infill``: the text between two others, in the form of llama.cpp and its plugins for editors."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from time import monotonic
from typing import Any

from foretoken.engine.updates import Update
from foretoken.serve.errors import ApiError
from foretoken.serve.infill import Infill
from foretoken.serve.loop import Ticket
from foretoken.serve.schema import InfillRequest
from foretoken.serve.service import Service, new_id, refuse_failure
from foretoken.serve.stream import event


class InfillAnswer:
    """One text to fill in.

    Args:
        service: the model.
        body: the request; without ``max_tokens``, a quarter of the context is the limit.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    def __init__(self, service: Service, body: InfillRequest) -> None:
        service.check_model(body.model)
        self.service, self.id = service, new_id("infill-")
        infill, whole = Infill(service.llm.tokenizer), service.llm.target.max_length
        length = body.max_tokens or whole // 4
        params = service.params(body, max_tokens=length)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill.stops))
        files = [(each.filename, each.text) for each in body.input_extra or ()]
        prompt = infill.prompt(body.input_prefix, body.input_suffix, whole - length, files, body.prompt)
        self.requests = service.requests([prompt], params, body, "input_prefix")

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        with self.service.running(self.requests, streamed=False) as ticket:
            (delta,) = [delta async for deltas in ticket.deltas() for delta in deltas]
            refuse_failure(delta)
            return self._piece(delta, ticket)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in pieces."""
        with self.service.running(self.requests) as ticket:
            async for deltas in ticket.deltas():
                for delta in deltas:
                    try:
                        refuse_failure(delta)
                    except ApiError as error:
                        yield event(error.body)
                        return
                    yield event(self._piece(delta, ticket))

    def _piece(self, delta: Update, ticket: Ticket) -> dict[str, Any]:
        if delta.finish_reason is None:
            return {"content": delta.text, "stop": False}
        request, ended = self.requests[0], ticket.ended or monotonic()
        first = ticket.first_token or ended
        read, wrote = first - ticket.submitted, max(ended - first, 1e-6)
        return {
            "content": delta.text,
            "stop": True,
            "stop_type": "limit" if delta.finish_reason == "length" else "eos",
            "tokens_evaluated": request.num_prompt,
            "tokens_cached": request.num_cached,
            "tokens_predicted": request.num_output,
            "timings": {
                "prompt_n": request.num_prompt - request.num_cached,
                "prompt_ms": read * 1e3,
                "predicted_n": request.num_output,
                "predicted_ms": wrote * 1e3,
                "predicted_per_second": request.num_output / wrote,
            },
        }
