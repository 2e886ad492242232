"""The driver: steps an engine for callers until their requests end, and hands them updates.

The library's calls and the server's thread (serve/loop.py) use the same verbs:

    tracked = begin(group)                queue the completions of one prompt
              step()                      one step of the engine, for every request on it
    updates = news(tracked, due)          updates of the requests that are due
              cancel(tracked)

The engine may be stepped by several threads. Each looks at its own requests instead of what its step returns, since the
step of another thread may have ended them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from foretoken.engine.output import Chunk, Completion, RequestOutput
from foretoken.engine.request import Request
from foretoken.engine.step import Engine
from foretoken.engine.text.detokenise import TextStream, text_of
from foretoken.engine.totals import Totals
from foretoken.engine.updates import Tracked, Update


class Driver:
    """Runs requests on one engine.

    Args:
        engine: runs them.
        max_num_seqs: requests that run at once, at most.
        totals: count every request.
    """

    def __init__(self, engine: Engine, max_num_seqs: int, totals: Totals) -> None:
        self.engine = engine
        self.totals = totals
        self._tokenizer = engine.target.tokenizer
        self._max_num_seqs = max_num_seqs

    # ------------------------------------------------------------------ the verbs

    def begin(self, group: Sequence[Request], *, streamed: bool = False) -> list[Tracked]:
        """Queue the completions of one prompt; they join at the next step that has a slot for them.

        Args:
            streamed: whether :meth:`news` will be called, which needs text that is released piece by piece.
        """
        self.totals.count_prompt(group)
        for request in group:
            if streamed and request.text is None:
                request.text = TextStream.of(self._tokenizer, request.params, request.tokens)
        tracked = [Tracked(request, index) for index, request in enumerate(group)]
        for request in group:
            self.engine.add(request)
        return tracked

    def step(self) -> None:
        """Run one step of the engine."""
        self.engine.step()

    def news(
        self, tracked: Iterable[Tracked], due: Callable[[list[Tracked]], list[Tracked]] | None = None
    ) -> list[tuple[Tracked, Update]]:
        """Updates of requests, all as of one moment.

        Args:
            tracked: requests with streamed text.
            due: chooses the requests that are reported now among those with news; None: all.
        """
        with self.engine.lock:
            fresh = [each for each in tracked if each.has_news]
            for each in fresh:
                self.totals.count_progress(each)
            found = [(each, each.update()) for each in (fresh if due is None else due(fresh))]
        for each, update in found:
            if update.finish_reason is not None:
                self.totals.count_end(each)
        return found

    def cancel(self, tracked: Tracked) -> None:
        """End a request now; its tokens stay."""
        self.engine.cancel(tracked.request)

    # ------------------------------------------------------------------ the library's calls

    def run(self, groups: list[list[Request]], progress: Callable[[RequestOutput], None] | None) -> list[RequestOutput]:
        """Run the requests of several prompts to their end.

        Args:
            groups: one list a prompt.
            progress: called with each output as it finishes.
        """
        begun = [self.begin(group) for group in groups]
        # requests start in order, so those that run belong to the first groups that have not ended
        waiting, started = deque(enumerate(begun)), deque[tuple[int, list[Tracked]]]()
        try:
            while waiting or started:
                while waiting and len(started) < self._max_num_seqs:
                    started.append(waiting.popleft())
                with self.engine.lock:  # a request is finished a moment before it has its last tokens
                    ended = [each for each in started if all(one.request.finished for one in each[1])]
                if not ended:
                    self.step()
                for place, group in ended:
                    started.remove((place, group))
                    for each in group:
                        self.totals.count_end(each)
                    if progress is not None:
                        progress(self.output_of(groups[place], place=place))
        except BaseException as stop:
            for group in begun:
                for each in group:
                    self.cancel(each)
            if isinstance(stop, KeyboardInterrupt) and progress is not None:
                for place, _ in (*started, *waiting):  # generated tokens are not lost
                    if any(each.num_output for each in groups[place]):
                        progress(self.output_of(groups[place], place=place))
            raise
        return [self.output_of(group, place=place) for place, group in enumerate(groups)]

    def stream(self, request: Request, on_prefill: Callable[[int, int], None] | None) -> Iterator[Chunk]:
        """Run one request and yield a chunk per step. Closing the iterator early cancels it.

        Args:
            on_prefill: called after each step until the first token, with how many of the prompt's tokens are read, and
                how many there are.
        """
        prompt = self._prompt_text(request)
        (tracked,) = self.begin([request], streamed=True)
        try:
            while True:
                with self.engine.lock:  # the whole output as of the update's moment
                    found = self.news([tracked])
                    output = self.output_of([request], prompt) if found else None
                if output is None:
                    self.step()
                    slot = request.slot  # none while it waits, nor once it has ended
                    if on_prefill is not None and not request.num_output and slot >= 0:
                        on_prefill(self.engine.cache.lengths[slot], request.num_prompt)
                    continue
                [(_, update)] = found
                yield Chunk(update.text, update.token_ids, output)
                if update.finish_reason is not None:
                    return
        finally:
            if not request.finished:
                self.cancel(tracked)
                self.totals.count_end(tracked)

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
            self.engine.recipe.promise_for(params),
            index,
            request.stop_reason,
        )
