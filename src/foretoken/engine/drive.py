"""Stepping an engine on behalf of callers, until their requests have ended; what they get of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from foretoken.engine.output import Chunk, Completion, RequestOutput
from foretoken.engine.request import Request
from foretoken.engine.step import Engine
from foretoken.engine.text.detokenise import TextStream, text_of
from foretoken.engine.totals import Totals


class Driver:
    """Runs requests on one engine. Several threads may: each steps for all, and looks at its own requests only.

    Args:
        engine: runs them.
        max_num_seqs: requests that run at once, at most.
        totals: take in every request that has ended.
    """

    def __init__(self, engine: Engine, max_num_seqs: int, totals: Totals) -> None:
        self._engine = engine
        self._totals = totals
        self._tokenizer = engine.target.tokenizer
        self._max_num_seqs = max_num_seqs

    def run(self, groups: list[list[Request]], progress: Callable[[RequestOutput], None] | None) -> list[RequestOutput]:
        """Run the requests of several prompts to their end.

        Args:
            groups: one list a prompt.
            progress: called with each output as it finishes.
        """
        for group in groups:
            for request in group:
                self._engine.add(request)
        # Requests start in order, so those that run are of the first groups that have not ended. Groups are looked at
        # instead of what a step returns: a step of another thread may have ended them, or this one a stream's.
        waiting, started = deque(enumerate(groups)), deque[tuple[int, list[Request]]]()
        try:
            while waiting or started:
                while waiting and len(started) < self._max_num_seqs:
                    started.append(waiting.popleft())
                with self._engine.lock:  # a request is finished a moment before it has its last tokens
                    ended = [each for each in started if all(request.finished for request in each[1])]
                if not ended:
                    self._engine.step()
                for place, group in ended:
                    started.remove((place, group))
                    self._totals.count(group)
                    if progress is not None:
                        progress(self.output_of(group, place=place))
        except BaseException as stop:
            for group in groups:
                for request in group:
                    self._engine.cancel(request)
            if isinstance(stop, KeyboardInterrupt) and progress is not None:
                for place, group in (*started, *waiting):  # what was generated is not lost: handed over as it stands
                    if any(each.num_output for each in group):
                        progress(self.output_of(group, place=place))
            raise
        return [self.output_of(group, place=place) for place, group in enumerate(groups)]

    def stream(self, request: Request, reading: Callable[[int, int], None] | None) -> Iterator[Chunk]:
        """Run one request and yield a chunk per step. Closing the iterator early cancels it.

        Args:
            reading: called after each step until the first token, with how many of the prompt's tokens are read, and
                how many there are.
        """
        if request.text is None:
            request.text = TextStream.of(self._tokenizer, request.params, request.tokens)
        return self._chunks(request, request.text, reading)

    def output_of(self, group: Sequence[Request], prompt: str | None = None, place: int = 0) -> RequestOutput:
        """The completions of one prompt as they stand.

        Args:
            group: all of them.
            prompt: its text if that is known; None: decoded again.
            place: of the prompt among those of the call.
        """
        first = group[0]
        prompt_ids = first.tokens[: first.num_prompt]
        if prompt is None:
            prompt = self._prompt_text(first)
        return RequestOutput(
            prompt,
            prompt_ids,
            [self._completion(request, index) for index, request in enumerate(group)],
            first.prompt_logprobs,
            str(first.request_id),
            first.num_cached,
            place,
        )

    # ------------------------------------------------------------------ inside

    def _chunks(
        self, request: Request, texts: TextStream, reading: Callable[[int, int], None] | None
    ) -> Iterator[Chunk]:
        engine, prompt = self._engine, self._prompt_text(request)
        engine.add(request)
        sent = 0
        try:
            while True:
                with engine.lock:  # tokens, text and end as of one moment
                    tokens, ended = request.tokens[request.num_prompt + sent :], request.finished
                    if tokens or ended:
                        output = self.output_of([request], prompt)
                        text = texts.release(final=ended)
                if not tokens and not ended:
                    engine.step()
                    slot = request.slot  # none while it waits, nor once it has ended
                    if reading is not None and not request.num_output and slot >= 0:
                        reading(engine.cache.lengths[slot], request.num_prompt)
                    continue
                sent += len(tokens)
                yield Chunk(text, tokens, output)
                if ended:  # as of this chunk: somebody else's step may have ended the request since
                    return
        finally:
            engine.cancel(request)
            self._totals.count([request])

    def _prompt_text(self, request: Request) -> str:
        ids = request.tokens[: request.num_prompt]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _completion(self, request: Request, index: int) -> Completion:
        params = request.params
        if request.text is None:
            ids = request.output_ids
            if request.finish_reason == "stop" and not params.include_stop_str_in_output:
                ids = ids[:-1]
            prompt = request.tokens[: request.num_prompt]
            text = text_of(self._tokenizer, ids, prompt, skip_special=params.skip_special_tokens)
        else:
            if request.finished:
                request.text.close()
            text = request.text.text
        return Completion(
            text,
            request.output_ids,
            request.finish_reason,
            request.error,
            request.metrics,
            request.logprobs,
            self._engine.recipe.promise_for(params),
            index,
            request.stop_reason,
        )
