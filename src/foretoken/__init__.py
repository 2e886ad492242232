"""Foretoken: speculative decoding for Hugging Face language models.

The public names are imported on first use, so that ``import foretoken`` takes milliseconds and does not import torch.
"""

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
    "LoRARequest": "foretoken.lora.request",
}

_OF_VLLM = {  # names in vLLM's examples, and their replacements
    **dict.fromkeys(("EngineArgs", "LLMEngine"), "LLM(...) takes the arguments itself"),
    **dict.fromkeys(("AsyncEngineArgs", "AsyncLLMEngine"), "AsyncLLM(...) takes the arguments itself"),
    "GuidedDecodingParams": "write SamplingParams(structured_outputs={'choice': [...]}), a mapping of its fields",
    "BeamSearchParams": "there is no beam search; draw several completions with SamplingParams(n=4, temperature=0.8)",
    "RequestOutputKind": "use stream(...) for deltas, generate(...) for whole outputs",
    "PoolingParams": "only text is generated here",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("foretoken")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _OF_VLLM:  # an AttributeError's message would not appear in "from foretoken import ..."
        raise ImportError(f"foretoken has no '{name}': {_OF_VLLM[name]}")
    else:
        raise AttributeError(f"module 'foretoken' has no attribute '{name}'")
    globals()[name] = value  # later look-ups find the name directly
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
