"""Structured output: JSON schemas, regular expressions and grammars as constraints, through llguidance.

The library tells which tokens may follow; what is allowed is a filter of the law (core/constraint.py). Where it allows
one token only, that is drafted and verified like any other draft, never jumped over.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core.constraint import Constraint
from foretoken.core.errors import ConfigError, NothingFits
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import StructuredOutputs

# JSON as json.dumps writes it: a model that may put spaces anywhere may go on with them for ever
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST = 120  # characters of the library's message that are shown


class Grammars:
    """Compiles constraints for one target.

    Args:
        target: whose tokenizer and vocabulary.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def constraint(self, wanted: StructuredOutputs, stop_ids: frozenset[int]) -> Grammar:
        """A constraint at its beginning.

        Args:
            stop_ids: tokens that end the request; they are allowed where the text may end.
        Raises:
            ConfigError: llguidance is not installed, cannot read the tokenizer, or does not support what is wanted.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ConfigError("structured_outputs need llguidance: pip install 'foretoken[structured]'") from None
        kind, grammar = _grammar(wanted)
        if wanted.reasoning is not None:
            grammar = _behind_reasoning(grammar, wanted.reasoning)
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)  # what is wrong is raised
        if matcher.is_error():
            why = " ".join(str(matcher.get_error()).split())
            if kind == "grammar" and "::=" in str(wanted.grammar):  # vLLM and llama.cpp take these
                why = f"rules are written in Lark's form here, 'start: \"yes\" | \"no\"', not with '::='; {why}"
            raise ConfigError(f"structured_outputs.{kind}: {why[:_LONGEST]}")
        return Grammar(matcher, stop_ids, self._target.vocab_size, self._target.device)

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


class Grammar(Constraint):
    """One request's place in a grammar.

    A parser that runs into a limit of llguidance's stays useless and permits nothing, or anything. So it is asked
    after every step whether that has happened: no law is made of what it says then, and the request ends.

    Args:
        matcher: llguidance's, which has read the committed output.
        stop_ids: see :meth:`Grammars.constraint`.
        vocab_size: V.
        device: of the masks.
    """

    def __init__(self, matcher: Any, stop_ids: frozenset[int], vocab_size: int, device: torch.device) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._vocab_size = vocab_size
        self._device = device
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
            found = bytearray(matcher.compute_logit_bias())  # a byte for each token, 0 where it is not allowed
            mask_V = torch.frombuffer(found, dtype=torch.uint8)[: self._vocab_size] != 0
        mask_V[self._stops] = bool(matcher.is_accepting())
        if path:
            matcher.rollback(len(path))
        self._refuse_what_is_given_up()
        return mask_V.to(self._device)

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
        if not self._goes(text):  # of a draft that is looked beyond: nothing is known there, and nobody will get there
            self._lost = True
        elif text:
            self._matcher.consume_tokens(text)  # where it gives up, the next question is refused

    def copy(self) -> Grammar:
        twin = Grammar(self._matcher.deep_copy(), self._stop_ids, self._vocab_size, self._device)
        twin._lost = self._lost
        return twin

    def _refuse_what_is_given_up(self) -> None:
        if self._matcher.is_error():
            why = " ".join(str(self._matcher.get_error()).split("<state>")[0].split())
            if "NoExtensionBias" in why:  # its word for it
                raise NothingFits("structured_outputs: no text goes on from here that fits what is asked for")
            raise NothingFits(f"structured_outputs: llguidance gave up behind what is written: {why[:_LONGEST]}")

    def _goes(self, path: Sequence[int]) -> bool:
        """Whether the text may go on with these tokens; an end among them is the end."""
        if self._lost:
            return False
        if not path:
            return True
        if self._matcher.is_stopped() or not self._stop_ids.isdisjoint(path):
            return False
        count: int = self._matcher.validate_tokens(list(path))
        return count == len(path)


def _grammar(wanted: StructuredOutputs) -> tuple[str, str]:
    """The kind that is wanted, and llguidance's own form of it."""
    from llguidance import LLMatcher

    kind = wanted.kind
    value: Any = getattr(wanted, kind)
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            return kind, LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=LAYOUT)
        if kind == "json_object":
            return kind, LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=LAYOUT)
        if kind == "regex":
            return kind, LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            return kind, LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        return kind, LLMatcher.grammar_from_lark(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"structured_outputs.{kind}: {str(error)[:_LONGEST]}") from None


def _behind_reasoning(grammar: str, form: str) -> str:
    """The grammar of a text that may reason first, and then is what the grammar says."""
    written = grammar.lstrip().startswith("{")  # the library's own form, else Lark
    answer = json.loads(grammar)["grammars"][0] if written else {"lark_grammar": grammar}
    thought = {"open": "thought SPACE?", "optional": "(thought SPACE?)?"}[form]
    head = "" if form == "open" else r"[ \n]*<think>"
    lark = f"start: {thought} @answer\nthought[lazy]: /{head}(.|\\n)*<\\/think>/\nSPACE: /[ \\n]{{1,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})
