"""One request's text, and its keys and values after each of its passages.

    slot of passage 7    [start][passage 7][question, answer …]        the same text, computed once for each passage;
    slot of passage 3    [start][passage 3][question, answer …]        the prefix in common with the last use stays

The baseline and the speculative method use the same session, so they differ only in retrieval. Slots outlive a request
(the oldest are evicted first): a later request with the same passage reuses them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.errors import InputError, RequestError
from foretoken.data.documents import plain
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.prefill import chunks
from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.counts import Counts

NO_PASSAGE = -1
_SLOTS = 6  # maximum passages with stored keys and values
_MARK = "\x00text\x00"


class Shelf:
    """Slots of one KV cache, one per passage.

    Args:
        target: the model of the keys and values.
        span: hidden states that forwards record; None: none.
    """

    def __init__(self, target: LanguageModel, span: Span | None = None) -> None:
        self.target = target
        self._span = span
        self._cache = target.new_cache(_SLOTS)
        self._slots: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()  # passage -> slot and its tokens

    def read(self, passage: int, tokens: Sequence[int]) -> tuple[Output, int]:
        """Return the logits after these tokens, and the number of tokens that were already in the cache."""
        slot, held = self._slots.pop(passage, (None, []))
        if slot is None:
            if not self._cache.free_slots:
                self._cache.release(self._slots.popitem(last=False)[1][0])
            slot = self._cache.acquire()
        self._slots[passage] = slot, held
        kept = min(_common(held, tokens), len(tokens) - 1)
        kept = self._cache.reachable(slot, kept)
        self._cache.rollback(slot, kept)
        del held[kept:]
        output = None
        for begin, end, batch in chunks(self._cache, slot, tokens[kept:]):
            output = self.target.forward(batch, DensePlan(self._cache, batch), span=self._span)
            held += tokens[kept + begin : kept + end]
        assert output is not None
        return output, kept

    def extend(self, passage: int, token: int) -> Output:
        """Return the logits after the passage's slot and one more token."""
        slot, held = self._slots[passage]
        self._cache.reserve(slot, 1)
        batch = PackedBatch()
        batch.add_chunk(slot, self._cache.lengths[slot], [token], wanted=1)
        output = self.target.forward(batch, DensePlan(self._cache, batch), span=self._span)
        self._cache.commit(slot, [0])
        held.append(token)
        return output

    def clear(self) -> None:
        """Remove all passages."""
        while self._slots:
            self._cache.release(self._slots.popitem()[1][0])


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(held, tokens, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a prompt, in tokens: start, passage, question.

    A passage and the text after it are tokenised separately, so that the question's tokens do not depend on the
    passage.

    Attributes:
        tokenizer: the target's.
        before, after: the chat template's text around the prompt, or empty.
    """

    tokenizer: Any
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any) -> Layout:
        """Use the chat template, if there is one; else a passage and a text to continue."""
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", "")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
        )
        before, _, after = text.partition(_MARK)
        return cls(tokenizer, before, after)

    def head(self, passage: str | None, most: int) -> list[int]:
        """Return the tokens before the question, with at most ``most`` tokens of a passage."""
        start = self._ids(self.before) or self._start()
        body = [] if passage is None else self._ids(plain(passage))[:most]
        return [*start, *body, *(self._ids("\n\n") if body else [])]

    def question(self, text: str) -> list[int]:
        """Return the question, and the text that starts the answer."""
        return self._ids((f"Question: {plain(text)}" if self.after else plain(text)) + self.after)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _start(self) -> list[int]:
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]


class Session:
    """A running request, decoded greedily.

    Args:
        shelf: the process's slots.
        layout: the parts of prompts.
        text_of: number of a passage -> its text.
        question: the user's text.
        config: sets the lengths of passages and queries.
        max_tokens: maximum tokens of the answer.
        ignore_eos: continue after the model's own end of text.
    Raises:
        InputError: question and answer exceed the context, even with a passage of one token.
    """

    def __init__(
        self,
        shelf: Shelf,
        layout: Layout,
        text_of: Callable[[int], str],
        question: str,
        config: RagConfig,
        max_tokens: int,
        *,
        ignore_eos: bool = False,
    ) -> None:
        self.counts = Counts()
        self.finished = False
        self.ended = False
        self._shelf = shelf
        self._layout = layout
        self._text_of = text_of
        self._config = config
        self._question = layout.question(question)
        self._body = list(self._question)
        self._max_tokens = max_tokens
        self._end_ids = frozenset() if ignore_eos else shelf.target.end_ids
        bare = len(layout.head(".", 1)) - 1
        self._room = shelf.target.max_length - bare - len(self._body) - max_tokens
        self._heads: dict[int, list[int]] = {}
        self._body_rows = 0
        if self._room < 1:
            raise InputError(
                f"a question of {len(self._body)} tokens and an answer of {max_tokens} leave no tokens for a passage: "
                f"the context holds {shelf.target.max_length}; shorten the question, or lower --max-tokens"
            )

    @property
    def prompt(self) -> list[int]:
        """The question's tokens."""
        return self._question

    @property
    def answer(self) -> list[int]:
        """The text generated so far."""
        return self._body[len(self._question) :]

    def query_text(self) -> str:
        """Return the last tokens as text: a function of their ids only."""
        ids = self._body[-self._config.query_tokens :]
        text: str = self._layout.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode(self, passage: int, count: int) -> None:
        """Generate tokens with a passage: ``count``, or fewer at the end."""
        began = time.perf_counter()
        self.counts.steps += 1
        self.counts.passages.append(passage)
        output: Output | None = None
        for _ in range(count):
            if self.finished:
                break
            output = self.follow(passage) if output is None else self._next(passage)
            if output.peaks[-1] != output.peaks[-1]:
                raise RequestError("the target's logits are NaN")
            self.append(output.best[-1])
        self.counts.decode_seconds += time.perf_counter() - began

    def follow(self, passage: int) -> Output:
        """Return the logits after the text with a passage; computes only the missing rows."""
        head = self._head(passage)
        output, kept = self._shelf.read(passage, [*head, *self._body])
        fresh = len(head) + len(self._body) - kept
        of_head = max(0, len(head) - kept)
        self.counts.rows += fresh
        self.counts.passage_rows += of_head
        self._body_rows += fresh - of_head
        return output

    def append(self, token: int) -> None:
        """Append a token; the end of the text or its limit finishes the request."""
        self._body.append(token)
        self.ended = token in self._end_ids
        self.finished = self.ended or len(self.answer) >= self._max_tokens

    @property
    def length(self) -> int:
        """The tokens of the answer."""
        return len(self._body) - len(self._question)

    def roll_back(self, length: int, steps: int) -> None:
        """Cut the answer to ``length`` tokens, and remove the last ``steps`` steps."""
        self.counts.discarded_tokens += self.length - length
        del self._body[len(self._question) + length :]
        del self.counts.passages[len(self.counts.passages) - steps :]
        self.finished = self.ended = False

    def close(self) -> None:
        """Complete the counts."""
        self.counts.recomputed_rows = max(0, self._body_rows - (len(self._body) - 1))

    def _next(self, passage: int) -> Output:
        self.counts.rows += 1
        self._body_rows += 1
        return self._shelf.extend(passage, self._body[-1])

    def _head(self, passage: int) -> list[int]:
        found = self._heads.get(passage)
        if found is None:
            text = None if passage == NO_PASSAGE else self._text_of(passage)
            found = self._layout.head(text, min(self._config.document_tokens, self._room))
            self._heads[passage] = found
        return found
