"""Structured output: JSON schemas, regular expressions and grammars as constraints, through llguidance.

The library returns the tokens that may follow; they filter the distribution (core/constraint.py). If only one token may
follow, it is drafted and verified like any other draft, never emitted unverified.
"""

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.constraint import Constraint
from foretoken.core.errors import ConfigError, NothingFits
from foretoken.engine.text.json_keys import JsonKeys, TokenBytes
from foretoken.engine.text.json_schemas import LAYOUT, compilable
from foretoken.engine.text.reasoning import MARKS, marks_of
from foretoken.models.language_model import LanguageModel
from foretoken.options.structured import StructuredOutputs

_LONGEST = 120  # characters of the library's message that are shown


class Grammars:
    """Compiles constraints for one target.

    Args:
        target: its tokenizer and vocabulary count.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._tokenizer: Any = None
        self._bytes: TokenBytes | None = None
        self._lock = threading.Lock()

    def constraint(self, wanted: StructuredOutputs, stop_ids: frozenset[int]) -> "Grammar":
        """A constraint at its beginning.

        Args:
            stop_ids: tokens that end the request; they are allowed where the text may end.
        Raises:
            ConfigError: llguidance is not installed, cannot read the tokenizer, or does not support the grammar.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ConfigError("structured_outputs need llguidance: pip install 'foretoken[structured]'") from None
        kind, grammar = _grammar(wanted)
        marks = marks_of(self._target.tokenizer) or MARKS[0]
        if wanted.reasoning is not None:
            grammar = _after_reasoning(grammar, wanted.reasoning, *marks)
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)  # errors are raised, not logged
        if matcher.is_error():
            why = " ".join(str(matcher.get_error()).split())
            if kind == "grammar" and "::=" in str(wanted.grammar):  # vLLM and llama.cpp take these
                why = f"rules are written in Lark's form here, 'start: \"yes\" | \"no\"', not with '::='; {why}"
            raise ConfigError(f"structured_outputs.{kind}: {why[:_LONGEST]}")
        keys = None
        if kind in ("json", "json_object"):
            keys = _Keys(
                JsonKeys(marks[1].encode() if wanted.reasoning else b"", optional=wanted.reasoning == "optional"),
                self._token_bytes(),
                free="patternProperties" not in grammar,
            )
        return Grammar(matcher, stop_ids, self._target.vocab_size, self._target.device, keys)

    def _token_bytes(self) -> TokenBytes:
        tokenizer = self._vocabulary()
        with self._lock:
            if self._bytes is None:
                self._bytes = TokenBytes([tokenizer.decode_bytes([each]) for each in range(self._target.vocab_size)])
        return self._bytes

    def _vocabulary(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                from llguidance.hf import from_tokenizer

                ends = sorted(self._target.end_ids) or None
                try:
                    self._tokenizer = from_tokenizer(
                        self._target.tokenizer, n_vocab=self._target.vocab_size, eos_token=ends
                    )
                except ValueError as error:
                    name = self._target.name
                    raise ConfigError(f"structured_outputs: the tokenizer of model '{name}': {error}") from None
        return self._tokenizer


@dataclass(slots=True)
class _Keys:
    """What keeps a JSON text from giving a key twice.

    Attributes:
        read: the committed text.
        tokens: the vocabulary.
        free: whether keys are of any text, so that there is always another one.
    """

    read: JsonKeys
    tokens: TokenBytes
    free: bool


class Grammar(Constraint):
    """One request's place in a grammar.

    A parser that reaches one of llguidance's limits stays broken and permits nothing, or anything. So every step checks
    for that: its masks are not used any more, and the request ends.

    Args:
        matcher: llguidance's, which has read the committed output.
        stop_ids: see :meth:`Grammars.constraint`.
        vocab_size: V.
        device: of the masks.
        keys: of a JSON text; None: the text is of another kind.
    """

    def __init__(
        self, matcher: Any, stop_ids: frozenset[int], vocab_size: int, device: torch.device, keys: _Keys | None = None
    ) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._vocab_size = vocab_size
        self._device = device
        self._keys = keys
        self._lost = False

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """See :class:`Constraint`.

        Raises:
            NothingFits: llguidance has given the text up, here or before.
        """
        if not self._goes(path):
            self._refuse_what_is_given_up()
            return None
        matcher = self._matcher
        if path:
            matcher.consume_tokens(list(path))
        if matcher.is_stopped():
            mask_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        else:
            mask_V = self._permitted(matcher)
            if self._keys is not None:
                mask_V[self._repeated(mask_V, path)] = False
        self._permit_ends(mask_V)
        if path:
            matcher.rollback(len(path))
        self._refuse_what_is_given_up()
        return mask_V.to(self._device)

    def _permitted(self, matcher: Any) -> Tensor:
        found = bytearray(matcher.compute_logit_bias())  # a byte for each token, 0 where it is not allowed
        return torch.frombuffer(found, dtype=torch.uint8)[: self._vocab_size] != 0

    def _permit_ends(self, mask_V: Tensor) -> None:
        """Let the text end where it is whole, or becomes whole by a token of the grammar that is an end: ``<[5]>``."""
        if self._matcher.is_accepting():
            mask_V[self._stops] = True
            return
        for stop in self._stops[mask_V[self._stops]].tolist():
            ended = self._matcher.deep_copy()  # rolled back from an end it would not be as before
            mask_V[stop] = bool(ended.consume_tokens([stop])) and bool(ended.is_accepting())

    def _repeated(self, mask_V: Tensor, path: Sequence[int]) -> list[int]:
        """Return the tokens that would give a key twice after a path that the matcher has read."""
        keys = self._keys
        assert keys is not None
        read = _read(keys, path)

        def ahead(more: list[int]) -> np.ndarray[Any, Any]:
            matcher = self._matcher.deep_copy()
            matcher.consume_tokens(more)
            mask_V = self._permitted(matcher)
            mask_V[self._stops] = False
            found: np.ndarray[Any, Any] = mask_V.numpy() & (not matcher.is_error())
            return found

        return read.refuse(mask_V.numpy(), keys.tokens, None if keys.free else ahead)

    def possible(self, path: Sequence[int]) -> bool:
        if path and path[-1] in self._stop_ids:  # the end, if the text may end there
            mask_V = self.allowed(path[:-1])
            return mask_V is not None and bool(mask_V[path[-1]])
        return self._goes(path)

    def forced(self, limit: int) -> list[int]:
        if limit < 1 or self._lost or self._matcher.is_stopped():
            return []
        return [int(token) for token in self._matcher.compute_ff_tokens()[:limit]]

    def append(self, tokens: Sequence[int]) -> None:
        text = [token for token in tokens if token not in self._stop_ids]
        if not self._goes(text):  # a copy that follows a draft past a forbidden token, which is never accepted
            self._lost = True
        elif text:
            self._matcher.consume_tokens(text)  # where it gives up, the next question is refused
            if self._keys is not None:
                self._keys = replace(self._keys, read=_read(self._keys, text))

    def copy(self) -> "Grammar":
        twin = Grammar(self._matcher.deep_copy(), self._stop_ids, self._vocab_size, self._device, self._keys)
        twin._lost = self._lost
        return twin

    def _refuse_what_is_given_up(self) -> None:
        if self._matcher.is_error():
            why = " ".join(str(self._matcher.get_error()).split("<state>")[0].split())
            if "NoExtensionBias" in why:  # its word for it
                raise NothingFits("structured_outputs: no continuation of this text satisfies the constraint")
            raise NothingFits(f"structured_outputs: llguidance gave up after this text: {why[:_LONGEST]}")

    def _goes(self, path: Sequence[int]) -> bool:
        """Whether the text may go on with these tokens; an end among them is the end."""
        if self._lost:
            return False
        if not path:
            return True
        if self._matcher.is_stopped() or not self._stop_ids.isdisjoint(path):
            return False
        count: int = self._matcher.validate_tokens(list(path))
        return count == len(path) and (self._keys is None or not _read(self._keys, path).twice)


def _read(keys: _Keys, path: Sequence[int]) -> JsonKeys:
    """Return the keys of a text after more tokens."""
    read = keys.read.copy()
    for token in path:
        read.feed(keys.tokens.of[token])
    return read


def _grammar(wanted: StructuredOutputs) -> tuple[str, str]:
    """The kind that is wanted, and llguidance's own form of it."""
    from llguidance import LLMatcher

    kind, value = wanted.kind, wanted.value
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            refuse_contradictions(schema)
            schema = compilable(schema)
            return kind, LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=LAYOUT)
        if kind == "json_object":
            return kind, LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=LAYOUT)
        if kind == "regex":
            return kind, LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            return kind, LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        return kind, LLMatcher.grammar_from_lark(value)
    except ConfigError as error:
        message = str(error).removeprefix(f"structured_outputs.{kind}: ")
        raise ConfigError(f"structured_outputs.{kind}: {message}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"structured_outputs.{kind}: {str(error)[:_LONGEST]}") from None


def refuse_contradictions(schema: Any) -> None:
    """Refuse a property to which no value can be given, since a pattern of the same object asks for another one.

    Raises:
        ConfigError: names both.
    """
    root = schema if isinstance(schema, dict) else {}
    shared = {name: root[name] for name in ("$defs", "definitions", "$schema") if name in root}
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
            properties, patterns = each.get("properties"), each.get("patternProperties")
            if isinstance(properties, dict) and isinstance(patterns, dict):
                _check_patterns(properties, patterns, shared)


def _check_patterns(properties: dict[str, Any], patterns: dict[str, Any], shared: dict[str, Any]) -> None:
    from llguidance import LLMatcher

    for name, value in properties.items():
        if value is False:  # it is forbidden, and means to be
            continue
        for pattern, more in patterns.items():
            try:
                if re.search(pattern, name) is None:
                    continue
            except re.error:  # of another dialect: llguidance has its own word on it
                continue
            both = {**shared, "allOf": [value, more]}
            failed, said = LLMatcher.validate_grammar_with_warnings(
                LLMatcher.grammar_from_json_schema(both, defaults=LAYOUT), None
            )
            if failed and any("Unsatisfiable" in word for word in said):
                raise ConfigError(
                    f"structured_outputs.json: the property '{name:.60}' contradicts patternProperties "
                    f"'{pattern:.60}': no value fits both, change or remove one of them"
                )


def _after_reasoning(grammar: str, form: str, begin: str, end: str) -> str:
    """The grammar of a text that may reason first, between two marks, and then is what the grammar says."""
    written = grammar.lstrip().startswith("{")  # the library's own form, else Lark
    answer = json.loads(grammar)["grammars"][0] if written else {"lark_grammar": grammar}
    thought = {"open": "thought SPACE?", "optional": "(thought SPACE?)?"}[form]
    head = "" if form == "open" else rf"[ \n]{{0,4}}{re.escape(begin)}"  # a model that may put spaces for ever does
    end = re.escape(end).replace("/", r"\/")
    lark = f"start: {thought} @answer\nthought[lazy]: /{head}(.|\\n)*{end}/\nSPACE: /[ \\n]{{1,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})
