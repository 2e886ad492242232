"""Code as it is written for vLLM's offline API, with the import changed; what differs is in docs/coming_from.md."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import pickle
from functools import cache

import numpy as np
import pytest

import foretoken
from foretoken import LLM, AsyncLLM, SamplingParams, zoo
from foretoken.core.errors import ConfigError, InputError, ModelError
from foretoken.engine.intake.vllm_options import check_options
from foretoken.engine.totals import Counter, Gauge, Vector
from helpers.zoo_llms import PROMPTS, assert_idle, base, greedy, ids, prompt_ids, target, with_config

QUESTION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What can I do for you?"},
    {"role": "user", "content": PROMPTS[0]},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@cache
def drafted() -> LLM:
    return with_config({"method": "suffix", "num_speculative_tokens": 4})


# ---------------------------------------------------------------- the basic examples


def test_prompts_with_sampling_params_by_position_and_by_name():
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=8)
    outputs = base().generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == ids(
        base().generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False)
    )


def test_streams_with_sampling_params_by_name():
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    texts = ["".join(piece.text for piece in base().stream(PROMPTS[0], sampling_params=params))]
    texts.append(base().generate(PROMPTS[0], params)[0].text)
    assert texts[0] == texts[1]
    *_, last = base().stream_chat(QUESTION, sampling_params=params)
    assert last.output.text == base().chat(QUESTION, params)[0].text


def test_a_conversation_alone_and_many_at_once(capsys):
    sampling_params = SamplingParams(max_tokens=8)
    (alone,) = drafted().chat(QUESTION, sampling_params, use_tqdm=False)
    many = drafted().chat([QUESTION] * 3, sampling_params=sampling_params, use_tqdm=True)
    assert ids(many) == [alone.token_ids] * 3
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


def test_a_chat_template_of_one_s_own():
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (output,) = base().chat(QUESTION, SamplingParams(max_tokens=4), chat_template=template)
    assert output.prompt_token_ids == prompt_ids(" ".join(each["content"] for each in QUESTION) + " ")


def test_default_params_are_taken_and_changed():
    sampling_params = base().get_default_sampling_params()
    sampling_params.max_tokens, sampling_params.ignore_eos = 5, True
    (output,) = base().generate(PROMPTS[0], sampling_params)
    assert len(output.token_ids) == 5
    assert base().default_params.max_tokens == 128
    copied = sampling_params.clone()
    assert copied == sampling_params
    copied.max_tokens = 6
    assert sampling_params.max_tokens == 5


def test_params_that_are_changed_while_a_request_runs_are_for_the_next():
    sampling_params = SamplingParams(max_tokens=12, ignore_eos=True)
    chunks = base().stream(PROMPTS[0], sampling_params)
    next(chunks)
    sampling_params.max_tokens = 2
    assert [*chunks][-1].output.token_ids == greedy(PROMPTS[0], 12)


def test_tools_are_shown_to_the_template_and_calls_go_on():
    messages = [{"role": "user", "content": "How warm is it in Dallas?"}]
    if "tools" not in str(base().get_tokenizer().chat_template):
        with pytest.raises(InputError, match="knows no tools"):
            base().chat(messages, tools=[WEATHER])
    template = "{{ tools | tojson }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    prompt = base().chat_prompt(messages, tools=[WEATHER], chat_template=template)["prompt_token_ids"]
    assert "get_current_weather" in base().get_tokenizer().decode(prompt)
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get_current_weather"}}]}
    messages += [called, {"role": "tool", "content": "85 degrees", "tool_call_id": "a"}]
    prompt = base().chat_prompt(messages, tools=[WEATHER], chat_template=template)["prompt_token_ids"]
    assert "tool: 85 degrees" in base().get_tokenizer().decode(prompt)


def test_content_in_parts_is_that_of_one_text():
    parts = [{"type": "text", "text": "How many days"}, {"type": "text", "text": "are in a week?"}]
    whole = base().chat_prompt([{"role": "user", "content": "How many days\nare in a week?"}])
    assert base().chat_prompt([{"role": "user", "content": parts}]) == whole
    with pytest.raises(InputError, match="message 0, part 1 is of type 'image_url'"):
        base().chat([{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_last_message_is_continued():
    begun = [QUESTION[-1], {"role": "assistant", "content": "Tom starts with"}]
    (output,) = base().chat(
        begun, SamplingParams(max_tokens=4), add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt.endswith("Tom starts with")
    with pytest.raises(ConfigError, match="add_generation_prompt=False"):
        base().chat(begun, continue_final_message=True)


def test_structured_outputs():
    sampling_params = SamplingParams(structured_outputs={"choice": ["Positive", "Negative"]})
    (output,) = base().generate("Classify this sentiment: it is wonderful!", sampling_params)
    assert output.outputs[0].text in ("Positive", "Negative")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    (output,) = base().generate("A number:", SamplingParams(structured_outputs={"json": schema}, max_tokens=30))
    assert 0 <= json.loads(output.text)["n"] <= 9


def test_speculation_shows_in_the_metrics():
    with with_config({"method": "suffix", "num_speculative_tokens": 3}) as llm:
        outputs = llm.generate(["The cat sat on the mat. " * 4] * 2, SamplingParams(max_tokens=12, ignore_eos=True))
        list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True)))
        found = {metric.name: metric for metric in llm.get_metrics()}
    kinds = {"num_requests_running": Gauge, "generation_tokens": Counter, "spec_decode_num_accepted_tokens": Counter}
    assert all(isinstance(found[f"vllm:{name}"], kind) for name, kind in kinds.items())
    assert found["vllm:generation_tokens"].value == 2 * 12 + 4
    assert found["vllm:request_success"].value == 3
    assert found["vllm:num_requests_running"].value == 0
    depths = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(depths, Vector)
    assert 0 < sum(depths.values) == found["vllm:spec_decode_num_accepted_tokens"].value
    assert found["vllm:spec_decode_num_drafts"].value > 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) <= sum(depths.values)


def test_a_block_ends_what_runs():
    with with_config(None) as llm:
        next(llm.stream(PROMPTS[0], SamplingParams(max_tokens=50)))
    assert_idle(llm)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("llm", [base, drafted], ids=["plain", "drafted"])
def test_why_a_text_ended(llm):
    tokens = greedy(PROMPTS[0], 12)
    text, before = (base().tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in (6, 5))
    stop = text[-3:]
    for params, reason, end in (
        ({"stop": [stop]}, stop, text[:-3]),
        ({"stop": [stop], "include_stop_str_in_output": True}, stop, text),
        ({"stop_token_ids": [tokens[5]]}, tokens[5], before),
        ({"stop_token_ids": [tokens[5]], "include_stop_str_in_output": True}, tokens[5], text),
    ):
        (output,) = llm().generate(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True, **params))
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", reason)
        assert output.text == end
        *_, last = llm().stream(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True, **params))
        assert (last.output.text, last.output.stop_reason) == (end, reason)
    (output,) = llm().generate(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize("llm", [base, drafted], ids=["plain", "drafted"])
def test_special_tokens_and_the_end_of_text_are_returned_on_request(llm):
    wanted = SamplingParams(max_tokens=200, skip_special_tokens=False, include_stop_str_in_output=True)
    (output,) = llm().chat(QUESTION[-1:], wanted)
    (plain,) = llm().chat(QUESTION[-1:], SamplingParams(max_tokens=200))
    end = base().tokenizer.decode([output.token_ids[-1]])
    assert output.token_ids[-1] in target().end_ids
    assert output.text == plain.text + end
    assert "".join(chunk.text for chunk in llm().stream_chat(QUESTION[-1:], wanted)) == output.text
    assert plain.stop_reason is None


def test_log_probabilities_of_a_whole_completion():
    outputs = base().generate(PROMPTS[:2], SamplingParams(max_tokens=5, logprobs=1, n=2, temperature=1.0, seed=1))
    for output in outputs:
        assert [each.index for each in output.outputs] == [0, 1]
        for each in output.outputs:
            assert each.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in each.logprobs))
        assert output.finished
    assert outputs[0].request_id != outputs[1].request_id
    assert base().generate(PROMPTS[0], SamplingParams(max_tokens=2))[0].cumulative_logprob is None


# ---------------------------------------------------------------- arguments


def test_arrays_are_prompts():
    tokens = prompt_ids(PROMPTS[3])
    for prompt in (np.array(tokens), [np.int64(each) for each in tokens], {"prompt_token_ids": np.array(tokens)}):
        (output,) = base().generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        assert output.token_ids == greedy(PROMPTS[3], 4)
    pair = base().generate(np.array([[5, 6], [7, 8]]), SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids for output in pair] == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
        ({"quantization": "awq"}, "quantization='awq' is not supported"),
        ({"max_num_batched_tokens": 64}, "it is called max_rows_per_step"),
        ({"speculative_model": "x"}, "speculative_config="),
        ({"enable_lora_bias": True}, "lora_request=LoRARequest"),
        ({"override_generation_config": {"top_k": 1}}, "SamplingParams"),
        ({"load_format": "dummy"}, "shape:100m"),
        ({"qqq": 4}, "known(?!.*others)"),
        ({"max_seqs": 4}, "did you mean 'max_num_seqs'"),
        ({"threads": 100_000}, "threads=100000 must be"),
        ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"dtype": None}, "dtype=None is"),
        ({"device": 5}, "device=5"),
        ({"max_model_len": 10**9}, "4096"),
        ({"max_model_len": "x"}, "max_model_len='x'"),
        ({"revision": "main"}, "revision='main' goes with a hub id"),
        ({"trust_remote_code": "yes"}, "trust_remote_code='yes' must be"),
        ({"model": None}, "model=None is no name"),
        ({"model": "zoo:b\0"}, r"model='zoo:b\\x00' has the character '\\x00'"),
    ],
)
def test_options_that_cannot_be_had_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "zoo:base", **options})


OF_THE_ENGINE = [  # value that vLLM has by default -> arguments of its engine, of versions 0.7 to 0.15
    (
        None,
        (
            *("served_model_name", "tokenizer", "hf_config_path", "allowed_media_domains", "download_dir", "task"),
            *("safetensors_load_strategy", "cuda_graph_sizes", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
            *(
                "distributed_executor_backend",
                "data_parallel_rank",
                "data_parallel_start_rank",
                "kv_cache_memory_bytes",
            ),
            *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "all2all_backend"),
            *("max_parallel_loading_workers", "block_size", "code_revision", "rope_scaling", "rope_theta", "hf_token"),
            *("hf_overrides", "tokenizer_revision", "quantization", "limit_mm_per_prompt", "media_io_kwargs"),
            *("mm_processor_kwargs", "mm_processor_cache_type", "mm_encoder_attn_backend", "io_processor_plugin"),
            *("default_mm_loras", "max_cpu_loras", "num_gpu_blocks_override", "model_loader_extra_config"),
            *("ignore_patterns", "enable_chunked_prefill", "structured_outputs_config", "guided_decoding_backend"),
            *("guided_decoding_disable_fallback", "guided_decoding_disable_any_whitespace", "preemption_mode"),
            *("guided_decoding_disable_additional_properties", "logits_processor_pattern", "eplb_config"),
            *("show_hidden_metrics_for_version", "otlp_traces_endpoint", "collect_detailed_traces", "scheduler_cls"),
            *(
                "pooler_config",
                "override_pooler_config",
                "compilation_config",
                "kv_transfer_config",
                "kv_events_config",
            ),
            *("override_generation_config", "override_attention_dtype", "mamba_block_size", "additional_config"),
            *("logits_processors", "attention_backend", "attention_config", "kernel_config", "profiler_config"),
            *("weight_transfer_config", "ec_transfer_config", "long_lora_scaling_factors", "optimization_level"),
            *("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
            *("speculative_draft_tensor_parallel_size", "speculative_disable_by_batch_size", "max_num_batched_tokens"),
            *("typical_acceptance_sampler_posterior_alpha", "typical_acceptance_sampler_posterior_threshold"),
            *(
                "disable_logprobs_during_spec_decoding",
                "tokenizer_pool_extra_config",
                "reasoning_config",
                "mamba_config",
            ),
        ),
    ),
    (
        False,
        (
            *("skip_tokenizer_init", "enable_prompt_embeds", "data_parallel_hybrid_lb", "enable_expert_parallel"),
            *("enable_dbo", "disable_nccl_for_dp_synchronization", "enable_eplb", "disable_sliding_window"),
            *(
                "disable_cascade_attn",
                "disable_log_stats",
                "aggregate_engine_logging",
                "enforce_eager",
                "async_scheduling",
            ),
            *(
                "disable_custom_all_reduce",
                "enable_mm_embeds",
                "interleave_mm_strings",
                "disable_mm_preprocessor_cache",
            ),
            *("skip_mm_profiling", "enable_lora", "fully_sharded_loras", "ray_workers_use_nsight", "enable_sleep_mode"),
            *("disable_chunked_mm_input", "disable_hybrid_kv_cache_manager", "calculate_kv_scales", "enable_lora_bias"),
            *("kv_sharing_fast_prefill", "disable_async_output_proc", "enable_prompt_adapter", "disable_log_requests"),
            *("enable_log_requests", "enable_return_routed_experts", "speculative_disable_mqa_scorer"),
        ),
    ),
    ("", ("allowed_local_media_path", "reasoning_parser", "worker_extension_cls", "model_weights")),
    (
        "auto",
        (
            *("runner", "convert", "tokenizer_mode", "load_format", "config_format", "lora_dtype", "worker_cls"),
            *("model_impl", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "moe_backend"),
        ),
    ),
    (
        0,
        (
            *("num_redundant_experts", "cpu_offload_gb", "long_prefill_token_threshold", "num_lookahead_slots"),
            *("video_pruning_rate", "scheduler_delay_factor", "tokenizer_pool_size"),
        ),
    ),
    (
        1,
        (
            *("pipeline_parallel_size", "tensor_parallel_size", "decode_context_parallel_size", "data_parallel_size"),
            *("max_num_partial_prefills", "max_long_partial_prefills", "num_scheduler_steps", "stream_interval"),
            *("max_loras", "use_v2_block_manager", "multi_step_stream_outputs", "use_tqdm_on_load"),
        ),
    ),
    (16, ("max_lora_rank",)),
    (256, ("lora_extra_vocab_size",)),
    ("mp", ("data_parallel_backend",)),
    ("fcfs", ("scheduling_policy",)),
    ("linear", ("expert_placement_strategy",)),
    ("sha256", ("prefix_caching_hash_algo",)),
    ("cpu", ("pt_load_map_location",)),
    ("raw_logprobs", ("logprobs_mode",)),
    ("weights", ("mm_encoder_tp_mode",)),
    ("rejection_sampler", ("spec_decoding_acceptance_method",)),
    (0.9, ("gpu_memory_utilization", "swap_space", "mm_processor_cache_gb", "max_seq_len_to_capture", "max_logprobs")),
]
OF_A_REQUEST = [  # the same for its sampling params
    (
        None,
        (
            *("best_of", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
            *("guided_decoding", "extra_args", "skip_reading_prefix_cache", "thinking_token_budget", "output_kind"),
            *("repetition_detection", "trace_decode_token_ids", "stop_token_ids", "truncation_side"),
        ),
    ),
    (False, ("flat_logprobs", "skip_clone", "use_beam_search", "early_stopping")),
    (True, ("detokenize", "spaces_between_special_tokens")),
    (0, ("output_text_buffer_length", "routed_experts_prompt_start")),
]
OF_SPECULATION = [  # and for its speculative_config
    (
        None,
        (
            *("enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend"),
            *("attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision", "draft_load_config"),
            *("index_share_for_mtp_iteration", "num_speculative_tokens_per_batch_size", "dspark_draft_topk", "model"),
            *("synthetic_acceptance_rates", "synthetic_acceptance_length", "speculative_token_tree", "posterior_alpha"),
            *("disable_by_batch_size", "posterior_threshold", "prompt_lookup_min", "prompt_lookup_max"),
        ),
    ),
    (
        False,
        (
            *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
            *("use_heterogeneous_vocab", "parallel_drafting", "enable_adaptive_verification", "disable_mqa_scorer"),
            "disable_logprobs",
        ),
    ),
]
KNOWN = [name for name in inspect.signature(LLM).parameters if name != "others"]
UNHELPFUL = ("did you mean", "known:", "unexpected keyword")


def answers(call, table):
    """The result for every argument, with its default and with a value that has an effect."""
    for value, names in table:
        for name in names:
            for odd, given in ((False, value), (True, {"odd": 1})):
                try:
                    call(**{name: given})
                except ConfigError as error:
                    yield name, odd, str(error)
                else:
                    yield name, odd, ""


@pytest.mark.parametrize(
    ("call", "table"),
    [
        (lambda **given: check_options(given, KNOWN), OF_THE_ENGINE),
        (SamplingParams, OF_A_REQUEST),
        (lambda **given: LLM.from_target(target(), speculative_config={"method": "ngram", **given}), OF_SPECULATION),
    ],
    ids=["LLM", "SamplingParams", "speculative_config"],
)
def test_every_argument_of_vllm_s_has_an_answer_of_its_own(call, table):
    said = list(answers(call, table))
    assert len(said) > 30
    assert [(name, answer) for name, odd, answer in said if answer and not odd] == []  # its defaults are taken
    assert [(name, answer) for name, _, answer in said if any(each in answer for each in UNHELPFUL)] == []


def test_options_that_request_the_present_behaviour_are_accepted_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        llm = LLM(model="zoo:draft", tensor_parallel_size=1, gpu_memory_utilization=0.9, dtype=target().dtype)
    assert "options that change nothing here: gpu_memory_utilization, tensor_parallel_size" in caplog.text
    assert llm.generate("x", SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: base().generate("x", sampling_parms=None), ConfigError, "did you mean 'sampling_params'"),
        (lambda: base().generate("x", SamplingParams(), sampling_params=SamplingParams()), ConfigError, "keep one"),
        (lambda: base().generate("x", use_tqdm="yes"), ConfigError, "use_tqdm='yes'"),
        (lambda: base().generate({"prompt": "x", "prompt_token_ids": [5]}), InputError, "has both"),
        (lambda: base().generate({"prompt": "x", "cache_salt": "y"}), InputError, "new_requests"),
        (lambda: base().generate({"input_ids": [5]}), InputError, "write {'prompt_token_ids'"),
        (lambda: base().generate({"prompt_token_ids": base().tokenizer("x")}), InputError, "input_ids"),
        (lambda: SamplingParams(max_tokens=None), ConfigError, "as much as the context holds"),
        (lambda: SamplingParams(best_of=2), ConfigError, "use n"),
        (lambda: base().generate({"prmpt": "x"}), InputError, "did you mean 'prompt'"),
        (lambda: base().generate({"prompt_token_ids": "x"}), InputError, "a text in 'prompt_token_ids'"),
        (lambda: base().generate("x", max_tokens=5), ConfigError, r"write sampling_params=SamplingParams\(max_tokens"),
        (lambda: base().chat(QUESTION, temperature=1), ConfigError, r"write sampling_params=SamplingParams\(temp"),
        (lambda: base().chat(QUESTION, chat_template_kwargs=5), InputError, "chat_template_kwargs must be a mapping"),
        (lambda: SamplingParams(length_penalty=1.0), ConfigError, "there is no beam search"),
        (lambda: base().generate(b"x"), InputError, "not bytes"),
        (lambda: base().generate(bytearray(b"x")), InputError, "not bytearray"),
        (lambda: base().chat(QUESTION, chat_template="my.jinja"), InputError, "'my.jinja' says nothing of a conversat"),
        (lambda: pickle.dumps(base()), ConfigError, "make one in the process that uses it"),
        (lambda: copy.copy(base()), ConfigError, "make one in the process that uses it"),
        (lambda: base().generate("\ud800"), InputError, "not valid Unicode"),
        (lambda: base().generate(None), InputError, "not NoneType"),
        (lambda: base().chat(None), InputError, "not NoneType"),
        (lambda: base().chat("hello"), InputError, "not str"),
        (lambda: base().chat([5]), InputError, "not int"),
        (lambda: base().chat([[5]]), InputError, "message 0 must be a mapping"),
        (lambda: base().stream("x", 5), ConfigError, "not int"),
        (lambda: base().stream("x", temperature=1), ConfigError, r"write sampling_params=SamplingParams\(temp"),
        (lambda: base().stream_chat(QUESTION, max_token=1), ConfigError, "LLM.stream_chat has no 'max_token'"),
        (lambda: base().with_method(speculative_cfg={}), ConfigError, "did you mean 'speculative_config'"),
        (lambda: base().chat_prompt([], toolz=None), ConfigError, "did you mean 'tools'"),
        (lambda: LLM.from_target(target(), max_seqs=3), ConfigError, "did you mean 'max_num_seqs'"),
    ],
)
def test_unknown_values_are_refused_with_a_message(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("beam_search", "n=4"),
        ("score", "prompt_logprobs"),
        ("embed", "prompt_logprobs"),
        ("apply_model", "llm.target"),
        ("llm_engine", "llm.engine"),
        ("shutdown", "llm.close"),
        ("start_profile", "metrics"),
        ("enqueue", "llm.generate"),
        ("set_tokenizer", "prompt_token_ids"),
    ],
)
def test_unknown_methods_are_refused_with_the_nearest_one(name, instead):
    assert not hasattr(base(), name)
    with pytest.raises(ConfigError, match=f"LLM has no '{name}': .*{instead}"):
        getattr(base(), name)(["Hello"])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        base().nonsense  # noqa: B018


def test_arguments_that_are_not_here_say_what_takes_their_place():
    with pytest.raises(ConfigError, match=r"lora_request must be a LoRARequest, not object"):
        base().generate("Hello", lora_request=object())
    params = SamplingParams(max_tokens=2)
    plain, given = base().generate("Hello", params), base().generate("Hello", params, lora_request=None, priority=None)
    assert [out.text for out in plain] == [out.text for out in given]
    with pytest.raises(ConfigError, match="chat_template_content_format"):
        base().chat(QUESTION, chat_template_content_format="openai")
    with pytest.raises(ConfigError, match="did you mean 'sampling_params'"):
        base().generate("Hello", sampling_param=SamplingParams(max_tokens=1))


def test_what_vllm_has_by_default_is_taken():
    idle = {"best_of": None, "detokenize": True, "spaces_between_special_tokens": True, "logits_processors": None}
    assert SamplingParams(max_tokens=3, **idle) == SamplingParams(max_tokens=3)
    nothing = {"choice": ["a"], "disable_any_whitespace": False, "whitespace_pattern": None}
    assert SamplingParams(structured_outputs=nothing) == SamplingParams(structured_outputs={"choice": ["a"]})
    (out,) = base().chat(QUESTION, SamplingParams(max_tokens=1), chat_template_content_format="auto")
    assert out.finished
    llm = LLM("zoo:draft", generation_config="vllm", tokenizer_revision=None, max_num_seqs=None, dtype="float")
    assert llm.target.precision == "float32"
    assert llm.default_params == SamplingParams()
    prompt = {"prompt": "x", "multi_modal_data": None}
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].prompt == "x"


def test_vllm_s_example_of_a_head(tmp_path):
    config = {"method": "eagle", "enforce_eager": True, "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2}
    own = LLM.from_target(target(), speculative_config=config)
    head = {**config, "method": "eagle3", "model": str(zoo.path("base") / "eagle")}  # its name for heads of EAGLE-3
    named = LLM.from_target(target(), speculative_config=head)
    params = SamplingParams(max_tokens=8)
    assert named.generate("Hello", params)[0].token_ids == own.generate("Hello", params)[0].token_ids
    with pytest.raises(ModelError, match="nowhere"):
        LLM.from_target(target(), speculative_config={**config, "model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="'head' and 'model'"):
        LLM.from_target(target(), speculative_config={**config, "model": "a", "head": "b"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "one device"),
        ({"method": "ngram", "disable_by_batch_size": 8}, "leave it out"),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "tree="),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "max_match"),
        ({"method": "ngram", "model": "x"}, "drafts without a second model"),
        ({"method": "qwen3_next_mtp"}, "called 'mtp'"),
        ({"method": "custom_class"}, "your own instance"),
    ],
)
def test_keys_of_vllm_s_speculation_that_are_not_here(config, message):
    with pytest.raises(ConfigError, match=message):
        LLM.from_target(target(), speculative_config=config)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("EngineArgs", "LLM"),
        ("AsyncLLMEngine", "AsyncLLM"),
        ("RequestOutputKind", "stream"),
        ("GuidedDecodingParams", "structured_outputs="),
        ("BeamSearchParams", "n=4"),
    ],
)
def test_names_of_vllm_s_that_are_not_here_say_what_takes_their_place(name, instead):
    with pytest.raises(ImportError, match=f"foretoken has no '{name}': .*{instead}"):
        exec(f"from foretoken import {name}")


def test_submodules_that_code_for_vllm_imports():
    from foretoken.inputs import TextPrompt, TokensPrompt
    from foretoken.outputs import CompletionOutput, RequestOutput
    from foretoken.sampling_params import SamplingParams as Params
    from foretoken.sampling_params import StructuredOutputsParams

    assert Params is SamplingParams
    for each in (TextPrompt, TokensPrompt, CompletionOutput, RequestOutput, StructuredOutputsParams):
        name = {"Completion": "CompletionOutput", "StructuredOutputs": "StructuredOutputsParams"}.get(each.__name__)
        assert getattr(foretoken, name or each.__name__) is each
    wanted = StructuredOutputsParams(choice=["yes", "no"], disable_any_whitespace=False)
    tokens = prompt_ids("Is it warm?")
    (out,) = base().generate(TokensPrompt(prompt_token_ids=tokens), Params(structured_outputs=wanted))
    assert isinstance(out, RequestOutput)
    assert isinstance(out.outputs[0], CompletionOutput)
    (same,) = base().generate(TextPrompt(prompt="Is it warm?"), Params(structured_outputs={"choice": ["yes", "no"]}))
    assert (out.text, out.prompt_token_ids) == (same.text, same.prompt_token_ids)
    assert out.text in ("yes", "no")


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("from foretoken.sampling_params import BeamSearchParams", "n=4"),
        ("from foretoken.sampling_params import GuidedDecodingParams", "structured_outputs="),
        ("from foretoken.outputs import PoolingRequestOutput", "PoolingRequestOutput"),
        ("from foretoken.inputs import cli", "cli"),
    ],
)
def test_other_names_of_these_submodules_say_what_takes_their_place(line, instead):
    with pytest.raises(ImportError, match=instead):
        exec(line)


def test_log_probabilities_say_how_they_are_read():
    (out,) = base().generate("Hello", SamplingParams(max_tokens=1, logprobs=1))
    assert not hasattr(out.logprobs[0], "items")
    with pytest.raises(AttributeError, match="token_id, logprob and top"):
        out.logprobs[0].items()


def test_an_engine_for_asyncio_says_what_takes_the_place_of_vllm_s():
    async def ask():
        async with AsyncLLM(base()) as llm:
            for call in (
                lambda: llm.generate("x", SamplingParams(max_tokens=1), request_id="1"),
                lambda: llm.stream("x", sampling_params=SamplingParams(max_tokens=1)),
                lambda: llm.shutdown(),
            ):
                with pytest.raises(ConfigError, match=r"AsyncLLM.* has no '"):
                    call()

    asyncio.run(ask())
    with pytest.raises(ConfigError, match="dtype"):
        AsyncLLM(base(), dtype="float32")


def test_a_seed_of_numpy_is_a_seed():
    seeds = [LLM.from_target(target(), seed=seed, max_num_seqs=np.int64(2)) for seed in (3, np.int64(3))]
    params = SamplingParams(temperature=1.0, max_tokens=4)
    assert len({tuple(llm.generate("x", params)[0].token_ids) for llm in seeds}) == 1


def test_variables_of_the_chat_template():
    template = "{{ greeting }} {{ messages[0].content }}"
    said = {"chat_template": template, "chat_template_kwargs": {"greeting": "Good day,"}}
    (output,) = base().chat([{"role": "user", "content": "Tom"}], SamplingParams(max_tokens=1), **said)
    assert output.prompt_token_ids == base().tokenizer("Good day, Tom", add_special_tokens=False)["input_ids"]
