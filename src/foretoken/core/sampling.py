"""What a user may ask of one request. The names and meanings are vLLM's; differences are noted per field."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import misspelt, plain, without_idle

_NO_NUMBER = 1e300
_MOST = 16_384  # completions of a prompt; each has a law and a history of its own from the beginning
_ELSEWHERE = {  # what vLLM and its earlier versions have, and where to find it
    "guided_decoding": "it is called structured_outputs",
    "best_of": "use n",
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "length_penalty"), "there is no beam search; use n with a temperature"
    ),
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "output_kind": "use stream for pieces of an answer",
    "stream_interval": "use stream for pieces of an answer, a step each",
    "detokenize": "texts are always made; token_ids are there, too",
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "it is called max_tokens"),
    "do_sample": "use temperature=0 for greedy decoding, and more for sampling",
    "spaces_between_special_tokens": "texts are the tokenizer's own",
    "flat_logprobs": "logprobs are a list of entries with token_id, logprob and top: leave it out",
    "logprob_token_ids": "logprobs=K tells the K most probable tokens, 1000 at most",
    **dict.fromkeys(
        ("prompt_logprob_token_ids", "prompt_logprob_start"), "prompt_logprobs=K tells the K most probable of each"
    ),
    "skip_reading_prefix_cache": "LLM(enable_prefix_caching=False), the default, keeps nothing",
    "thinking_token_budget": "max_tokens bounds a reasoning and its answer together",
    "repetition_detection": "repetition_penalty and stop are against it",
    "truncation_side": "truncate_prompt_tokens keeps the last ones",
    **dict.fromkeys(
        ("extra_args", "skip_clone", "output_text_buffer_length", "routed_experts_prompt_start"), "leave it out"
    ),
    "trace_decode_token_ids": "prompt_logprobs of the whole text says how probable given tokens are",
}
_UNASKED: Mapping[str, tuple[Any, ...]] = {  # values of theirs that ask for nothing
    **dict.fromkeys(("guided_decoding", "best_of", "logits_processors", "extra_args", "output_kind"), (None,)),
    **dict.fromkeys(("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"), (None,)),
    **dict.fromkeys(("stream_interval", "thinking_token_budget", "repetition_detection"), (None,)),
    **dict.fromkeys(("trace_decode_token_ids", "truncation_side"), (None,)),
    **dict.fromkeys(("skip_reading_prefix_cache", "flat_logprobs", "skip_clone"), (None, False)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (None, False)),
    **dict.fromkeys(("output_text_buffer_length", "routed_experts_prompt_start"), (0,)),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
}
_UNASKED_STRUCTURE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), (None, False)),
    **dict.fromkeys(("whitespace_pattern", "structural_tag"), (None,)),
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What a text has to be; exactly one of these. The names are vLLM's.

    Attributes:
        json: a JSON schema, as a mapping or as text; True: any JSON. It is laid out as ``json.dumps`` does.
        json_object: True: any JSON object.
        regex: a regular expression that the whole text matches.
        choice: one of these texts.
        grammar: a Lark grammar whose start is the whole text.
        reasoning: what comes before it. "open": the text begins within a reasoning, which "</think>" ends; "optional":
            it may begin with "<think>" and so on; None: nothing does.
    Raises:
        ConfigError: none or several are given, or one is of the wrong kind.
    """

    json: Mapping[str, object] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        kinds = [each.name for each in fields(self) if each.name != "reasoning"]
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if self.reasoning not in (None, "open", "optional"):
            raise ConfigError(f"structured_outputs.reasoning={self.reasoning!r:.60} must be 'open', 'optional' or None")
        if len(given) != 1:
            names = ", ".join(kinds)
            raise ConfigError(f"structured_outputs has {given or 'nothing'}: give exactly one of {names}")
        kind, value = given[0], getattr(self, given[0])
        fits = {
            "json": isinstance(value, (Mapping, str)) or value is True,
            "json_object": value is True,
            "choice": isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_text, value)),
        }.get(kind, _is_text(value))
        if not fits or (kind == "choice" and not value):
            wanted = {"json": "a schema", "json_object": "true", "choice": "a list of texts, none of them empty"}
            raise ConfigError(f"structured_outputs.{kind}={value!r:.60} must be {wanted.get(kind, 'a text')}")

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(each.name for each in fields(self) if getattr(self, each.name) not in (None, False))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> StructuredOutputs:
        """Build from a mapping; an unknown key is an error that offers the nearest name."""
        known = {each.name for each in fields(cls)}
        values = without_idle(values, _UNASKED_STRUCTURE)
        for key in values:
            if key not in known:
                raise ConfigError(f"structured_outputs has the unknown key {key!r}: {nearest(str(key), known)}")
        return cls(**values)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. A field may be set afterwards; it is checked then, too, and
    requests that run keep what they were given.

    Attributes:
        temperature: 0 is greedy decoding. Differs from vLLM: the default is 0, since this engine's first promise is
            the same text as plain greedy decoding.
        top_p: keep the smallest set of tokens whose mass reaches top_p, in (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (CTRL rule: divide positive logits,
            multiply negative ones).
        presence_penalty: subtracted once from the logit of every token that the output contains, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        seed: fixes every random choice of this request; None draws a fresh seed. With a seed and a temperature above 0
            the tokens are the same in any batch, process and number of threads, as far as the model's logits are: how
            long is drafted, and from which exit, then follows the request's own past and nothing that was measured,
            which may cost some speed. The recipe and the engine's limits (``max_num_seqs``, ``max_rows_per_step``) are
            part of that promise, unless the recipe promises the same stream: then nothing of a draft shows, and
            measured lengths stay. So they do at temperature 0, where no draft can change the text.
        max_tokens: exact upper bound on generated tokens. Differs from vLLM: the default is 128, not 16, and there is
            always one; more than the context holds is as much as it holds.
        min_tokens: stop tokens are impossible before so many generated tokens.
        stop: strings that end the text; not included in it.
        stop_token_ids: tokens that end the text, beside the model's own; kept in token_ids, not in the text.
        include_stop_str_in_output: the stop string, or the text of the stop token, stays at the text's end.
        skip_special_tokens: special tokens are left out of the text; they are in token_ids.
        logprobs: None for none; k for the emitted token's log-probability and the k most probable tokens', under
            the model's own law before temperature, penalties and filters.
        prompt_logprobs: the same of every token of the prompt but the first; None for none. The whole prompt is read
            for it, with logits of every row.
        n: independent completions of the same prompt, 16384 at most.
        logit_bias: token id -> value added to its logit.
        bad_words: texts that are not written: the last token that would complete one, as the tokenizer splits it at the
            beginning of a text or behind a space, is impossible. A text that is split in another way may come out.
        allowed_token_ids: no other token is possible; the model's end of text is one only if it is among them.
        truncate_prompt_tokens: keep the last so many tokens of the prompt; -1: as many as leave room for max_tokens.
        ignore_eos: do not stop at the model's end-of-text tokens.
        structured_outputs: what the text has to be, as :class:`StructuredOutputs` or a mapping of its fields; a text
            that ``max_tokens`` cuts is the beginning of one. Not with ``ignore_eos`` or ``min_tokens``: a text that
            is complete must be able to end.

    Order of application: logit_bias, penalties, min_tokens, structured_outputs with bad_words and allowed_token_ids,
    temperature, min_p, top_k, top_p. Numbers and arrays of numpy and torch are taken for what they hold.

    Raises:
        ConfigError: a value is out of range; the message names field, value and remedy.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = field(default_factory=tuple)
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        set_as = super().__setattr__
        for each in fields(self):
            set_as(each.name, plain(getattr(self, each.name)))
        set_as("stop", _texts("stop", self.stop))
        set_as("bad_words", _texts("bad_words", self.bad_words))
        set_as("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        set_as("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        self._check_number("temperature", 0.0, math.inf, "use 0 for greedy decoding")
        self._check_number("top_p", 0.0, 1.0, "use 1 to keep every token", open_low=True)
        self._check_number("min_p", 0.0, 1.0, "use 0 to keep every token")
        self._check_number("repetition_penalty", 1e-30, 1e30, "use 1 for none")
        self._check_number("presence_penalty", -2.0, 2.0, "use 0 for none")
        self._check_number("frequency_penalty", -2.0, 2.0, "use 0 for none")
        self._check_integer("top_k", -1, "use 0 to keep every token")
        self._check_integer("max_tokens", 1, "ask for one token at least; 10**9 is all that the context holds")
        self._check_integer("min_tokens", 0, "use 0 for none")
        self._check_integer("n", 1, "ask for at least one completion, for more in several calls", high=_MOST)
        if self.seed is not None:
            self._check_integer("seed", 0, "use a non-negative integer below 2**63", high=2**63 - 1)
        if self.truncate_prompt_tokens is not None:
            self._check_integer("truncate_prompt_tokens", -1, "use None to keep the whole prompt")
            if self.truncate_prompt_tokens == 0:
                raise ConfigError("truncate_prompt_tokens=0 leaves no prompt: keep at least one token, or -1")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_integer(name, 0, "use None for none", high=1000)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r:.60} must be True or False")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}: "
                "lower one or raise the other"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("allowed_token_ids is empty: nothing could be written; use None to allow every token")
        self._check_bias()
        self._check_structured()

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dataclass_fields__
        if name not in known:
            raise ConfigError(f"unknown sampling parameter '{name}': {nearest(name, known)}")
        if len(self.__dict__) < len(known):  # while it is made
            super().__setattr__(name, value)
            return
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
            self.__post_init__()
        except ConfigError:
            self.__dict__.update(before)
            raise

    @property
    def greedy(self) -> bool:
        """True when the law is the argmax."""
        return self.temperature == 0.0

    @property
    def repeatable(self) -> bool:
        """True when a seed is to give the same sampled tokens every time."""
        return self.seed is not None and not self.greedy

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return _texts("stop", self.stop)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that offers the nearest name."""
        known = {f.name for f in fields(cls)}
        if not isinstance(values, Mapping):
            raise ConfigError(f"sampling params must be a mapping of names to values, not {type(values).__name__}")
        values = without_idle(values, _UNASKED)
        for key in values:
            if key not in known:
                remedy = _ELSEWHERE.get(key) or nearest(str(key), known)
                raise ConfigError(f"unknown sampling parameter '{key}': {remedy}")
        return cls(**values)

    @staticmethod
    def remedy(name: str) -> str | None:
        """What takes the place of a parameter that people know from elsewhere; None: nothing is known of it."""
        return _ELSEWHERE.get(name)

    def clone(self) -> SamplingParams:
        """A copy that may be changed by itself."""
        return copy.deepcopy(self)

    def _check_number(self, name: str, low: float, high: float, remedy: str, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        fits = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and abs(value) < _NO_NUMBER  # neither NaN nor infinite, nor an integer that no float holds
            and (low < value if open_low else low <= value)
            and value <= high
        )
        if not fits:
            bracket = "(" if open_low else "["
            end = f"{high:g}]" if math.isfinite(high) else f"{_NO_NUMBER:g})"
            raise ConfigError(f"{name}={value!r:.60} must be a number in {bracket}{low:g}, {end}: {remedy}")
        super().__setattr__(name, float(value))

    def _check_integer(self, name: str, low: int, remedy: str, *, high: int | None = None) -> None:
        value = getattr(self, name)
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not good or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{name}={value!r:.60} must be an integer, {limit}: {remedy}")

    def _check_structured(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if isinstance(wanted, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(wanted))
        elif not isinstance(wanted, StructuredOutputs):
            raise ConfigError(
                f"structured_outputs={wanted!r:.60} must be StructuredOutputs, or a mapping like {{'json': SCHEMA}}"
            )
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ConfigError(
                f"{name} with structured_outputs: a text that is complete must be able to end; leave one of them out"
            )

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias={self.logit_bias!r:.60} must be a mapping of token ids to numbers")
        bias = {plain(token): plain(value) for token, value in self.logit_bias.items()}
        for token, value in bias.items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ConfigError(f"logit_bias has key {token!r}: keys are token ids")
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not -math.inf <= value <= 1e30:
                raise ConfigError(
                    f"logit_bias[{token}]={value!r:.60} must be a number up to 1e30 (-inf forbids the token)"
                )
        super().__setattr__("logit_bias", bias)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, always as a tuple."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Iterable) or isinstance(texts, (bytes, Mapping)):
        raise ConfigError(f"{name}={value!r:.60} must be a text or a list of texts")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name}={text!r:.60} must be a non-empty string")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{name}={text!r:.60} is not valid Unicode: it has half of a pair of surrogates")
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids as a tuple; None if there are none."""
    if value is None:
        return None
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise ConfigError(f"{name}={value!r:.60} must be a list of token ids")
    ids = tuple(plain(each) for each in value)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{name} has {token!r:.60}: token ids are non-negative integers")
    return ids


def _named(cls: type[Any], idle: Mapping[str, tuple[Any, ...]]) -> None:
    """Let a class say what a misspelt keyword was meant to be."""
    cls.__init__ = misspelt(cls.__init__, _ELSEWHERE, idle)


_named(SamplingParams, _UNASKED)
_named(StructuredOutputs, _UNASKED_STRUCTURE)
