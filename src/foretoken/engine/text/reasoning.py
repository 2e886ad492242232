"""Reasoning that a model writes before its answer: ``<think>…</think>``, as Qwen3, DeepSeek-R1 and others do, or other
marks.

A chat template may have written the first of the two already, or both where reasoning is switched off.
"""

from collections.abc import Sequence
from typing import Any

from foretoken.engine.text.detokenise import TextStream, possible_begin

MARKS = (  # the begin and the end of a reasoning
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
_TAIL = 12  # last tokens of a prompt to look at


def marks_of(tokenizer: Any) -> tuple[str, str] | None:
    """Return the marks of a model's reasoning that its chat template has; None: it says nothing of a reasoning."""
    return next((marks for marks in MARKS if any(mark in str(tokenizer.chat_template) for mark in marks)), None)


class Thinking:
    """Separates reasoning and answer in a text that comes in pieces.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: token ids that the text continues.
    Attributes:
        form: "open": the prompt has begun the reasoning; "optional": the text may begin with one; None: the prompt has
            ended it, so that nothing is expected.
        num_tokens: tokens of the reasoning so far, its end included.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._open, self._close = marks_of(tokenizer) or MARKS[0]
        tail = str(tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)).rstrip()
        self.form = "open" if tail.endswith(self._open) else None if tail.endswith(self._close) else "optional"
        self.num_tokens = 0
        self._inside = self.form == "open"
        self._answering = False
        self._held = ""
        self._begun = False  # something was handed out of the part that is being read
        self._tokens = TextStream(tokenizer, (self._close,), prompt, skip_special=False)
        self._counting = True

    def read(self, text: str, tokens: Sequence[int], *, final: bool) -> tuple[str, str]:
        """Take in a piece: reasoning and answer that are new, without the line ends around each.

        Args:
            tokens: that the text came with.
            final: nothing follows.
        """
        for token in tokens if self._counting else ():
            self.num_tokens += 1
            if self._tokens.push(token):
                self._counting = False
                break
        self._held += text
        reasoning = ""
        if not self._inside and not self._answering:
            begin = self._held.lstrip()
            if begin.startswith(self._open):
                self._inside, self._held = True, begin[len(self._open) :]
            elif final or not self._open.startswith(begin):
                self._answering, self._begun = True, True  # a text that does not begin with reasoning is as it is
                self.num_tokens, self._counting = 0, False
        if self._inside:
            end = self._held.find(self._close)
            if end >= 0:
                reasoning, self._held = self._out(self._held[:end].rstrip()), self._held[end + len(self._close) :]
                self._inside, self._answering, self._begun = False, True, False
            else:
                keep = 0 if final else _possible_end(self._held, self._close)
                ready = self._held[: len(self._held) - keep]
                reasoning, self._held = self._out(ready), self._held[len(self._held) - keep :]
        if not self._answering:
            return reasoning, ""
        answer, self._held = self._out(self._held), ""
        return reasoning, answer

    def _out(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


def _possible_end(text: str, close: str) -> int:
    """Length of the longest end of the text that may belong to the end of the reasoning, spaces before it included."""
    size = possible_begin(text, (close,))
    rest = text[: len(text) - size]
    return len(text) - len(rest.rstrip())
