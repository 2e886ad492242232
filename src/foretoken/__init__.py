"""Foretoken: speculative decoding for Hugging Face language models.

The public names are imported on first use, so that ``import foretoken`` costs milliseconds and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM
    from foretoken.options.sampling import SamplingParams
    from foretoken.serve.async_llm import AsyncLLM

    __version__: str

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "foretoken.serve.async_llm",
    "LLM": "foretoken.engine.llm",
    "SamplingParams": "foretoken.options.sampling",
    **dict.fromkeys(("CompletionOutput", "RequestOutput"), "foretoken.outputs"),
    "StructuredOutputsParams": "foretoken.sampling_params",
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "foretoken.inputs"),
}

_OF_VLLM = {  # names that its examples import, and what takes their place
    **dict.fromkeys(("EngineArgs", "LLMEngine"), "LLM(...) takes the arguments itself"),
    **dict.fromkeys(("AsyncEngineArgs", "AsyncLLMEngine"), "AsyncLLM(...) takes the arguments itself"),
    "GuidedDecodingParams": "write SamplingParams(structured_outputs={'choice': [...]}), a mapping of its fields",
    "BeamSearchParams": "there is no beam search; draw several completions with SamplingParams(n=4, temperature=0.8)",
    "LoRARequest": "an adapter is merged when it is loaded, LLM('/path/to/adapter')",
    "RequestOutputKind": "stream(...) gives what is new, generate(...) the whole",
    "PoolingParams": "text is all that is made here",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("foretoken")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _OF_VLLM:  # no AttributeError: "from foretoken import ..." would not show what it says
        raise ImportError(f"foretoken has no '{name}': {_OF_VLLM[name]}")
    else:
        raise AttributeError(f"module 'foretoken' has no attribute '{name}'")
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
