"""Options of vLLM's ``LLM`` that code brings along: those that ask for what is so here, and those that cannot be had.

Nothing is taken in silence: an option that changes nothing is named in one line of the log, and a value that would
change something is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import Made, misspelt, plain
from foretoken.core.sampling import SamplingParams

log = logging.getLogger(__name__)

_NOTHING_TO_SET = (  # how memory is reserved and kernels are compiled
    *("gpu_memory_utilization", "swap_space", "enforce_eager", "disable_log_stats", "block_size", "max_logprobs"),
    *("enable_chunked_prefill", "disable_custom_all_reduce", "max_seq_len_to_capture", "compilation_config"),
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "cpu_offload_gb": (0,),
    "quantization": (None,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto", "hf"),
    "load_format": ("auto", "safetensors"),
    "config_format": ("auto", "hf"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "enable_lora": (False,),
    "hf_overrides": (None,),
}
_ELSEWHERE = {
    "max_num_batched_tokens": "it is called max_rows_per_step",
    "num_speculative_tokens": "it goes into speculative_config={'method': ..., 'num_speculative_tokens': ...}",
    "method": "it goes into speculative_config={'method': ...}",
    "speculative_model": "write speculative_config={'method': 'draft_model', 'model': ...}",
}

_NO_VECTORS = (
    "text is all that is made here; SamplingParams(prompt_logprobs=1, max_tokens=1) says how probable a text is"
)
_METHODS = {
    "beam_search": "draw several completions with SamplingParams(n=4, temperature=0.8) and compare cumulative_logprob",
    **dict.fromkeys(("score", "encode", "embed", "classify", "reward"), _NO_VECTORS),
    "get_default_beam_search_params": "there is no beam search",
    **dict.fromkeys(("apply_model", "collective_rpc"), "llm.target.model is the model, in this very process"),
    **dict.fromkeys(("sleep", "wake_up"), "llm.close() ends it"),
    "llm_engine": "llm.engine is the engine, llm.model_config the checkpoint's config",
    "preprocess_chat": "llm.chat_prompt(messages) is the prompt of a conversation",
    "reset_prefix_cache": "a request has a cache_salt, and LLM(enable_prefix_caching=False) keeps nothing",
}
_ARGUMENTS = {
    **{each.name: f"write sampling_params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    "lora_request": "an adapter is merged when it is loaded, LLM('/path/to/adapter')",
    "prompt_token_ids": "write prompts=[{'prompt_token_ids': [...]}, ...]",
    "priority": "requests begin in the order in which they come",
    "chat_template_content_format": "contents are texts, or lists of parts of text: leave it out",
    "mm_processor_kwargs": "text is all that is read here",
}
_UNASKED = ("lora_request", "prompt_token_ids", "priority", "mm_processor_kwargs")  # by vLLM's own default, None


class AbsentMethod(ConfigError, AttributeError):
    """A method of vLLM's that is not here; ``hasattr`` says so, too."""


def absent(name: str) -> AttributeError:
    """What is said of an attribute that ``LLM`` does not have."""
    if name in _METHODS:
        return AbsentMethod(f"LLM has no '{name}': {_METHODS[name]}")
    return AttributeError(f"'LLM' object has no attribute '{name}'")


def arguments(function: Made) -> Made:
    """Refuse a call's arguments that are not here, with what takes their place; see :func:`core.plain.misspelt`.

    Those of vLLM's that are None ask for nothing, and are left out.
    """
    checked = misspelt(function, _ARGUMENTS)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        asked = {key: each for key, each in keywords.items() if each is not None or key not in _UNASKED}
        return checked(*args, **asked)

    return call  # type: ignore[return-value]


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse what is not known here, or asks for what there is not.

    Args:
        options: by name.
        known: the names of options that there are.
    Raises:
        ConfigError: with the nearest name, or what takes its place.
    """
    idle = []
    for name, value in options.items():
        if name in _ONLY:
            if plain(value) not in _ONLY[name]:
                raise ConfigError(f"{name}={value!r:.60} is not supported: leave it out")
            idle.append(name)
        elif name in _NOTHING_TO_SET:
            idle.append(name)
        else:
            raise ConfigError(f"LLM has no '{name}': {_ELSEWHERE.get(name) or nearest(name, known)}")
    if idle:
        log.warning("options that change nothing here: %s", ", ".join(sorted(idle)))
