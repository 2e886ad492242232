"""The face of the library: load a model with a recipe, generate, chat, stream."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ConfigError, InputError, nearest
from foretoken.core.laws import LawMaker
from foretoken.core.randomness import Streams, mix64
from foretoken.core.sampling import SamplingParams, StructuredOutputs
from foretoken.engine import compose
from foretoken.engine.checkpoint_defaults import CHOICES, CheckpointDefaults
from foretoken.engine.output import Chunk, Completion, RequestOutput
from foretoken.engine.request import Request
from foretoken.engine.step import Engine
from foretoken.engine.structured import Grammars
from foretoken.engine.text import TextStream, text_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load

log = logging.getLogger(__name__)

PREFIX_BYTES = 2**30  # of the cache of keys and values, where prefixes are kept

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A target model with a recipe for speculative decoding.

    Several threads may generate and stream at once: one step runs at a time, for the requests of all of them.

    Args:
        model: ``zoo:NAME``, a local Hugging Face folder, or a hub id.
        speculative_config: ``method``, ``verifier``, ``num_speculative_tokens`` (absent: adaptive), ``executor``
            ("serial", "pearl" or "auto") and the method's own options; None is plain decoding. ``foretoken methods``
            lists methods and verifiers, which may also be instances of your own.
        dtype: "auto", "float32", "bfloat16", "float16"; "int8" and "int4" round the weights.
        device: "auto", "cpu", "cuda", "cuda:N".
        threads: CPU threads for torch; None leaves torch's choice. It is a setting of the process.
        max_model_len: longest sequence, prompt included; None takes the model's limit.
        max_num_seqs: requests that run at once, at most.
        max_rows_per_step: rows (tokens) of one forward, at most: prompts are fed in chunks of what is left.
        seed: fixes the seeds of requests that bring none; None draws fresh ones.
        generation_config: "auto": requests without params take what the checkpoint's ``generation_config.json`` asks
            for (``default_params``), as vLLM's and transformers' do; "none": they are greedy. Requests with params
            are as these say. One warning says what is asked for.
        trust_remote_code: run Python code that comes with the checkpoint. It is never asked for on the terminal.
        enable_prefix_caching: what a request has read is kept, and not read again for a prompt that begins alike
            (engine/prefixes.py). The text is the same; the time to the first token is not, so measurements leave it
            off. Recipes that cannot reuse prefixes (``recipe.reuses_prefixes``) do not.
        prefix_cache_bytes: the cache of keys and values is not made larger than this for that purpose.
    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: a checkpoint cannot be loaded, is not supported, or does not fit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_rows_per_step: int = 512,
        seed: int | None = None,
        generation_config: str = "auto",
        trust_remote_code: bool = False,
        enable_prefix_caching: bool = False,
        prefix_cache_bytes: int = PREFIX_BYTES,
    ) -> None:
        _check_limits(max_num_seqs, max_rows_per_step)
        if generation_config not in CHOICES:
            raise ConfigError(f"generation_config={generation_config!r}: {nearest(str(generation_config), CHOICES)}")
        if threads is not None:
            if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
                raise ConfigError(f"threads={threads!r} must be an integer, at least 1; leave it out for torch's")
            torch.set_num_threads(threads)
        target = load(model, dtype=dtype, device=device, max_length=max_model_len, trust_remote_code=trust_remote_code)
        defaults = _checkpoint_defaults(target) if generation_config == "auto" else SamplingParams()
        prefix_bytes = prefix_cache_bytes if enable_prefix_caching else None
        self._build(target, speculative_config, max_num_seqs, max_rows_per_step, seed, defaults, prefix_bytes)

    @classmethod
    def from_target(
        cls,
        target: LanguageModel,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        max_num_seqs: int = 16,
        max_rows_per_step: int = 512,
        seed: int | None = None,
        default_params: SamplingParams | None = None,
        enable_prefix_caching: bool = False,
        prefix_cache_bytes: int = PREFIX_BYTES,
    ) -> LLM:
        """A recipe over a target that is loaded already: weights are shared, the cache is its own.

        Args:
            target: as ``foretoken.models.load.load`` gives it, or the ``target`` of another ``LLM``.
            speculative_config, max_num_seqs, max_rows_per_step, seed, enable_prefix_caching, prefix_cache_bytes: as for
                the class.
            default_params: of requests that bring none; None: greedy, as ``SamplingParams()`` has it.
        Raises:
            ConfigError: an option is unknown or out of range.
            ModelError: a draft model or a learned part cannot be had, or does not fit the target.
        """
        _check_limits(max_num_seqs, max_rows_per_step)
        llm = cls.__new__(cls)
        defaults = default_params or SamplingParams()
        prefix_bytes = prefix_cache_bytes if enable_prefix_caching else None
        llm._build(target, speculative_config, max_num_seqs, max_rows_per_step, seed, defaults, prefix_bytes)
        return llm

    def with_method(self, speculative_config: Mapping[str, Any] | None) -> LLM:
        """Another recipe over the same loaded target (its own cache; weights are shared)."""
        return LLM.from_target(
            self.target,
            speculative_config=speculative_config,
            max_num_seqs=self.max_num_seqs,
            max_rows_per_step=self.max_rows_per_step,
            seed=self._seed,
            default_params=self.default_params,
            enable_prefix_caching=self._prefix_bytes is not None,
            prefix_cache_bytes=self._prefix_bytes or PREFIX_BYTES,
        )

    def _build(
        self,
        target: LanguageModel,
        speculative_config: Mapping[str, Any] | None,
        max_num_seqs: int,
        max_rows_per_step: int,
        seed: int | None,
        default_params: SamplingParams,
        prefix_bytes: int | None,
    ) -> None:
        self.target = target
        self.default_params = default_params
        self.tokenizer = target.tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_rows_per_step = max_rows_per_step
        self.recipe = compose.build(speculative_config, target)
        self.engine = Engine(
            target, self.recipe, max_slots=max_num_seqs, max_rows=max_rows_per_step, prefix_bytes=prefix_bytes
        )
        self.grammars = Grammars(target)
        self._seed = seed
        self._prefix_bytes = prefix_bytes
        self._ids = itertools.count()  # threads may ask at once

    @property
    def model_config(self) -> Any:
        """The target's Hugging Face config."""
        return self.target.config

    @property
    def is_chat_model(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self.tokenizer.chat_template)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together in one continuous batch.

        Args:
            prompts: one prompt or several; each a string, ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``.
            params: one for all, or one per prompt; None takes ``default_params``.
            progress: called with each output as it finishes.
        Returns:
            one output per prompt, in order. A request that fails while running has finish_reason "error" and its
            message in ``error``; the others are not affected.
        Raises:
            InputError: a prompt is empty, too long or of the wrong kind; nothing was run.
            ConfigError: params do not fit the recipe.
        """
        many = _as_list(prompts)
        every = self._params_for(many, params)
        pairs = enumerate(zip(many, every, strict=True))
        groups = [self._requests(prompt, each, index) for index, (prompt, each) in pairs]
        return self._run(groups, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: the chat template turns each into a prompt. See :meth:`generate`."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(each) for each in conversations], params, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reading: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield a chunk per step. Closing the iterator early cancels the request.

        Args:
            reading: called after each step until the first token, with how many of the prompt's tokens are read, and
                how many there are.
        """
        params = params or self.default_params
        if params.n != 1:
            raise ConfigError(f"n={params.n}: streaming gives one completion; use generate for several")
        (request,) = self.new_requests(prompt, params)
        if request.text is None:
            request.text = TextStream(self.tokenizer, prompt=request.tokens)
        return self._stream(request, reading)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one conversation and yield a chunk per step."""
        return self.stream(self.chat_prompt(messages), params)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """The prompt that the chat template makes of a conversation.

        Args:
            messages: mappings with ``role`` and ``content``, and what else the template reads.
            tools: functions that the model may call, as JSON schemas; how it says that it calls one is the template's.
            settings: variables of the template, e.g. ``{"enable_thinking": False}``.
        Raises:
            InputError: the model has no chat template, or messages or tools do not fit it.
        """
        if not self.is_chat_model:
            raise InputError(f"model '{self.target.name}' has no chat template: use generate with a plain prompt")
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                    raise InputError(f"message {index} needs a string '{key}': {message!r:.80}")
            _check_unicode(message["content"], f"message {index}")
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise InputError(f"the chat template of model '{self.target.name}' knows no tools: leave them out")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **(settings or {}),
            )["input_ids"]
        except Exception as error:
            # templates raise jinja errors of their own choosing, e.g. "roles must alternate"
            raise InputError(f"the conversation does not fit the model's chat template: {error}") from error
        return {"prompt_token_ids": list(ids)}

    def new_requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_draft: int | None = None,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The requests that :meth:`generate` would make of one prompt, not queued yet.

        For those who drive ``llm.engine`` themselves (the server's loop, tests, measurements): ``engine.add(request)``,
        then ``engine.step()`` until ``request.finished``.

        Args:
            prompt, params: as for :meth:`generate`.
            max_draft: draft nodes a step for these requests, at most; 0: plain decoding; None: as the recipe has it.
            cache_salt: only requests with the same one share what was read of a prompt.
        Returns:
            ``params.n`` requests.
        Raises:
            InputError: the prompt is empty, too long or of the wrong kind.
            ConfigError: params do not fit the recipe, or ``max_draft`` is out of range, or would change what a recipe
                writes in which drafter and target take turns.
        """
        params = params or SamplingParams()
        self._params_for([prompt], params)
        if max_draft is not None:
            if not isinstance(max_draft, int) or isinstance(max_draft, bool) or max_draft < 0:
                raise ConfigError(f"max_draft={max_draft!r} must be an integer, at least 0; 0 is plain decoding")
            if self.recipe.takes_turns:
                raise ConfigError(
                    f"max_draft={max_draft}: with method '{self.recipe.method}' drafter and target take turns, so that "
                    "another length is another text; leave it out"
                )
        requests = self._requests(prompt, params, 0)
        for request in requests:
            request.max_draft = max_draft
            request.cache_salt = cache_salt
        return requests

    def output_of(self, group: Sequence[Request], prompt: str | None = None) -> RequestOutput:
        """The completions of one prompt as they stand, of requests that :meth:`new_requests` made of it.

        Args:
            group: all of them.
            prompt: its text if that is known; None: decoded again.
        """
        first = group[0]
        prompt_ids = first.tokens[: first.num_prompt]
        if prompt is None:
            prompt = self._prompt_text(first)
        completions = [self._completion(request) for request in group]
        return RequestOutput(prompt, prompt_ids, completions, first.prompt_logprobs)

    def close(self) -> None:
        """Cancel whatever runs, and end threads of an executor's."""
        for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.cancel(request)
        self.engine.close()

    # ------------------------------------------------------------------ inside

    def _params_for(self, prompts: Sequence[Any], params: Any) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            every = [params or self.default_params] * len(prompts)
        elif isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
            raise ConfigError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        else:
            every = list(params)
            if len(every) != len(prompts):
                raise ConfigError(f"{len(every)} sampling params for {len(prompts)} prompts: give one, or one each")
        for each in every:
            if not isinstance(each, SamplingParams):
                raise ConfigError(f"params must be SamplingParams, not {type(each).__name__}")
            self.recipe.check(each)
            for name, ids in (("stop_token_ids", each.stop_token_ids), ("logit_bias", each.logit_bias or ())):
                for token in ids:
                    if token >= self.target.vocab_size:
                        raise ConfigError(f"{name} has {token}: the vocabulary has {self.target.vocab_size} entries")
        return every

    def _prompt_ids(self, prompt: Prompt, index: int) -> list[int]:
        where = f"prompt {index}"
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise InputError(f"{where} has keys {sorted(prompt)}: give 'prompt' or 'prompt_token_ids'")
        if isinstance(prompt, str):
            if not prompt:
                raise InputError(f"{where} is empty: give at least one character")
            _check_unicode(prompt, where)
            ids = list(self.tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            ids = list(prompt)
        else:
            raise InputError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise InputError(f"{where} is empty: give at least one token")
        vocab_size = self.target.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InputError(f"{where} has token id {token}: the vocabulary has {vocab_size} entries")
        if len(ids) >= self.target.max_length:
            raise InputError(
                f"{where} has {len(ids)} tokens; the context holds {self.target.max_length}, "
                "the output included: shorten it"
            )
        return ids

    def _requests(self, prompt: Prompt, params: SamplingParams, index: int) -> list[Request]:
        """One request per completion."""
        ids = self._prompt_ids(prompt, index)
        request_ids = [next(self._ids) for _ in range(params.n)]
        base = params.seed
        if base is None:
            base = secrets.randbits(63) if self._seed is None else mix64(self._seed ^ mix64(request_ids[0])) >> 1
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.target.end_ids
        requests = []
        for number, request_id in enumerate(request_ids):
            # mixed twice: a sum would be the seed of a neighbour's completion, too
            seed = base if number == 0 else mix64(mix64(base) ^ number) >> 1
            constraint = None
            if isinstance(params.structured_outputs, StructuredOutputs):
                constraint = self.grammars.constraint(params.structured_outputs, stop_ids)
            laws = LawMaker(params, ids, self.target.vocab_size, stop_ids, self.target.device, constraint)
            text = TextStream(self.tokenizer, params.stop_strings, ids) if params.stop_strings else None
            requests.append(
                Request(
                    request_id=request_id,
                    tokens=list(ids),
                    num_prompt=len(ids),
                    params=params,
                    streams=Streams(seed, self.target.device),
                    laws=laws,
                    stop_ids=stop_ids,
                    max_total=min(len(ids) + params.max_tokens, self.target.max_length),
                    text=text,
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=None if params.prompt_logprobs is None or number else [],
                )
            )
        return requests

    def _run(
        self, groups: list[list[Request]], progress: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        for group in groups:
            for request in group:
                self.engine.add(request)
        # Requests start in order, so those that run are of the first groups that have not ended. Groups are looked at
        # instead of what a step returns: a step of another thread may have ended them, or this one a stream's.
        waiting, started = deque(groups), deque[list[Request]]()
        try:
            while waiting or started:
                while waiting and len(started) < self.max_num_seqs:
                    started.append(waiting.popleft())
                with self.engine.lock:  # a request is finished a moment before it has its last tokens
                    ended = [group for group in started if all(request.finished for request in group)]
                if not ended:
                    self.engine.step()
                for group in ended:
                    started.remove(group)
                    if progress is not None:
                        progress(self.output_of(group))
        except BaseException as stop:
            for group in groups:
                for request in group:
                    self.engine.cancel(request)
            if isinstance(stop, KeyboardInterrupt) and progress is not None:
                for group in (*started, *waiting):  # what was generated is not lost: hand it over as it stands
                    if any(each.num_output for each in group):
                        progress(self.output_of(group))
            raise
        return [self.output_of(group) for group in groups]

    def _stream(self, request: Request, reading: Callable[[int, int], None] | None) -> Iterator[Chunk]:
        assert request.text is not None
        prompt = self._prompt_text(request)
        self.engine.add(request)
        sent = 0
        try:
            while True:
                with self.engine.lock:  # tokens, text and end as of one moment
                    tokens, ended = request.tokens[request.num_prompt + sent :], request.finished
                    if tokens or ended:
                        output = self.output_of([request], prompt)
                        text = request.text.release(final=ended)
                if not tokens and not ended:
                    self.engine.step()
                    slot = request.slot  # none while it waits, nor once it has ended
                    if reading is not None and not request.num_output and slot >= 0:
                        reading(self.engine.cache.lengths[slot], request.num_prompt)
                    continue
                sent += len(tokens)
                yield Chunk(text, tokens, output)
                if ended:  # as of this chunk: somebody else's step may have ended the request since
                    return
        finally:
            self.engine.cancel(request)

    def _prompt_text(self, request: Request) -> str:
        ids = request.tokens[: request.num_prompt]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _completion(self, request: Request) -> Completion:
        if request.text is None:
            ids = request.output_ids
            if request.finish_reason == "stop":
                ids = ids[:-1]
            text = text_of(self.tokenizer, ids, request.tokens[: request.num_prompt])
        else:
            if request.finished:
                request.text.close()
            text = request.text.text
        return Completion(
            text,
            request.output_ids,
            request.finish_reason,
            request.error,
            request.metrics,
            request.logprobs,
            self.recipe.promise_for(request.params),
        )


def _check_limits(max_num_seqs: int, max_rows_per_step: int) -> None:
    for name, value in (("max_num_seqs", max_num_seqs), ("max_rows_per_step", max_rows_per_step)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer, at least 1")


def _checkpoint_defaults(target: LanguageModel) -> SamplingParams:
    """The params that the checkpoint asks for; a warning says what they are."""
    found = CheckpointDefaults.of(getattr(target.model, "generation_config", None), target.name)
    if found.in_words:
        log.warning(
            "generation_config.json of model '%s' %s: requests without SamplingParams follow it as far as it is "
            "supported, others say everything themselves; LLM(generation_config='none') leaves it out",
            target.name,
            found.in_words,
        )
    return found.params


def _check_unicode(text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place} is not valid Unicode (character {error.start + 1}): save it as UTF-8") from None


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several: a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts must be a string, a mapping or a list of them, not {type(prompts).__name__}")
    if prompts and all(isinstance(each, int) for each in prompts):
        return [prompts]
    if not prompts:
        raise InputError("there are no prompts: give at least one")
    return list(prompts)
