"""From tokens to text, a few tokens at a time.

A token need not be whole characters, and a stop string may straddle tokens; so text is released only once it can no
longer change: incomplete characters wait, and the longest end that could begin a stop string waits.

A completion continues its prompt: tokenizers of SentencePiece's kind drop the space in front of the first token that
they decode, so the last tokens of the prompt are decoded with it, and their own text is taken away again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from foretoken.options.sampling import SamplingParams

_BROKEN = "\ufffd"  # what an incomplete multi-byte character decodes to


_CONTEXT = 8  # tokens of a prompt to look back at, until one of them is text


def text_of(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), *, skip_special: bool = True) -> str:
    """The text of a completion, as it continues its prompt; without special tokens if ``skip_special``."""
    context = _context(tokenizer, prompt)
    before = _decode(tokenizer, context, skip_special)
    return _decode(tokenizer, [*context, *ids], skip_special)[len(before) :]


def possible_begin(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text that may begin one of the marks."""
    begins = (size for mark in marks for size in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:size]))
    return max(begins, default=0)


def _decode(tokenizer: Any, ids: Sequence[int], skip_special: bool = True) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return text


def _context(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The fewest last tokens of a prompt that have text; none where that text is an incomplete character."""
    for count in range(1, min(_CONTEXT, len(prompt)) + 1):
        text = _decode(tokenizer, prompt[-count:])
        if text:
            return [] if text.endswith(_BROKEN) else list(prompt[-count:])
    return []


class TextStream:
    """The text of one request's output.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop: strings that end the text.
        prompt: token ids that the output continues.
        keep_stop: the string that ends the text stays at its end.
        skip_special: special tokens are left out of the text.
    Attributes:
        text: all of it so far.
        stopped_by: the string that has ended the text; None: none has.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        keep_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._skip_special = skip_special
        self._ids = _context(tokenizer, prompt)
        self._read_from = 0  # start of the window that is decoded again
        self._read_to = len(self._ids)  # tokens before this one are already in the text
        self.text = ""
        self._released = 0

    @classmethod
    def of(cls, tokenizer: Any, params: SamplingParams, prompt: Sequence[int]) -> "TextStream":
        """The text of a request at its beginning.

        Args:
            prompt: token ids that the output continues.
        """
        keep, skip = params.include_stop_str_in_output, params.skip_special_tokens
        return cls(tokenizer, params.stop_strings, prompt, keep_stop=keep, skip_special=skip)

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add one token; True if a stop string is now complete (the text is cut there)."""
        self._ids.append(token)
        before = self._decode(self._read_from, self._read_to)
        now = self._decode(self._read_from, len(self._ids))
        if now.endswith(_BROKEN) or len(now) <= len(before):
            return False
        self.text += now[len(before) :]
        self._read_from, self._read_to = self._read_to, len(self._ids)
        return may_stop and self._cut(len(now) - len(before))

    def close(self) -> None:
        """End the text: release the bytes of an incomplete character, too."""
        before = self._decode(self._read_from, self._read_to)
        fresh = self._decode(self._read_from, len(self._ids))[len(before) :]
        self.text += fresh
        self._read_from = self._read_to = len(self._ids)
        if fresh:
            self._cut(len(fresh))

    def release(self, *, final: bool = False) -> str:
        """Text that was not released before and cannot be taken back any more."""
        end = len(self.text)
        if not final and self._stop:
            end -= possible_begin(self.text, self._stop)
        fresh = self.text[self._released : end]
        self._released = max(self._released, end)
        return fresh

    def _decode(self, start: int, end: int) -> str:
        return _decode(self._tokenizer, self._ids[start:end], self._skip_special)

    def _cut(self, fresh: int) -> bool:
        """Look for the earliest stop string that ends within the last ``fresh`` characters."""
        found = -1
        for stop in self._stop:
            at = self.text.find(stop, max(0, len(self.text) - fresh - len(stop) + 1))
            if at >= 0 and (found < 0 or at < found):
                found, self.stopped_by = at, stop
        if found < 0:
            return False
        if self._keep_stop and self.stopped_by is not None:
            found += len(self.stopped_by)
        self.text = self.text[:found]
        self._ids.clear()
        self._read_from = self._read_to = 0
        return True
