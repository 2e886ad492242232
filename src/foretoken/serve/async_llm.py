"""``AsyncLLM``: the engine's loop for asyncio."""

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
from foretoken.options.lora import LoRARequest
from foretoken.options.sampling import SamplingParams
from foretoken.serve.loop import EngineLoop

_ELSEWHERE = {  # vLLM's names
    "sampling_params": "it is called params",
    "request_id": "the call itself identifies its request: leave it out",
}

_METHODS = {
    "shutdown": "write 'await llm.close()', or 'async with AsyncLLM(...) as llm:'",
    "abort": "close the stream, or cancel the waiting task",
    "add_request": "generate and stream do so",
    "get_tokenizer": "use llm.llm.get_tokenizer()",
}


def _arguments(function: Made) -> Made:
    """Refuse unknown keywords, like :class:`LLM`."""
    return reject_unknown_keywords(function, _ELSEWHERE)


class AsyncLLM:
    """An :class:`LLM` for asyncio: many coroutines generate and stream at once, one thread runs the engine.

        async with AsyncLLM("zoo:base", speculative_config={"method": "suffix"}) as llm:
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Args:
        model: as for :class:`LLM`, or an existing ``LLM``.
        max_queue: maximum number of waiting prompts; more raise ``Overloaded``.
        options: options of :class:`LLM`.
    Raises:
        ForetokenError: see :class:`LLM`.
    """

    @check_call
    def __init__(self, model: str | Path | LLM, *, max_queue: int = 256, **options: Any) -> None:
        limits.check_queue(max_queue)
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{', '.join(options)}: options cannot be set on an existing LLM: leave them out")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.loop = EngineLoop(self.llm, max_queue=max_queue).start()

    @_arguments
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> RequestOutput:
        """Complete one prompt. Cancelling the task ends the request within a step.

        Raises:
            InputError, ConfigError, ModelError: see :meth:`LLM.generate`.
            Overloaded, Stopped: the loop refuses it.
        """
        requests = self.llm.new_requests(prompt, self._or_default(params), lora_request=lora_request)
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
    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[Update, None]:
        """Complete one prompt, and yield deltas: after each step, or grouped with those of other streams, see
        ``foretoken.serve.loop``; ``delta.index`` is the number of the completion.

        Closing the iterator ends the request within a step. A request that fails ends with a delta that has an
        ``error``.
        """
        ticket = self.loop.submit(self.llm.new_requests(prompt, self._or_default(params), lora_request=lora_request))
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
        """Accept no more requests, wait for running ones (None: no time limit), and end."""
        await asyncio.get_running_loop().run_in_executor(None, self.loop.close, seconds)

    if not TYPE_CHECKING:  # hidden from type checkers

        def __getattr__(self, name: str) -> Any:
            raise absent(name, _METHODS, owner="AsyncLLM")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
