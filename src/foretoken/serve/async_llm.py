"""``AsyncLLM``: the engine's loop as an asyncio object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError
from foretoken.core.plain import Made, check_call, reject_unknown_keywords
from foretoken.engine.intake import limits
from foretoken.engine.intake.vllm_options import absent
from foretoken.engine.llm import LLM, Messages, Prompt
from foretoken.engine.output import RequestOutput
from foretoken.engine.updates import Update
from foretoken.options.sampling import SamplingParams
from foretoken.serve.loop import EngineLoop

_ELSEWHERE = {  # what vLLM's has
    "sampling_params": "it is called params",
    "request_id": "requests are told apart by the calls themselves: leave it out",
}

_METHODS = {
    "shutdown": "write 'await llm.close()', or 'async with AsyncLLM(...) as llm:'",
    "abort": "close the stream, or cancel the task that waits",
    "add_request": "generate and stream do so",
    "get_tokenizer": "it is llm.llm.get_tokenizer()",
}


def _arguments(function: Made) -> Made:
    """Refuse keywords that are not here, as :class:`LLM` does."""
    return reject_unknown_keywords(function, _ELSEWHERE)


class AsyncLLM:
    """An :class:`LLM` for asyncio: many coroutines generate and stream at once, one thread runs the engine.

        async with AsyncLLM("zoo:base", speculative_config={"method": "suffix"}) as llm:
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Args:
        model: as for :class:`LLM`, or an ``LLM`` that exists.
        max_queue: prompts that may wait for a slot; more raise ``Overloaded``.
        options: of :class:`LLM`.
    Raises:
        ForetokenError: see :class:`LLM`.
    """

    @check_call
    def __init__(self, model: str | Path | LLM, *, max_queue: int = 256, **options: Any) -> None:
        limits.check_queue(max_queue)
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{', '.join(options)}: the LLM that is given has options of its own, leave them out")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.loop = EngineLoop(self.llm, max_queue=max_queue).start()

    @_arguments
    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Complete one prompt. A task that is cancelled ends the request within a step.

        Raises:
            InputError, ConfigError: see :meth:`LLM.generate`.
            Overloaded, Stopped: the loop does not take it.
        """
        requests = self.llm.new_requests(prompt, self._or_default(params))
        ticket = self.loop.submit(requests, streamed=False)
        try:
            async for _ in ticket.deltas():
                pass
        finally:
            self.loop.cancel(ticket)
        return self.llm.output_of(ticket.requests)

    @_arguments
    async def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answer one conversation."""
        return await self.generate(self.llm.chat_prompt(messages), params)

    @_arguments
    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Update, None]:
        """Complete one prompt, and yield what is new: after each step, or next to other streams together with them, see
        ``foretoken.serve.loop``; ``delta.index`` says of which completion.

        Closing the iterator ends the request within a step. A request that fails ends with a delta that has an
        ``error``.
        """
        ticket = self.loop.submit(self.llm.new_requests(prompt, self._or_default(params)))
        try:
            async with aclosing(ticket.deltas()) as news:
                async for deltas in news:
                    for delta in deltas:
                        yield delta
        finally:
            self.loop.cancel(ticket)

    @_arguments
    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> AsyncGenerator[Update, None]:
        """Answer one conversation, see :meth:`stream`."""
        return self.stream(self.llm.chat_prompt(messages), params)

    def _or_default(self, params: SamplingParams | None) -> SamplingParams:
        return self.llm.default_params if params is None else params

    async def close(self, seconds: float | None = 0.0) -> None:
        """Take no more, wait so long for what runs (None: as long as it takes), and end."""
        await asyncio.get_running_loop().run_in_executor(None, self.loop.close, seconds)

    if not TYPE_CHECKING:  # whose readers know what there is

        def __getattr__(self, name: str) -> Any:
            raise absent(name, _METHODS, owner="AsyncLLM")

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
