"""Which positions of a block predict a reply: found from the markers in the tokens, since a block is all there is.

    <|bos|> <|user|> ⏎ Hi <|end|> ⏎ <|assistant|> ⏎ A cat <|end|> ⏎ <|bos|> A text <|eos|>
                                                    ─ ─── ───────           ─ ──── ───────    tokens of replies

A position is used if the token *after* it belongs to a reply. The line break after ``<|assistant|>`` belongs to the
prompt; the end of a turn belongs to the reply, since the model writes it. A document without turns is a reply from its
first token to its last. The text before the first marker of a block is classified by that marker: a question or a new
document follows an answer, an answer follows a question; text without a marker after it is taken for a document.

Another tokenizer's markers are found by rendering a conversation with its chat template: the tokens before an answer,
the one that ends it, and those with which a user's turn begins.

Letters: B blocks, T positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.data.documents import BOS, END, EOS, ROLES
from foretoken.train.rendering import has_markers, templated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSISTANT = "<|assistant|>"
_ENOUGH = 4  # tokens of a beginning: a conversation's may go on with a date
_TURNS = tuple(f"<|{role}|>" for role in ROLES)


class Replies:
    """Finds the used positions for one tokenizer.

    Args:
        tokenizer: one with neither the zoo's markers nor a chat template has all of its positions used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._turns = None if has_markers(tokenizer) else Turns.of(tokenizer)
        self.known = has_markers(tokenizer) or self._turns is not None
        vocabulary = tokenizer.get_vocab()
        self._names: dict[int, str] = {
            vocabulary[name]: name for name in (BOS, EOS, END, *_TURNS) if self._turns is None and name in vocabulary
        }
        self._ids = torch.tensor(sorted(self._names), dtype=torch.int64)

    def used(self, tokens_BT: Tensor) -> Tensor:
        """Whether the token after each position belongs to a reply.

        Args:
            tokens_BT: int64.
        Returns:
            bool [B, T] on the same device; the last position is never used, since the block has no token after it.
        """
        used_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        if not self.known:
            used_BT[:, :-1] = True
            return used_BT.to(tokens_BT.device)
        tokens_BT = tokens_BT.cpu()
        if self._turns is not None:
            for tokens, used_T in zip(tokens_BT.tolist(), used_BT, strict=True):
                for first, last in self._turns.replies(tokens):
                    used_T[max(first - 1, 0) : max(last - 1, 0)] = True
            return used_BT.to(tokens_BT.device)
        marked_BT = torch.isin(tokens_BT, self._ids)
        for tokens_T, marked_T, used_T in zip(tokens_BT, marked_BT, used_BT, strict=True):
            places: list[int] = marked_T.nonzero().flatten().tolist()
            markers = [(place, self._names[int(tokens_T[place])]) for place in places]
            for first, last in _replies(markers, len(tokens_T)):
                used_T[max(first - 1, 0) : max(last - 1, 0)] = True
        return used_BT.to(tokens_BT.device)


@dataclass(frozen=True)
class Turns:
    """The markers of a chat template, as tokens.

    Attributes:
        opening: before an answer; in many templates it begins with the end of the turn before.
        end: what a model writes at the end of an answer.
        prompts: beginnings of a user's turn and of a conversation, from the token after an ``end`` on.
    """

    opening: tuple[int, ...]
    end: int
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Turns | None:
        """Those of a tokenizer's template; None without one, or where it marks no end."""
        if not tokenizer.chat_template:
            return None
        said = ("hello", "answer", "again", "reply")
        turns = [(ROLES[number % 2], each) for number, each in enumerate(said)]
        try:
            begin, before, after, second, last = re.split("|".join(said), templated(turns, tokenizer))
        except (InputError, ValueError):  # it has turns of other kinds, or adds its own words
            return None
        try:
            instructed = templated([("system", "brief"), *turns], tokenizer).split("brief")[0]
        except InputError:
            instructed = begin
        # a space before a word is a part of the word's token
        texts = [each.rstrip(" ") for each in (begin, instructed, before, after, last)]
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        ends = [token for token in ids[3] if token in special and token in ids[4]]
        if before != second or not ids[2] or not ends:
            return None
        asked, rest = (each[each.index(ends[0]) + 1 :] for each in ids[3:])
        prompts = (asked, ids[0], ids[1], [*rest, *ids[0]], [*rest, *ids[1]])
        return cls(tuple(ids[2]), ends[0], tuple(tuple(each[:_ENOUGH]) for each in prompts if each))

    def replies(self, tokens: list[int]) -> list[tuple[int, int]]:
        """First token and the token after the last, of each reply in a block."""
        found, first = [], 0
        ends = [place for place, token in enumerate(tokens) if token == self.end]
        for last in (*ends, len(tokens)):
            opened = self._opened(tokens, first, last)
            if opened is not None:
                found.append((opened, last))
            elif last < len(tokens) and self._at(tokens, last, self.opening):
                pass  # a question; an answer follows
            elif not any(self._at(tokens, first, each) for each in self.prompts):
                found.append((first, last))
            first = last + 1
        return [(begin, min(end + 1, len(tokens))) for begin, end in found if begin <= end and begin < len(tokens)]

    def _opened(self, tokens: list[int], first: int, last: int) -> int | None:
        """Where an answer begins between two ends, the first of which may be a part of its opening."""
        size = len(self.opening)
        for place in range(max(0, first - size), last - size + 1):
            if self._at(tokens, place, self.opening) and place + size > first:
                return place + size
        return None

    @staticmethod
    def _at(tokens: list[int], place: int, wanted: tuple[int, ...]) -> bool:
        return bool(wanted) and tuple(tokens[place : place + len(wanted)]) == wanted


def _replies(markers: list[tuple[int, str]], length: int) -> list[tuple[int, int]]:
    """First token and the token after the last, of each reply in a block.

    Args:
        markers: place and name of each, in order.
        length: tokens of the block.
    """
    names = [name for _, name in markers]
    found = []
    if _begins_in_reply(names):
        found.append((0, _after(markers, 0, length)))
    for number, (place, name) in enumerate(markers):
        following = markers[number + 1][0] if number + 1 < len(markers) else length
        if name == _ASSISTANT:
            found.append((place + 2, _after(markers, number + 1, length)))
        elif name == BOS and (following > place + 1 or names[number + 1 : number + 2] == [EOS]):
            found.append((place + 1, _after(markers, number + 1, length)))
    return [(first, last) for first, last in found if first < last]


def _begins_in_reply(names: list[str]) -> bool:
    """Whether the text before a block's first marker is a reply."""
    if names[:1] == [END]:
        return len(names) > 1 and names[1] != _ASSISTANT
    return not names or names[0] in (EOS, BOS)


def _after(markers: list[tuple[int, str]], number: int, length: int) -> int:
    """The token after a reply that runs up to marker ``number``, which belongs to it if it is an end."""
    if number >= len(markers):
        return length
    place, name = markers[number]
    return place + (name in (END, EOS))
