"""Requests without a model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from foretoken.core.laws import LawMaker
from foretoken.core.randomness import Streams
from foretoken.engine.request import Request
from foretoken.engine.text.detokenise import TextStream
from foretoken.options.sampling import SamplingParams

_ids = count()


def make_request(
    prompt: Iterable[int],
    *,
    tokenizer: Any = None,
    vocab_size: int = 100,
    context: int = 1000,
    end_ids: Iterable[int] = (),
    **params: Any,
) -> Request:
    """A request as LLM would make it; with a tokenizer it has text."""
    tokens = list(prompt)
    asked = SamplingParams(**params)
    stop_ids = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else frozenset(end_ids))
    return Request(
        request_id=next(_ids),
        tokens=tokens,
        num_prompt=len(tokens),
        params=asked,
        streams=Streams(0),
        laws=LawMaker(asked, tokens, vocab_size, stop_ids),
        stop_ids=stop_ids,
        max_total=min(len(tokens) + asked.max_tokens, context),
        text=None if tokenizer is None else TextStream(tokenizer, asked.stop_strings),
    )
