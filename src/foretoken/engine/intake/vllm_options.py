"""Options of vLLM's ``LLM``: values that always hold here are accepted, unsupported ones are refused with a remedy.

Nothing is taken in silence: an option that changes nothing is named in one line of the log, and a value that would
change something is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sized
from dataclasses import fields
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import Made, plain, reject_unknown_keywords
from foretoken.options.sampling import SamplingParams

log = logging.getLogger(__name__)

_NOTHING_TO_SET = (  # of memory, kernels, compilation, reading of weights, and logging
    *("gpu_memory_utilization", "swap_space", "enforce_eager", "disable_log_stats", "block_size", "max_logprobs"),
    *("enable_chunked_prefill", "disable_custom_all_reduce", "max_seq_len_to_capture", "compilation_config"),
    *("async_scheduling", "enable_log_requests", "disable_log_requests", "num_gpu_blocks_override"),
    *("kv_cache_memory_bytes", "attention_backend", "attention_config", "kernel_config", "moe_backend", "mamba_config"),
    *("optimization_level", "cuda_graph_sizes", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("num_lookahead_slots", "num_scheduler_steps", "multi_step_stream_outputs", "stream_interval"),
    *("use_v2_block_manager", "disable_async_output_proc", "disable_cascade_attn", "disable_hybrid_kv_cache_manager"),
    *("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold", "preemption_mode"),
    *("scheduler_delay_factor", "prefix_caching_hash_algo", "mamba_block_size", "calculate_kv_scales"),
    *("safetensors_load_strategy", "max_parallel_loading_workers", "pt_load_map_location", "use_tqdm_on_load"),
    # of adapters, each of which comes with its request
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras", "lora_dtype"),
    *("model_loader_extra_config", "ignore_patterns", "tokenizer_pool_size", "tokenizer_pool_type"),
    *("tokenizer_pool_extra_config", "aggregate_engine_logging", "show_hidden_metrics_for_version"),
    *("ray_workers_use_nsight", "data_parallel_backend", "all2all_backend", "enable_dbo"),
    *("disable_nccl_for_dp_synchronization", "expert_placement_strategy", "guided_decoding_backend"),
    *("guided_decoding_disable_fallback", "skip_mm_profiling", "mm_processor_cache_gb", "mm_processor_cache_type"),
    *("mm_encoder_tp_mode", "mm_encoder_attn_backend", "disable_mm_preprocessor_cache", "disable_chunked_mm_input"),
    # of images and sounds, which are refused where they come
    *("limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "interleave_mm_strings", "video_pruning_rate"),
    *("allowed_local_media_path", "allowed_media_domains"),
)
_ONLY: Mapping[str, tuple[Any, ...]] = {  # None and empty values have no effect, whatever the name
    "tokenizer_mode": ("auto", "hf"),
    "load_format": ("auto", "safetensors"),
    "config_format": ("auto", "hf"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "convert": ("auto", "none"),
    "model_impl": ("auto", "transformers"),
    "scheduling_policy": ("fcfs",),
    "logprobs_mode": ("raw_logprobs",),
    "distributed_executor_backend": ("mp", "uni"),
    "spec_decoding_acceptance_method": ("rejection_sampler",),
    "lora_extra_vocab_size": (256,),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("decode_context_parallel_size",), (1,)),
    **dict.fromkeys(("cpu_offload_gb", "num_redundant_experts"), (0,)),
    **dict.fromkeys(("worker_cls", "mamba_cache_dtype", "mamba_ssm_cache_dtype"), ("auto",)),
    **dict.fromkeys(("skip_tokenizer_init", "enable_lora_bias"), (False,)),
    **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "enable_sleep_mode", "enable_prompt_adapter"), (False,)),
    **dict.fromkeys(("data_parallel_hybrid_lb", "enable_prompt_embeds", "enable_mm_embeds"), (False,)),
    **dict.fromkeys(("disable_sliding_window", "kv_sharing_fast_prefill"), (False,)),
    **dict.fromkeys(("enable_return_routed_experts", "speculative_disable_mqa_scorer"), (False,)),
    **dict.fromkeys(("guided_decoding_disable_any_whitespace",), (False,)),
    **dict.fromkeys(("guided_decoding_disable_additional_properties",), (False,)),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"), ()),
    **dict.fromkeys(("data_parallel_address", "data_parallel_rpc_port", "eplb_config", "scheduler_cls"), ()),
    **dict.fromkeys(("quantization", "tokenizer", "hf_overrides", "hf_config_path", "model_weights"), ()),
    **dict.fromkeys(("rope_scaling", "rope_theta", "override_attention_dtype", "additional_config"), ()),
    **dict.fromkeys(("tokenizer_revision", "code_revision", "download_dir", "hf_token", "served_model_name"), ()),
    **dict.fromkeys(("io_processor_plugin", "default_mm_loras"), ()),
    **dict.fromkeys(("long_lora_scaling_factors", "logits_processors"), ()),
    **dict.fromkeys(("logits_processor_pattern", "pooler_config", "override_pooler_config"), ()),
    **dict.fromkeys(("reasoning_parser", "reasoning_config", "structured_outputs_config"), ()),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "ec_transfer_config", "weight_transfer_config"), ()),
    **dict.fromkeys(("override_generation_config", "profiler_config", "otlp_traces_endpoint"), ()),
    **dict.fromkeys(("collect_detailed_traces", "worker_extension_cls", "max_num_batched_tokens"), ()),
    **dict.fromkeys(("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max"), ()),
    **dict.fromkeys(("ngram_prompt_lookup_min", "speculative_draft_tensor_parallel_size"), ()),
    **dict.fromkeys(("speculative_disable_by_batch_size", "speculative_max_model_len"), ()),
    **dict.fromkeys(("speculative_model_quantization", "disable_logprobs_during_spec_decoding"), ()),
    **dict.fromkeys(("typical_acceptance_sampler_posterior_alpha",), ()),
    **dict.fromkeys(("typical_acceptance_sampler_posterior_threshold",), ()),
}
_NO_VECTORS = (
    "text is all that is made here; SamplingParams(prompt_logprobs=1, max_tokens=1) says how probable a text is"
)
_ADAPTERS = "an adapter comes with its request, generate(..., lora_request=LoRARequest('name', 1, '/path'))"
_ONE_DEVICE = "a model runs on one device, in this very process: leave it out"
_TEXT_ONLY = "text and token ids are all that is read here: leave it out"
_OF_THE_CHECKPOINT = "the checkpoint says it, in its config.json: leave it out"
_HUB = "the hub's own settings hold, {}"
_SPECULATION = "it goes into speculative_config={'method': ..., 'num_speculative_tokens': ...}"
_INSTEAD = {  # of what _ONLY refuses
    "quantization": "a checkpoint says itself how it is quantised; dtype='int8' or 'int4' rounds any other",
    "load_format": "random weights are the model 'shape:100m' of foretoken-lab",
    "tokenizer": "the tokenizer is the checkpoint's; prompts may be ids, {'prompt_token_ids': [...]}",
    "skip_tokenizer_init": "the tokenizer is the checkpoint's; prompts may be ids, {'prompt_token_ids': [...]}",
    "served_model_name": "only a server has one, foretoken serve --served-model-name",
    "reasoning_parser": "a server separates reasoning, foretoken serve --reasoning",
    "override_generation_config": "write llm.generate(..., SamplingParams(...))",
    "disable_sliding_window": "write max_model_len=WINDOW, which no sequence leaves",
    "cpu_offload_gb": "weights lie where device= says; dtype='int8' or 'int4' halves or quarters them, on a CPU",
    "distributed_executor_backend": "foretoken serve --ray runs replicas on Ray; a model runs on one device",
    "scheduling_policy": "requests begin in the order in which they come",
    "logprobs_mode": "log-probabilities are the model's own, before temperature and filters",
    "max_num_batched_tokens": "it is called max_rows_per_step",
    "hf_token": _HUB.format("HF_TOKEN"),
    "download_dir": _HUB.format("HF_HOME"),
    "speculative_model": "write speculative_config={'method': 'draft_model', 'model': ...}",
    "num_speculative_tokens": _SPECULATION,
    **dict.fromkeys(("code_revision", "tokenizer_revision"), "revision= holds for all files of a checkpoint"),
    **dict.fromkeys(("hf_overrides", "hf_config_path", "rope_scaling", "rope_theta"), _OF_THE_CHECKPOINT),
    **dict.fromkeys(
        ("logits_processors", "logits_processor_pattern"),
        "use logit_bias, bad_words or allowed_token_ids of SamplingParams",
    ),
    **dict.fromkeys(("runner", "task", "convert", "pooler_config", "override_pooler_config"), _NO_VECTORS),
    **{
        name: _SPECULATION
        for name in _ONLY
        if name.startswith(("speculative_", "typical_", "spec_")) and name != "speculative_model"
    },
    **dict.fromkeys(
        ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
        "it goes into speculative_config={'method': 'ngram', 'prompt_lookup_max': ...}",
    ),
    **{name: _ONE_DEVICE for name in _ONLY if "parallel_" in name or "eplb" in name or name == "num_redundant_experts"},
    **{name: _ADAPTERS for name in _ONLY if "lora" in name or name == "enable_prompt_adapter"},
    **{name: _TEXT_ONLY for name in _ONLY if name == "io_processor_plugin" or "embeds" in name},
}
_ELSEWHERE = {"method": "it goes into speculative_config={'method': ...}"}
METHODS = {"eagle3": "eagle"}
"""vLLM's further names of methods, where the same options mean the same."""

