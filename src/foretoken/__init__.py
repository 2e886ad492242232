"""Foretoken: speculative decoding for Hugging Face language models.

The public names are imported on first use, so that ``import foretoken`` costs milliseconds and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.core.sampling import SamplingParams
    from foretoken.engine.llm import LLM
    from foretoken.serve.async_llm import AsyncLLM

    __version__: str

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "foretoken.serve.async_llm",
    "LLM": "foretoken.engine.llm",
    "SamplingParams": "foretoken.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("foretoken")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'foretoken' has no attribute '{name}'")
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
