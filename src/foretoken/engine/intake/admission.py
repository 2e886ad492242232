"""From what a call takes to requests: params held against the recipe and the target, and one request a completion."""

import copy
import itertools
import secrets
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from foretoken.core.constraint import Constraint
from foretoken.core.errors import ConfigError
from foretoken.core.files import home_expanded
from foretoken.core.laws import LawMaker
from foretoken.core.randomness import Streams, mix64
from foretoken.core.repetitions import Repetitions
from foretoken.core.words import Both
from foretoken.engine.intake.prompts import Prompt, PromptReader
from foretoken.engine.prediction import PredictedText, PredictionReader
from foretoken.engine.recipe import Recipe
from foretoken.engine.request import Request
from foretoken.engine.text.banned_words import words_of
from foretoken.engine.text.detokenise import TextStream
from foretoken.engine.text.grammars import Grammars
from foretoken.engine.text.thinking_budget import thinking_budget
from foretoken.forward.adapter import Adapter
from foretoken.models.adapters import load_adapter
from foretoken.models.language_model import LanguageModel
from foretoken.options.lora import LoRARequest
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs


class Admission:
    """Makes the requests of one engine; what cannot run is refused here.

    Args:
        target: the model.
        recipe: of the engine.
        prompts: reads prompts.
        seed: fixes the seeds of requests that bring none; None draws fresh ones.
    """

    def __init__(self, target: LanguageModel, recipe: Recipe, prompts: PromptReader, seed: int | None) -> None:
        self._target = target
        self._recipe = recipe
        self._prompts = prompts
        self._seed = seed
        self._grammars = Grammars(target)
        self._ids = itertools.count()  # threads may ask at once

    def params_for(self, count: int, params: Any, default: SamplingParams) -> list[SamplingParams]:
        """Params for so many prompts.

        Args:
            params: one for all, or one each; None takes ``default``.
        Raises:
            ConfigError: they do not fit the prompts, the recipe or the vocabulary.
        """
        if params is None or isinstance(params, SamplingParams):
            every = [params or default] * count
        elif isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
            raise ConfigError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        else:
            every = list(params)
            if len(every) != count:
                raise ConfigError(f"{len(every)} sampling params for {count} prompts: give one, or one each")
        for each in every:
            if not isinstance(each, SamplingParams):
                raise ConfigError(f"params must be SamplingParams, not {type(each).__name__}")
            self._recipe.check(each)
            for name, tokens in each.named_tokens.items():
                for token in tokens:
                    if token >= self._target.vocab_size:
                        raise ConfigError(f"{name} has {token}: the vocabulary has {self._target.vocab_size} entries")
        return every

    def check_draft(self, max_draft: int | None) -> None:
        """Refuse a draft length of a request that is none, or that would change what a recipe writes.

        Raises:
            ConfigError: with the remedy.
        """
        if max_draft is None:
            return
        if not isinstance(max_draft, int) or isinstance(max_draft, bool) or max_draft < 0:
            raise ConfigError(f"max_draft={max_draft!r} must be an integer, at least 0; 0 is plain decoding")
        if self._recipe.takes_turns:
            raise ConfigError(
                f"max_draft={max_draft}: with method '{self._recipe.method}' drafter and target take turns, so that "
                "another length is another text; leave it out"
            )

    def source(self, method: str | None) -> str | None:
        """The one of the recipe's drafters by which a request is drafted for; None: it is the recipe's choice.

        Raises:
            ConfigError: the method is not loaded.
        """
        recipe = self._recipe
        if method is None or method == recipe.method:
            return None
        if method not in recipe.drafter.sources:
            loaded = ", ".join(dict.fromkeys((recipe.method, *recipe.drafter.sources, "none")))
            raise ConfigError(
                f"method={method!r:.60} is not loaded here: name one of {loaded}, or load the model with that method"
            )
        return method

    def adapters_for(self, count: int, given: Any) -> list[Adapter | None]:
        """Adapters for so many prompts; each folder is read once.

        Args:
            given: one for all, or one or None for each.
        Raises:
            ConfigError: they do not fit the prompts or the recipe.
            ModelError: an adapter cannot be loaded, or does not fit the model.
        """
        every = list(given) if isinstance(given, (list, tuple)) else [given] * count
        if len(every) != count:
            raise ConfigError(f"{len(every)} adapters for {count} prompts: give one, or one each")
        return [None if each is None else self._adapter(each) for each in every]

    def _adapter(self, asked: Any) -> Adapter:
        if not isinstance(asked, LoRARequest):
            raise ConfigError(f"lora_request must be a LoRARequest, not {type(asked).__name__}")
        self._recipe.check_adapter()
        known = self._target.adapters
        if (key := (asked.lora_name, asked.lora_path)) not in known:
            known[key] = load_adapter(self._target, *key)
        draft = home_expanded(asked.draft_lora or f"{asked.lora_path}/draft")
        if asked.draft_lora or draft.is_dir():
            adapted = self._recipe.drafter.adapt(known[key], str(draft))
            if asked.draft_lora and not adapted:
                raise ConfigError(
                    f"draft_lora={draft}: method '{self._recipe.method}' has no draft model: leave it out"
                )
        return known[key]

    def requests(
        self, prompt: Prompt, params: SamplingParams, index: int, adapter: Adapter | None = None
    ) -> list[Request]:
        """One request per completion.

        Args:
            index: the prompt's place among those of a call, for messages.
            adapter: corrects the target for them.
        Raises:
            InputError: the prompt cannot be used.
            ConfigError: structured outputs cannot be had, or no token would be allowed.
        """
        params = copy.copy(params)  # a later change of the caller's object must not reach this request
        target, ids = self._target, self._prompts.ids(prompt, index, _prompt_limit(params, self._target.max_length))
        request_ids = [next(self._ids) for _ in range(params.n)]
        base = params.seed
        if base is None:
            base = secrets.randbits(63) if self._seed is None else mix64(self._seed ^ mix64(request_ids[0])) >> 1
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= target.end_ids
        filters = [each for each in (thinking_budget(params, target, ids), words_of(params, target)) if each]
        predicted, breakers = self._predicted(params), self._breakers(params)
        requests = []
        for number, request_id in enumerate(request_ids):
            # mixed twice: a sum would be the seed of a neighbour's completion, too
            seed = base if number == 0 else mix64(mix64(base) ^ number) >> 1
            constraints: list[Constraint] = [each.copy() for each in filters]
            if isinstance(params.structured_outputs, StructuredOutputs):
                constraints.insert(0, self._grammars.constraint(params.structured_outputs, stop_ids))
            constraint = reduce(Both, constraints) if constraints else None
            laws = LawMaker(params, ids, target.vocab_size, stop_ids, target.device, constraint, breakers)
            text = TextStream.of(target.tokenizer, params, ids) if params.stop_strings else None
            requests.append(
                Request(
                    request_id=request_id,
                    tokens=list(ids),
                    num_prompt=len(ids),
                    params=params,
                    streams=Streams(seed, target.device),
                    laws=laws,
                    stop_ids=stop_ids,
                    max_total=min(len(ids) + params.max_tokens, target.max_length),
                    text=text,
                    logprobs=None if params.logprobs is None else [],
                    prediction=None if predicted is None else PredictionReader(predicted),
                    prompt_logprobs=None if params.prompt_logprobs is None or number else [],
                    adapter=adapter,
                )
            )
        return requests

    def _breakers(self, params: SamplingParams) -> frozenset[int]:
        """The last token of each of DRY's breakers, after a letter."""
        if not Repetitions.wanted(params):
            return frozenset()
        read = self._target.tokenizer
        return frozenset(
            read(f"a{each}", add_special_tokens=False)["input_ids"][-1] for each in params.dry_sequence_breakers
        )

    def _predicted(self, params: SamplingParams) -> PredictedText | None:
        """The predicted output of a request in tokens, as much of it as the context holds; None: nothing is drafted."""
        given = params.prediction
        if given is None or not self._recipe.takes_predictions(params):
            return None
        tokens = (
            self._target.tokenizer(given, add_special_tokens=False)["input_ids"] if isinstance(given, str) else given
        )
        return PredictedText(tokens[: self._target.max_length])


def _prompt_limit(params: SamplingParams, context: int) -> int | None:
    """How many of a prompt's tokens are kept, at most; None: all, or it is refused."""
    limit = params.truncate_prompt_tokens
    return max(1, context - params.max_tokens) if limit == -1 else limit