_METHODS = {
    "beam_search": "draw several completions with SamplingParams(n=4, temperature=0.8) and compare cumulative_logprob",
    **dict.fromkeys(("score", "encode", "embed", "classify", "reward"), _NO_VECTORS),
    "get_default_beam_search_params": "there is no beam search",
    **dict.fromkeys(("apply_model", "collective_rpc"), "llm.target.model is the model, in this very process"),
    **dict.fromkeys(("sleep", "wake_up", "shutdown"), "llm.close() ends it"),
    **dict.fromkeys(("start_profile", "stop_profile"), "outputs say in metrics where the time went"),
    "set_tokenizer": "the tokenizer is the checkpoint's; prompts may be ids, {'prompt_token_ids': [...]}",
    **dict.fromkeys(("enqueue", "wait_for_completion"), "llm.generate(prompts) takes all of them at once, and waits"),
    "llm_engine": "llm.engine is the engine, llm.model_config the checkpoint's config",
    "preprocess_chat": "llm.chat_prompt(messages) is the prompt of a conversation",
    "reset_prefix_cache": "a request has a cache_salt, and LLM(enable_prefix_caching=False) keeps nothing",
}
_ARGUMENTS = {
    **{each.name: f"write sampling_params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    "prompt_token_ids": "write prompts=[{'prompt_token_ids': [...]}, ...]",
    "priority": "requests begin in the order in which they come",
    "chat_template_content_format": "contents are texts, or lists of parts of text: leave it out",
    "mm_processor_kwargs": "text is all that is read here",
}
_UNASKED: Mapping[str, tuple[Any, ...]] = {  # what vLLM's own defaults say
    **dict.fromkeys(("prompt_token_ids", "priority", "mm_processor_kwargs"), (None,)),
    "chat_template_content_format": (None, "auto"),
}
UNASKED_SPECULATION: Mapping[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "rejection_sample_method": ("standard",),
    "acceptance_method": ("rejection_sampler",),
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab", "enable_adaptive_verification"), (None, False)),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_eagle_block_drop"), (None, False)),
    **dict.fromkeys(("use_local_argmax_reduction", "disable_mqa_scorer", "disable_logprobs"), (None, False)),
    **dict.fromkeys(("disable_by_batch_size", "max_model_len", "quantization", "revision", "code_revision"), (None,)),
    "enforce_eager": (None, False, True),
    **dict.fromkeys(("speculative_token_tree", "tensor_parallel_size", "draft_load_config"), (None,)),
    **dict.fromkeys(("moe_backend", "attention_backend", "kv_cache_dtype", "dspark_draft_topk", "model"), (None,)),
    **dict.fromkeys(("index_share_for_mtp_iteration", "num_speculative_tokens_per_batch_size"), (None,)),
    **dict.fromkeys(("synthetic_acceptance_rates", "synthetic_acceptance_length"), (None,)),
    **dict.fromkeys(("posterior_threshold", "posterior_alpha", "prompt_lookup_min", "prompt_lookup_max"), (None,)),
}
_SUFFIXES = "max_match, max_branching and min_score are set here, see 'foretoken methods suffix'"
_ONE_PLACE = "a drafter is loaded as its target is, on the same device: leave it out"
_LOSSY = "lossy rules are verifiers here, see 'foretoken methods'"
SPECULATION = {  # keys of vLLM's speculative_config, and what to say of them
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size"), "a model runs on one device: leave it out"),
    "disable_by_batch_size": "nothing is drafted where that was measured to be slower: leave it out",
    "num_speculative_tokens_per_batch_size": "without num_speculative_tokens the length follows measurements, "
    "also of the batch: leave it out",
    "enable_adaptive_verification": "without num_speculative_tokens the length follows measurements: leave it out",
    "speculative_token_tree": "use tree=... and num_drafts=N of method 'draft_model' for a tree",
    "max_model_len": "a drafter reads what the target reads: leave it out",
    "enforce_eager": "there are no graphs to switch off: leave it out",
    "model": "it drafts without a second model: leave it out",
    "draft_sample_method": "how drafts are drawn follows the verifier, for example verifier='ratio' or 'match'",
    "use_heterogeneous_vocab": "a draft model of another vocabulary is recognised; vocabulary='shared' is vLLM's way",
    "parallel_drafting": "method 'diffuspec' fills a draft in one pass: leave it out",
    "disable_padded_drafter_batch": "drafts of different lengths lie packed, without padding: leave it out",
    "disable_eagle_block_drop": "prefixes are kept to the token: leave it out",
    **dict.fromkeys(("attention_backend", "moe_backend", "draft_load_config", "kv_cache_dtype"), _ONE_PLACE),
    **dict.fromkeys(("quantization", "revision", "code_revision"), _ONE_PLACE),
    **dict.fromkeys(("use_local_argmax_reduction", "disable_mqa_scorer", "disable_logprobs"), "leave it out"),
    **dict.fromkeys(("index_share_for_mtp_iteration", "dspark_draft_topk"), "leave it out"),
    **dict.fromkeys(("synthetic_acceptance_rates", "synthetic_acceptance_length"), "acceptance is measured"),
    **dict.fromkeys(("posterior_threshold", "posterior_alpha"), f"{_LOSSY}: typical.epsilon of verifier 'typical'"),
    **dict.fromkeys(("acceptance_method", "rejection_sample_method"), "it is called verifier"),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"), _SUFFIXES),
    **dict.fromkeys(("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"), _SUFFIXES),
}


