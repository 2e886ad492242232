"""``POST /v1/completions``: continuations of texts, as one object or as a stream."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from foretoken.engine.llm import Prompt
from foretoken.engine.request import TokenLogprob
from foretoken.engine.updates import Update
from foretoken.serve.choices import ChoicesAnswer
from foretoken.serve.errors import ApiError
from foretoken.serve.infill import Infill
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.service import Service
from foretoken.serve.token_places import Places

_LENGTH = 16  # OpenAI's default


class Completion(ChoicesAnswer):
    """Prompts to continue.

    Args:
        service: the model.
        body: the request.
    Raises:
        ApiError: the request is not valid; nothing runs.
    """

    object = chunk_object = "text_completion"
    prefix = "cmpl-"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(400, f"best_of={body.best_of} is not supported: leave it out, or use n", param="best_of")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens=0 requires echo=true: set max_tokens to at least 1", param="max_tokens")
        self.body = body
        length = _LENGTH if body.max_tokens is None else body.max_tokens
        self.nothing = length == 0  # for the prompt alone, one token is computed and not returned
        scored = body.logprobs if body.echo else None
        params = service.params(body, max_tokens=max(1, length), logprobs=body.logprobs, prompt_logprobs=scored)
        self.prompts = asked = _prompts(body)
        if body.suffix:
            if body.echo and body.logprobs is not None:
                message = (
                    "log-probabilities of an echo have no place for the suffix: leave echo, logprobs or suffix out"
                )
                raise ApiError(400, message, param="suffix")
            infill = Infill(service.llm.tokenizer)
            limit = service.llm.target.max_length - max(1, length)
            asked = [infill.prompt(cast(str | Sequence[int], prompt), body.suffix, limit) for prompt in asked]
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill.stops))
        self.n = params.n
        self.skip_special = params.skip_special_tokens
        self._places: dict[int, Places] = {}
        self.requests = service.requests(asked, params, body, "prompt")

    def _usage(self, delivered: int | None = None) -> dict[str, Any]:
        usage = self.service.usage(self.requests, len(self.prompts), delivered=delivered)
        if self.nothing:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, delta: Update) -> dict[str, Any]:
        text = "" if self.nothing else delta.text
        entries: list[TokenLogprob | None] = [] if self.nothing else list(delta.logprobs)
        places = self._places.get(delta.index)
        offsets: list[int] = []
        if places is None:  # the first piece carries the prompt
            places = self._places[delta.index] = Places(self.service.token_text, self.skip_special)
            if self.body.echo:
                prompt = self._prompt_text(delta.index)
                text = prompt + text
                scored = self._prompt_entries(delta.index)
                offsets = places.of_prompt(self.requests[delta.index].tokens[: len(scored)], prompt)
                entries = [*scored, *entries]
        if self.body.suffix and self.body.echo and delta.finish_reason is not None:
            text += self.body.suffix
        offsets += places.of_answer([each.token_id for each in entries[len(offsets) :] if each is not None])
        return {
            "index": delta.index,
            "text": text,
            "logprobs": None if self.body.logprobs is None else self._logprobs(delta.index, entries, offsets),
            "finish_reason": "length" if self.nothing else delta.finish_reason,
        }

    def _streamed(self, delta: Update) -> dict[str, Any]:
        return self._choice(delta)

    def _prompt_text(self, index: int) -> str:
        prompt = self.prompts[index // self.n]
        if isinstance(prompt, str):
            return prompt
        text: str = self.service.llm.tokenizer.decode(list(cast(Sequence[int], prompt)), skip_special_tokens=False)
        return text

    def _prompt_entries(self, index: int) -> list[TokenLogprob | None]:
        """Return the prompt's tokens; the first has no log-probability: None."""
        scored = self.requests[index - index % self.n].prompt_logprobs
        return [None, *scored] if scored is not None else []

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob | None], offsets: Sequence[int]) -> dict[str, Any]:
        first = self.requests[index].tokens[0]
        tokens, values, tops = [], [], []
        for entry in entries:
            text = self.service.token_text(first if entry is None else entry.token_id)[0]
            tokens.append(text)
            values.append(None if entry is None else entry.logprob)
            best = {} if entry is None else {t: value for t, _, value in self.service.top(entry)}
            if entry is not None:
                best.setdefault(text, entry.logprob)
            tops.append(None if entry is None else best)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts as a list: a list of integers is one prompt."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return list(cast(list[Prompt], given))
