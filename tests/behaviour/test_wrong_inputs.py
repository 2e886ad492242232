"""Whatever is given where: it is understood, or refused in words, before anything runs. No error of Python's own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import AsyncLLM
from foretoken.core.errors import ForetokenError
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import assert_idle, base, target

ONE = SamplingParams(max_tokens=1)
SAID = [{"role": "user", "content": "x"}]
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1.5, math.nan, -math.inf, 10**9, 10**30, 2**63),
    *("", "x", "a" * 300, "\ud800", b"x", [], [[]], [None], ["a", 1], {}, {"a": 1}, {1: 2}, (), {1}, object(), int),
    *(np.array([]), np.array([[1]]), np.float64("nan"), torch.tensor([1.0]), range(3), [8192], {8192: 1}, complex(1)),
]
PLACES: dict[str, Callable[[Any], Any]] = {
    "generate": lambda odd: base().generate(odd, ONE),
    "generate, one of several": lambda odd: base().generate([odd], ONE),
    "prompt": lambda odd: base().generate({"prompt": odd}, ONE),
    "prompt_token_ids": lambda odd: base().generate({"prompt_token_ids": odd}, ONE),
    "params": lambda odd: base().generate("x", [odd]),
    "chat": lambda odd: base().chat(odd, ONE),
    "chat, one of several": lambda odd: base().chat([odd], ONE),
    "role": lambda odd: base().chat([{"role": odd, "content": "x"}], ONE),
    "content": lambda odd: base().chat([{"role": "user", "content": odd}], ONE),
    "part": lambda odd: base().chat([{"role": "user", "content": [{"type": "text", "text": odd}]}], ONE),
    "tools": lambda odd: base().chat(SAID, ONE, tools=odd),
    "chat_template": lambda odd: base().chat(SAID, ONE, chat_template=odd),
    "chat_template_kwargs": lambda odd: base().chat(SAID, ONE, chat_template_kwargs=odd),
    "chat_template_kwargs, a value": lambda odd: base().chat(SAID, ONE, chat_template_kwargs={"x": odd}),
    "add_generation_prompt": lambda odd: base().chat(SAID, ONE, add_generation_prompt=odd),
    "continue_final_message": lambda odd: base().chat(
        SAID, ONE, add_generation_prompt=False, continue_final_message=odd
    ),
    "progress": lambda odd: base().generate("x", ONE, progress=None if callable(odd) else odd),
    "on_prefill": lambda odd: list(base().stream("x", ONE, on_prefill=None if callable(odd) else odd)),
    "stream": lambda odd: list(base().stream(odd, ONE)),
    "max_draft": lambda odd: base().new_requests("x", max_draft=odd),
    "new_requests": lambda odd: base().new_requests("x", odd),
    "cache_salt": lambda odd: base().new_requests("x", cache_salt=odd),
    "output_of": lambda odd: base().output_of(odd),
    "output_of, the prompt": lambda odd: base().output_of(base().new_requests("x"), odd),
    "with_method": lambda odd: base().with_method(odd),
    "from_target": lambda odd: LLM.from_target(odd),
    "AsyncLLM": lambda odd: AsyncLLM(base(), max_queue=odd).loop.close(),
    "AsyncLLM, params": lambda odd: asked_async(odd),
    "from_dict": SamplingParams.from_dict,
    "speculative_config": lambda odd: LLM.from_target(target(), speculative_config=odd),
}
PLACES |= {
    f"structured_outputs.{name}": lambda odd, name=name: base().generate(
        "x", SamplingParams(max_tokens=1, structured_outputs={name: odd})
    )
    for name in ("json", "regex", "choice")
}
PLACES |= {
    key: lambda odd, key=key: LLM.from_target(target(), speculative_config={"method": "ngram", key: odd})
    for key in (
        "method",
        "model",
        "verifier",
        "num_speculative_tokens",
        "executor",
        "lane",
        "plan",
        "prompt_lookup_max",
        "odd",
    )
}
PLACES |= {
    key: lambda odd, key=key: LLM.from_target(target(), **{key: odd})
    for key in ("max_num_seqs", "max_rows_per_step", "seed", "default_params", "enable_prefix_caching")
}
PLACES["a model"] = lambda odd: LLM(odd)
PLACES["a datastore"] = lambda odd: LLM.from_target(target(), speculative_config={"method": "rest", "datastore": odd})
PLACES |= {  # wrong values are refused before a model is loaded
    key: lambda odd, key=key: LLM(**{"model": "nowhere/at all", key: odd})
    for key in (
        *("dtype", "device", "threads", "max_model_len", "generation_config", "revision", "tensor_parallel_size"),
        *("kv_cache_dtype", "trust_remote_code", "max_num_seqs"),
    )
}


def asked_async(params: Any) -> None:
    """One answer of an engine loop, after which it ends."""

    async def ask() -> None:
        async with AsyncLLM(base()) as llm:
            await llm.generate("x", ONE if params is None else params)

    asyncio.run(ask())


def answered(params: SamplingParams) -> None:
    if params.n > 2 or params.max_tokens > 1:
        return
    (output,) = base().generate("x", params)
    assert output.error is None or "no token is possible" in output.error


for each in fields(SamplingParams):
    PLACES[f"SamplingParams.{each.name}"] = lambda odd, name=each.name: answered(
        SamplingParams(**{"max_tokens": 1, name: odd})
    )


@pytest.mark.parametrize("place", PLACES)
def test_unusual_inputs_are_accepted_or_refused_with_a_message(place, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    said = []
    for odd in ODD:
        try:
            PLACES[place](odd)
        except ForetokenError as error:
            said.append(str(error))
    assert said
    assert all(10 < len(each) < 800 and "\n" not in each.strip() for each in said), said
    assert_idle(base())