class AbsentMethod(ConfigError, AttributeError):
    """A method of vLLM's that is not here; ``hasattr`` says so, too."""


def absent(name: str, methods: Mapping[str, str] = _METHODS, *, owner: str = "LLM") -> AttributeError:
    """The message for an attribute that ``LLM``, or another class with methods of vLLM's, does not have."""
    if name in methods:
        return AbsentMethod(f"{owner} has no '{name}': {methods[name]}")
    return AttributeError(f"'{owner}' object has no attribute '{name}'")


def arguments(function: Made) -> Made:
    """Refuse a call's arguments that are not here, with what takes their place; see
    :func:`core.plain.reject_unknown_keywords`.

    Those that are as vLLM has them by default ask for nothing, and are left out.
    """
    return reject_unknown_keywords(function, _ARGUMENTS, _UNASKED)


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown options and unsupported values.

    Args:
        options: by name.
        known: the names of options that there are.
    Raises:
        ConfigError: with the nearest name, or what takes its place.
    """
    idle = []
    for name, value in options.items():
        if name in _ONLY:
            if not _asks_for_nothing(plain(value)) and plain(value) not in _ONLY[name]:
                raise ConfigError(f"{name}={value!r:.60} is not supported: {_INSTEAD.get(name, 'leave it out')}")
            idle.append(name)
        elif name in _NOTHING_TO_SET:
            idle.append(name)
        else:
            raise ConfigError(f"LLM has no '{name}': {_ELSEWHERE.get(name) or nearest(name, known)}")
    if idle:
        log.warning("options that change nothing here: %s", ", ".join(sorted(idle)))


def _asks_for_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Sized) and not value)
