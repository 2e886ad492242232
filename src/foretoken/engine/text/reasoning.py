"""Reasoning that a model writes before its answer: ``<think>…</think>``, as Qwen3, DeepSeek-R1 and others do.

A chat template may have written the first of the two already, or both where reasoning is switched off.
"""

from collections.abc import Sequence
from typing import Any

from foretoken.engine.text.detokenise import TextStream, possible_begin

OPEN, CLOSE = "<think>", "</think>"
_TAIL = 12  # last tokens of a prompt to look at


def knows_reasoning(tokenizer: Any) -> bool:
    """Whether a chat template says that the model reasons."""
    return CLOSE in str(tokenizer.chat_template) or OPEN in str(tokenizer.chat_template)


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
        tail = str(tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)).rstrip()
        self.form = "open" if tail.endswith(OPEN) else None if tail.endswith(CLOSE) else "optional"
        self.num_tokens = 0
        self._inside = self.form == "open"
        self._answering = False
        self._held = ""
        self._begun = False  # something was handed out of the part that is being read
        self._tokens = TextStream(tokenizer, (CLOSE,), prompt)
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
            if begin.startswith(OPEN):
                self._inside, self._held = True, begin[len(OPEN) :]
            elif final or not OPEN.startswith(begin):
                self._answering, self._begun = True, True  # a text that does not begin with reasoning is as it is
                self.num_tokens, self._counting = 0, False
        if self._inside:
            end = self._held.find(CLOSE)
            if end >= 0:
                reasoning, self._held = self._out(self._held[:end].rstrip()), self._held[end + len(CLOSE) :]
                self._inside, self._answering, self._begun = False, True, False
            else:
                keep = 0 if final else _possible_end(self._held)
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


def _possible_end(text: str) -> int:
    """Length of the longest end of the text that may belong to the end of the reasoning, spaces before it included."""
    size = possible_begin(text, (CLOSE,))
    rest = text[: len(text) - size]
    return len(text) - len(rest.rstrip())
