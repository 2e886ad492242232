"""Options of vLLM's ``LLM`` that code brings along: those that ask for what is so here, and those that cannot be had.

Nothing is taken in silence: an option that changes nothing is named in one line of the log, and a value that would
change something is refused.
"""

from __future__ import annotations

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
    *("async_scheduling", "enable_log_requests", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
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
    "convert": ("auto", "none"),
    "model_impl": ("auto", "transformers"),
    "scheduling_policy": ("fcfs",),
    "logprobs_mode": ("raw_logprobs",),
    "enable_expert_parallel": (False,),
    "enable_sleep_mode": (False,),
    "distributed_executor_backend": (None, "mp", "uni"),
    **dict.fromkeys(("tokenizer_revision", "code_revision", "download_dir", "hf_token", "served_model_name"), (None,)),
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs", "pooler_config", "logits_processors"), (None,)),
    **dict.fromkeys(("reasoning_parser", "kv_transfer_config", "structured_outputs_config"), (None,)),
    **dict.fromkeys(("attention_config", "override_generation_config"), (None,)),
}
_MERGED = "an adapter is merged when it is loaded, LLM('/path/to/adapter')"
_INSTEAD = {  # of what _ONLY refuses
    "quantization": "a checkpoint says itself how it is quantised; dtype='int8' or 'int4' rounds any other",
    "load_format": "random weights are the model 'shape:100m'",
    "enable_lora": _MERGED,
    "override_generation_config": "write llm.generate(..., SamplingParams(...))",
    "hf_token": "the hub's own settings hold, HF_TOKEN",
    "download_dir": "the hub's own settings hold, HF_HOME",
}
_ELSEWHERE = {
    "max_num_batched_tokens": "it is called max_rows_per_step",
    "num_speculative_tokens": "it goes into speculative_config={'method': ..., 'num_speculative_tokens': ...}",
    "method": "it goes into speculative_config={'method': ...}",
    **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras"), _MERGED),
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
    **dict.fromkeys(("sleep", "wake_up", "shutdown"), "llm.close() ends it"),
    **dict.fromkeys(("start_profile", "stop_profile"), "outputs say in metrics where the time went"),
    "set_tokenizer": "the tokenizer is the checkpoint's; prompts may be ids, {'prompt_token_ids': [...]}",
    "llm_engine": "llm.engine is the engine, llm.model_config the checkpoint's config",
    "preprocess_chat": "llm.chat_prompt(messages) is the prompt of a conversation",
    "reset_prefix_cache": "a request has a cache_salt, and LLM(enable_prefix_caching=False) keeps nothing",
}
_ARGUMENTS = {
    **{each.name: f"write sampling_params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    "lora_request": _MERGED,
    "prompt_token_ids": "write prompts=[{'prompt_token_ids': [...]}, ...]",
    "priority": "requests begin in the order in which they come",
    "chat_template_content_format": "contents are texts, or lists of parts of text: leave it out",
    "mm_processor_kwargs": "text is all that is read here",
}
_UNASKED: Mapping[str, tuple[Any, ...]] = {  # what vLLM's own defaults say
    **dict.fromkeys(("lora_request", "prompt_token_ids", "priority", "mm_processor_kwargs"), (None,)),
    "chat_template_content_format": (None, "auto"),
}
UNASKED_SPECULATION: Mapping[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "parallel_drafting": (None, False),
    **dict.fromkeys(("disable_by_batch_size", "max_model_len", "quantization", "revision", "code_revision"), (None,)),
    **dict.fromkeys(("enforce_eager", "speculative_token_tree"), (None,)),
}
_SUFFIXES = "max_match, max_branching and min_score are set here, see 'foretoken methods suffix'"
SPECULATION = {  # keys of vLLM's speculative_config, and what to say of them
    "draft_tensor_parallel_size": "a model runs on one device: leave it out",
    "disable_by_batch_size": "nothing is drafted where that was measured to be slower: leave it out",
    "speculative_token_tree": "a tree is asked for by tree=... and num_drafts=N of method 'draft_model'",
    "max_model_len": "a drafter reads what the target reads: leave it out",
    "enforce_eager": "there are no graphs to switch off: leave it out",
    **dict.fromkeys(("acceptance_method", "rejection_sample_method"), "it is called verifier"),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"), _SUFFIXES),
    **dict.fromkeys(("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"), _SUFFIXES),
}


class AbsentMethod(ConfigError, AttributeError):
    """A method of vLLM's that is not here; ``hasattr`` says so, too."""


def absent(name: str, methods: Mapping[str, str] = _METHODS, *, owner: str = "LLM") -> AttributeError:
    """What is said of an attribute that ``LLM``, or another owner of methods, does not have."""
    if name in methods:
        return AbsentMethod(f"{owner} has no '{name}': {methods[name]}")
    return AttributeError(f"'{owner}' object has no attribute '{name}'")


def arguments(function: Made) -> Made:
    """Refuse a call's arguments that are not here, with what takes their place; see :func:`core.plain.misspelt`.

    Those that are as vLLM has them by default ask for nothing, and are left out.
    """
    return misspelt(function, _ARGUMENTS, _UNASKED)


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
                raise ConfigError(f"{name}={value!r:.60} is not supported: {_INSTEAD.get(name, 'leave it out')}")
            idle.append(name)
        elif name in _NOTHING_TO_SET:
            idle.append(name)
        else:
            raise ConfigError(f"LLM has no '{name}': {_ELSEWHERE.get(name) or nearest(name, known)}")
    if idle:
        log.warning("options that change nothing here: %s", ", ".join(sorted(idle)))
