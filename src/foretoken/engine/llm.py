"""The face of the library: load a model with a recipe, generate, chat, stream."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.core.errors import ConfigError, InputError
from foretoken.core.importing import lean_imports
from foretoken.core.plain import check_call, reject_unknown_keywords
from foretoken.engine.intake.checkpoint_defaults import CheckpointDefaults
from foretoken.engine.intake.progress import shown
from foretoken.engine.intake.prompts import Messages, Prompt, PromptReader, as_conversations, as_list
from foretoken.engine.intake.vllm_options import absent, arguments, check_options
from foretoken.options.lora import LoRARequest
from foretoken.options.model import EngineOptions, ModelOptions
from foretoken.options.recipe import AUTO
from foretoken.options.sampling import SamplingParams

# What computes takes seconds to import, transformers most of them: it is imported when a model is loaded, and options
# are checked before.
if TYPE_CHECKING:
    from foretoken.engine.output import Chunk, RequestOutput
    from foretoken.engine.request import Request
    from foretoken.engine.totals import Metric
    from foretoken.models.language_model import LanguageModel

Options = TypeVar("Options", EngineOptions, ModelOptions)
Adapters = LoRARequest | Sequence[LoRARequest | None] | None

__all__ = ["LLM", "Messages", "Prompt"]

log = logging.getLogger(__name__)

_ROWS_OF_ONE = 32  # of a forward, for each request that runs
_ROWS = 512  # where the number of requests is given


class LLM:
    """A target model with a recipe for speculative decoding.

    Several threads may generate and stream at once: one step runs at a time, for the requests of all of them.

    Args:
        model: ``zoo:NAME``, a local Hugging Face folder, or a hub id.
        speculative_config: ``method``, ``verifier``, ``num_speculative_tokens`` (absent: adaptive), ``executor``
            ("serial", "pearl" or "auto") and the method's own options; by default `auto` drafts what pays. None is
            plain decoding. ``foretoken methods`` lists methods and verifiers, which may also be instances of your own.
            ``{"plan": FILE}`` takes what ``foretoken plan --out FILE`` chose for this model.
        dtype, kv_cache_dtype, revision, trust_remote_code, max_model_len, device, threads: how the checkpoint is
            loaded, see :class:`~foretoken.options.model.ModelOptions`.
        max_num_seqs, max_rows_per_step, seed, generation_config, enable_prefix_caching, prefix_cache_bytes,
            prefix_cache_dir, prefix_cache_gb: of the engine, see :class:`~foretoken.options.model.EngineOptions`.
            Recipes that cannot reuse prefixes (``recipe.reuses_prefixes``) do not.
        others: options of vLLM's ``LLM`` with the value that always holds here (``tensor_parallel_size=1``); one line
            of the log names them, and every other is refused (engine/intake/vllm_options.py).
    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: a checkpoint cannot be loaded, is not supported, or does not fit.
    """

    @check_call
    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: Mapping[str, Any] | None = AUTO,
        dtype: str = ModelOptions.dtype,
        kv_cache_dtype: str = ModelOptions.kv_cache_dtype,
        revision: str | None = ModelOptions.revision,
        trust_remote_code: bool = ModelOptions.trust_remote_code,
        max_model_len: int | None = ModelOptions.max_model_len,
        device: str = ModelOptions.device,
        threads: int | None = ModelOptions.threads,
        max_num_seqs: int | None = EngineOptions.max_num_seqs,
        max_rows_per_step: int | None = EngineOptions.max_rows_per_step,
        seed: int | None = EngineOptions.seed,
        generation_config: str = EngineOptions.generation_config,
        enable_prefix_caching: bool | None = EngineOptions.enable_prefix_caching,
        prefix_cache_bytes: int = EngineOptions.prefix_cache_bytes,
        prefix_cache_dir: str | None = EngineOptions.prefix_cache_dir,
        prefix_cache_gb: float = EngineOptions.prefix_cache_gb,
        **others: Any,
    ) -> None:
        given = dict(locals())
        check_options(others, [name for name in inspect.signature(LLM).parameters if name != "others"])
        given |= {
            "generation_config": "none" if str(generation_config) == "vllm" else generation_config,  # its name for it
            "enable_prefix_caching": False if enable_prefix_caching is None else enable_prefix_caching,
        }
        engine, loading = _taken(EngineOptions, given), _taken(ModelOptions, given)
        with lean_imports():
            from foretoken.models.load import load, source_of, use_threads  # isort: skip  (transformers' list of models comes first)
            from foretoken.engine import before_weights, compose, plan_file, step  # noqa: F401  (what _build imports)

            use_threads(loading.threads)
            speculative_config = plan_file.settled(speculative_config, str(model), partial(source_of, str(model)))
            if isinstance(model, str):
                before_weights.check(model, speculative_config, **loading.origin)
            target = load(model, **loading.of_a_checkpoint)
            defaults = _checkpoint_defaults(target) if engine.generation_config == "auto" else SamplingParams()
            self._build(target, speculative_config, engine, defaults)

    @classmethod
    @reject_unknown_keywords
    def from_target(
        cls,
        target: LanguageModel,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        max_num_seqs: int | None = EngineOptions.max_num_seqs,
        max_rows_per_step: int | None = EngineOptions.max_rows_per_step,
        seed: int | None = EngineOptions.seed,
        default_params: SamplingParams | None = None,
        enable_prefix_caching: bool = EngineOptions.enable_prefix_caching,
        prefix_cache_bytes: int = EngineOptions.prefix_cache_bytes,
    ) -> LLM:
        """A recipe over a target that is loaded already: weights are shared, the cache is its own.

        Args:
            target: as ``foretoken.models.load.load`` gives it, or the ``target`` of another ``LLM``.
            speculative_config: as for the class; by default plain decoding.
            max_num_seqs, max_rows_per_step, seed, enable_prefix_caching, prefix_cache_bytes: as for the class.
            default_params: of requests that bring none; None: greedy, as ``SamplingParams()`` has it.
        Raises:
            ConfigError: an option is unknown or out of range.
            ModelError: a draft model or a learned part cannot be had, or does not fit the target.
        """
        options = dict(locals())
        from foretoken.models.language_model import LanguageModel

        given: Any = target  # of any type, if the caller is not type-checked
        if not isinstance(given, LanguageModel):
            remedy = "LLM(...) loads a model by its name" if isinstance(given, (str, Path)) else "give an LLM's .target"
            raise ConfigError(f"target must be a loaded model, not {type(given).__name__}: {remedy}")
        engine = _taken(EngineOptions, options)
        if default_params is not None and not isinstance(default_params, SamplingParams):
            raise ConfigError(f"default_params must be SamplingParams, not {type(default_params).__name__}")
        llm = cls.__new__(cls)
        llm._build(target, speculative_config, engine, default_params or SamplingParams())
        return llm

    @reject_unknown_keywords
    def with_method(self, speculative_config: Mapping[str, Any] | None) -> LLM:
        """Another recipe over the same loaded target (its own cache; weights are shared)."""
        llm = LLM.__new__(LLM)
        llm._build(self.target, speculative_config, self.options, self.default_params)
        return llm

    def _build(
        self,
        target: LanguageModel,
        speculative_config: Mapping[str, Any] | None,
        options: EngineOptions,
        default_params: SamplingParams,
    ) -> None:
        from foretoken.engine import compose, plan_file
        from foretoken.engine.drive import Driver
        from foretoken.engine.intake.admission import Admission
        from foretoken.engine.prefix_files import files_of
        from foretoken.engine.step import Engine
        from foretoken.engine.totals import Totals

        self.target = target
        self.options = options
        self.default_params = default_params
        self.tokenizer = target.tokenizer
        self.max_num_seqs, self.max_rows_per_step = _limits(options, target)
        settings = plan_file.settled(speculative_config, target.name, lambda: target.source)
        self.recipe = compose.build(settings, target)
        folder, files = options.prefix_cache_dir, None
        if folder is not None and self.recipe.reuses_prefixes:
            files = files_of(target, folder, int(options.prefix_cache_gb * 1e9))
        self.engine = Engine(
            target,
            self.recipe,
            max_slots=self.max_num_seqs,
            max_rows=self.max_rows_per_step,
            prefix_bytes=options.prefix_cache_bytes if options.enable_prefix_caching or folder else None,
            prefix_files=files,
        )
        self._prompts = PromptReader(target)
        self._admission = Admission(target, self.recipe, self._prompts, options.seed)
        self._totals = Totals()
        self._driver = Driver(self.engine, self.max_num_seqs, self._totals)

    @property
    def why_undrafted(self) -> str:
        """Why no token has been drafted, in words, where that is so; "" where the method drafts nothing."""
        if self.recipe.num_nodes == 0:
            return ""
        if not self.recipe.may_skip_drafting:
            return "the drafter was called and proposed nothing"
        return f"{self.engine.controller.why_undrafted}; --set num_speculative_tokens=4 drafts in any case"

    @property
    def model_config(self) -> Any:
        """The target's Hugging Face config."""
        return self.target.config

    @property
    def is_chat_model(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self.tokenizer.chat_template)

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, of transformers."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of ``default_params``, to be changed and given to :meth:`generate`."""
        return copy.copy(self.default_params)

    def get_metrics(self) -> list[Metric]:
        """What requests of :meth:`generate`, :meth:`chat` and :meth:`stream` have come to, under vLLM's names."""
        scheduler = self.engine.scheduler
        return self._totals.metrics(len(scheduler.running), len(scheduler.waiting))

    @arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: Adapters = None,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together in one continuous batch.

        Args:
            prompts: one prompt or several; each a string, ``{"prompt": str}``, ``{"prompt_token_ids": [int]}``, or
                token ids, also as an array.
            params: one for all, or one per prompt; None takes ``default_params``.
            sampling_params: the same under vLLM's name.
            use_tqdm: a bar on standard error, as vLLM draws it; a class like ``tqdm.tqdm`` draws in its way.
            lora_request: an adapter for all prompts, or one or None for each; None: the base model.
            progress: called with each output as it finishes.
        Returns:
            one output per prompt, in order. A request that fails while running has finish_reason "error" and its
            message in ``error``; the others are not affected.
        Raises:
            InputError: a prompt is empty, too long or of the wrong kind; nothing was run.
            ConfigError: params or adapters do not fit the recipe.
            ModelError: an adapter cannot be loaded, or does not fit the model.
        """
        params = _one_of(params, sampling_params)
        many = as_list(prompts)
        every = self._admission.params_for(len(many), params, self.default_params)
        adapters = self._admission.adapters_for(len(many), lora_request)
        rows = enumerate(zip(many, every, adapters, strict=True))
        groups = [self._admission.requests(prompt, each, index, adapter) for index, (prompt, each, adapter) in rows]
        with shown(use_tqdm, len(groups), progress) as told:
            return self._driver.run(groups, told)

    @arguments
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: the chat template turns each into a prompt.

        Arguments are those of :meth:`generate` and :meth:`chat_prompt`.
        """
        prompts = [
            self._prompts.of_chat(
                each,
                tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for each in as_conversations(messages)
        ]
        params = _one_of(params, sampling_params)
        return self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request, progress=progress)

    @arguments
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield a chunk per step. Closing the iterator early cancels the request.

        Args:
            sampling_params: params under vLLM's name.
            lora_request: an adapter; None: the base model.
            on_prefill: called after each step until the first token, with how many of the prompt's tokens are read, and
                how many there are.
        """
        if on_prefill is not None and not callable(on_prefill):
            raise ConfigError(f"on_prefill={on_prefill!r:.60} must be a function that takes two counts of tokens")
        (params,) = self._admission.params_for(1, _one_of(params, sampling_params), self.default_params)
        if params.n != 1:
            raise ConfigError(f"n={params.n}: streaming gives one completion; use generate for several")
        (request,) = self.new_requests(prompt, params, lora_request=lora_request)
        return self._driver.stream(request, on_prefill)

    @arguments
    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Answer one conversation and yield a chunk per step."""
        return self.stream(self.chat_prompt(messages), _one_of(params, sampling_params))

    @reject_unknown_keywords
    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """The prompt that the chat template makes of a conversation.

        Args:
            messages: mappings with ``role`` and ``content`` (a text, or a list of ``{"type": "text", "text": ...}``,
                which are joined by line ends), and what else the template reads. Roles are system, developer (system
                to a template that does not name it), user, assistant and tool, and those that the template names.
            tools: functions that the model may call, as JSON schemas; how it says that it calls one is the template's.
            chat_template: in Jinja; None: the tokenizer's own.
            add_generation_prompt: what opens an answer stands at the end.
            continue_final_message: the last message is not closed, so that the answer goes on with it.
            chat_template_kwargs: variables of the template, e.g. ``{"enable_thinking": False}``.
        Raises:
            InputError: the model has no chat template, or messages or tools do not fit it.
            ConfigError: the last message cannot both be continued and answered.
        """
        return self._prompts.of_chat(
            messages,
            tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def load_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter now, which else the first request with it does.

        Raises:
            ConfigError: it is no LoRARequest, or the recipe cannot apply adapters.
            ModelError: it cannot be loaded, or does not fit the model.
        """
        self._admission.adapters_for(1, lora_request)

    @reject_unknown_keywords
    def new_requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_draft: int | None = None,
        method: str | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[Request]:
        """The requests that :meth:`generate` would make of one prompt, not queued yet.

        For code that drives ``llm.engine`` itself (the server's loop, tests, measurements): ``engine.add(request)``,
        then ``engine.step()`` until ``request.finished``.

        Args:
            prompt, params: as for :meth:`generate`.
            max_draft: draft nodes a step for these requests, at most; 0: plain decoding; None: as the recipe has it.
            method: the only one that drafts for them, of those that the recipe chooses between; None: the recipe's.
            cache_salt: only requests with the same one share the cached prefix of a prompt.
            lora_request: an adapter; None: the base model.
        Returns:
            ``params.n`` requests.
        Raises:
            InputError: the prompt is empty, too long or of the wrong kind.
            ConfigError: params do not fit the recipe, ``method`` is not loaded, or ``max_draft`` is out of range, or
                would change what a recipe writes in which drafter and target take turns.
        """
        (params,) = self._admission.params_for(1, params, SamplingParams())
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ConfigError(f"cache_salt={cache_salt!r:.60} must be a text, or None")
        self._admission.check_draft(max_draft)
        source = self._admission.source(method)
        (adapter,) = self._admission.adapters_for(1, lora_request)
        requests = self._admission.requests(prompt, params, 0, adapter)
        for request in requests:
            request.max_draft = max_draft
            request.source = source
            request.cache_salt = cache_salt
        return requests

    def output_of(self, group: Sequence[Request], prompt: str | None = None) -> RequestOutput:
        """The completions of one prompt as they stand, of requests that :meth:`new_requests` made of it.

        Args:
            group: all of them.
            prompt: its text if that is known; None: decoded again.
        Raises:
            InputError: these are no requests, or there are none.
        """
        from foretoken.engine.request import Request

        odd: Any = group  # whatever a caller may give
        if not isinstance(odd, Sequence) or not odd or not all(isinstance(each, Request) for each in odd):
            raise InputError(f"group must be the requests that new_requests made of a prompt: {group!r:.60}")
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(f"prompt must be the text of the prompt, or None, not {type(prompt).__name__}")
        return self._driver.output_of(group, prompt)

    if not TYPE_CHECKING:  # hidden from type checkers

        def __getattr__(self, name: str) -> Any:
            raise absent(name)

    def __reduce__(self) -> Any:  # pickle and copy would end deep in some library
        raise ConfigError(
            "an LLM holds a loaded model and cannot be copied or sent: make one in the process that uses it"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel whatever runs, and end threads of an executor's. ``with LLM(...) as llm:`` does so at its end."""
        for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.cancel(request)
        self.engine.close()


def _one_of(params: Any, sampling_params: Any) -> Any:
    """Params under either name."""
    if params is not None and sampling_params is not None:
        raise ConfigError("both params and sampling_params are given: keep one")
    return params if sampling_params is None else sampling_params


def _taken(kind: Callable[..., Options], given: Mapping[str, Any]) -> Options:
    """Options of a kind from the arguments of a call, by their names."""
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


def _checkpoint_defaults(target: LanguageModel) -> SamplingParams:
    """The sampling params of the checkpoint's generation_config.json; a warning lists them."""
    found = CheckpointDefaults.of(getattr(target.model, "generation_config", None), target.name)
    if found.in_words:
        log.warning(
            "generation_config.json of model '%s' %s: requests without SamplingParams follow it as far as it is "
            "supported, others say everything themselves; LLM(generation_config='none') leaves it out",
            target.name,
            found.in_words,
        )
    return found.params


def _limits(options: EngineOptions, target: LanguageModel) -> tuple[int, int]:
    """Requests that run at once, and rows of one forward.

    Where their number follows memory, a request's share of the rows does not, because draft lengths of seeded requests
    depend on it.
    """
    from foretoken.models.memory import bytes_of_token, seats

    count, rows = options.max_num_seqs, options.max_rows_per_step
    if count is not None:
        return count, _ROWS if rows is None else rows
    size = (target.kv_dtype or target.dtype).itemsize
    count = seats(bytes_of_token(target.config, size), target.max_length)
    return count, _ROWS_OF_ONE * count if rows is None else rows
