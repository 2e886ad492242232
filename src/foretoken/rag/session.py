"""One request's text, and the keys and values of it under each passage that it was written under.

    slot of passage 7    [start][passage 7][question, answer …]        the same text, read once for each passage;
    slot of passage 3    [start][passage 3][question, answer …]        what is common with the last time stays

The baseline and the speculative method use the same session, so what differs between them is retrieval alone. Slots
stay after a request (the oldest are given up first): the next one that meets the passage does not read it again.
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
from foretoken.rag.config import RagConfig
from foretoken.rag.counts import Counts

NO_PASSAGE = -1
_SLOTS = 6  # passages whose keys and values are kept
_MARK = "\x00text\x00"


class Shelf:
    """Slots of one cache, a passage each.

    Args:
        target: whose keys and values.
        span: hidden states that forwards keep; None: none.
    """

    def __init__(self, target: LanguageModel, span: Span | None = None) -> None:
        self.target = target
        self._span = span
        self._cache = target.new_cache(_SLOTS)
        self._slots: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()  # passage -> slot, what it holds

    def read(self, passage: int, tokens: Sequence[int]) -> tuple[Output, int]:
        """What follows these tokens, and how many of them did not have to be read."""
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
        """What follows the passage's slot and one more token."""
        slot, held = self._slots[passage]
        self._cache.reserve(slot, 1)
        batch = PackedBatch()
        batch.add_chunk(slot, self._cache.lengths[slot], [token], wanted=1)
        output = self.target.forward(batch, DensePlan(self._cache, batch), span=self._span)
        self._cache.commit(slot, [0])
        held.append(token)
        return output

    def clear(self) -> None:
        """Forget all passages."""
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
    """How a prompt is put together, in tokens: start, passage, question.

    A passage and what is after it are tokenised apart, so that the question's tokens do not depend on the passage.

    Attributes:
        tokenizer: the target's.
        before, after: of the text in the chat template, or empty.
    """

    tokenizer: Any
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any) -> Layout:
        """By the chat template, if there is one; else a passage and a text to go on from."""
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", "")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
        )
        before, _, after = text.partition(_MARK)
        return cls(tokenizer, before, after)

    def head(self, passage: str | None, most: int) -> list[int]:
        """What lies before the question, with ``most`` tokens of a passage at most."""
        start = self._ids(self.before) or self._start()
        body = [] if passage is None else self._ids(plain(passage))[:most]
        return [*start, *body, *(self._ids("\n\n") if body else [])]

    def question(self, text: str) -> list[int]:
        """The question, and what makes the model answer it."""
        return self._ids((f"Question: {plain(text)}" if self.after else plain(text)) + self.after)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _start(self) -> list[int]:
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]


class Session:
    """A request while it is written, greedily.

    Args:
        shelf: of the process.
        layout: of prompts.
        text_of: number of a passage -> its text.
        question: as the user wrote it.
        config: for the lengths of passages and queries.
        max_tokens: of the answer.
        ignore_eos: go on past the model's own end of text.
    Raises:
        InputError: the question and its answer do not fit into the context, with a passage of one token.
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
                f"a question of {len(self._body)} tokens and an answer of {max_tokens} leave no room for a passage: "
                f"the context holds {shelf.target.max_length}; shorten the question, or lower --max-tokens"
            )

    @property
    def prompt(self) -> list[int]:
        """The question's tokens."""
        return self._question

    @property
    def answer(self) -> list[int]:
        """What has been written."""
        return self._body[len(self._question) :]

    def query_text(self) -> str:
        """The last tokens as text: a function of their ids, and of nothing else."""
        ids = self._body[-self._config.query_tokens :]
        text: str = self._layout.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode(self, passage: int, count: int) -> None:
        """Write tokens under a passage: ``count``, or fewer to the end."""
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
        """What follows the text under a passage; reads what was not read under it."""
        head = self._head(passage)
        output, kept = self._shelf.read(passage, [*head, *self._body])
        fresh = len(head) + len(self._body) - kept
        of_head = max(0, len(head) - kept)
        self.counts.rows += fresh
        self.counts.passage_rows += of_head
        self._body_rows += fresh - of_head
        return output

    def append(self, token: int) -> None:
        """Take a token; the end of the text or its limit finishes the request."""
        self._body.append(token)
        self.ended = token in self._end_ids
        self.finished = self.ended or len(self.answer) >= self._max_tokens

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self._body) - len(self._question)

    def roll_back(self, length: int, steps: int) -> None:
        """Cut the answer to ``length`` tokens, and forget the last ``steps`` steps."""
        self.counts.discarded_tokens += self.length - length
        del self._body[len(self._question) + length :]
        del self.counts.passages[len(self.counts.passages) - steps :]
        self.finished = self.ended = False

    def close(self) -> None:
        """Settle the counts."""
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
