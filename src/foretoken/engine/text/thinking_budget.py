"""A limit on the reasoning of a model: after so many tokens its end is written, whatever the model would go on with.

The limit is part of the distribution (core/constraint.py): from the limit on, each token of a message and of
``</think>`` has probability 1 until both are written. So it falls into the middle of an accepted draft as it would
fall into plain decoding, and drafts stay exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.constraint import Constraint
from foretoken.core.errors import ConfigError
from foretoken.engine.text.reasoning import MARKS, Thinking, marks_of
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams

_BEFORE, _INSIDE, _ENDING, _AFTER = "before", "inside", "ending", "after"
_LATEST = 3  # tokens beyond the limit until a character is whole
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is decoded to


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text stands.

    Attributes:
        phase: before, inside or after the reasoning, or in its prescribed end.
        count: tokens of the reasoning, or of its end, so far.
        text: its last characters, in which a mark may begin.
        part: the last tokens, if they are no whole characters.
    """

    phase: str
    count: int = 0
    text: str = ""
    part: tuple[int, ...] = ()


class ThinkingBudget(Constraint):
    """Ends a reasoning after a number of tokens.

    Args:
        limit: tokens of the reasoning, after its opening mark; the end comes up to three tokens later where a
            character would be cut.
        end: tokens of the end, its mark included.
        decode: from tokens to text, special tokens included.
        begun: whether the prompt has begun the reasoning; else the text may.
        marks: of the reasoning.
        vocab_size, device: of the logits.
    """

    def __init__(
        self,
        limit: int,
        end: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        begun: bool,
        marks: tuple[str, str] = MARKS[0],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._limit = limit
        self._end = tuple(end)
        self._decode = decode
        self._open, self._close = marks
        self._state = self._due(_State(_INSIDE)) if begun else _State(_BEFORE)
        self._any_V = torch.ones(vocab_size, dtype=torch.bool, device=device)

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        state = self._after(path)
        if state is None or state.phase != _ENDING:
            return None if state is None else self._any_V
        only_V = torch.zeros_like(self._any_V)
        only_V[self._end[state.count]] = True
        return only_V

    def possible(self, path: Sequence[int]) -> bool:
        return self._after(path) is not None

    def forced(self, limit: int) -> list[int]:
        if self._state.phase != _ENDING:
            return []
        return list(self._end[self._state.count :][:limit])

    @property
    def idle(self) -> bool:
        return self._state.phase == _AFTER

    def append(self, tokens: Sequence[int]) -> None:
        self._state = self._after(tokens) or _State(_AFTER)

    def copy(self) -> "ThinkingBudget":
        twin = ThinkingBudget.__new__(ThinkingBudget)
        twin.__dict__.update(self.__dict__)
        return twin

    def _after(self, tokens: Sequence[int]) -> _State | None:
        """The state after further tokens; None: they are no continuation."""
        state: _State | None = self._state
        for token in tokens:
            if state is None or state.phase == _AFTER:
                break
            state = self._step(state, token)
        return state

    def _step(self, state: _State, token: int) -> _State | None:
        if state.phase == _ENDING:
            if token != self._end[state.count]:
                return None
            count = state.count + 1
            return _State(_AFTER) if count == len(self._end) else replace(state, count=count)
        part = (*state.part, token)
        piece = self._decode(part)
        if piece.endswith(_BROKEN) and len(part) <= _LATEST:  # a character has four bytes at most
            piece = ""
        else:
            part = ()
        text = state.text + piece
        if state.phase == _BEFORE:
            begin = text.lstrip()
            if begin.startswith(self._open):
                return self._due(_State(_INSIDE))
            return _State(_BEFORE, text=begin, part=part) if self._open.startswith(begin) else _State(_AFTER)
        if self._close in text:
            return _State(_AFTER)
        return self._due(_State(_INSIDE, state.count + 1, text[1 - len(self._close) :], part))

    def _due(self, state: _State) -> _State:
        """The beginning of the end, where it is due."""
        return _State(_ENDING) if state.count >= self._limit and not state.part else state


def thinking_budget(params: SamplingParams, target: LanguageModel, prompt: Sequence[int]) -> ThinkingBudget | None:
    """The limit that a request asks for, at its beginning; None: there is none, or the prompt has ended the reasoning.

    Raises:
        ConfigError: the model's chat template says nothing of a reasoning.
    """
    limit = params.thinking_token_budget
    if limit is None or limit < 0:
        return None
    tokenizer = target.tokenizer
    if (marks := marks_of(tokenizer)) is None:
        raise ConfigError(
            f"thinking_token_budget={limit}: the chat template of model '{target.name}' has no <think>, so it does not "
            "reason before it answers; leave it out"
        )
    form = Thinking(tokenizer, prompt).form
    if form is None:
        return None
    end = tokenizer((params.thinking_budget_message or "") + marks[1], add_special_tokens=False)["input_ids"]

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    sizes: dict[str, Any] = {"vocab_size": target.vocab_size, "device": target.device}
    return ThinkingBudget(limit, end, decode, begun=form == "open", marks=marks, **sizes)
