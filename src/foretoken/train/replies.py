"""Which positions of a block predict a reply: found from the markers in the tokens, since a block is all there is.

    <|bos|> <|user|> ⏎ Hi <|end|> ⏎ <|assistant|> ⏎ A cat <|end|> ⏎ <|bos|> A text <|eos|>
                                                    ─ ─── ───────           ─ ──── ───────    tokens of replies

A position is used if the token *after* it belongs to a reply. The line break after ``<|assistant|>`` belongs to the
prompt; the end of a turn belongs to the reply, since the model writes it. A document without turns is a reply from its
first token to its last. The text before the first marker of a block is classified by that marker: a question or a new
document follows an answer, an answer follows a question; text without a marker after it is taken for a document.

Letters: B blocks, T positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.data.documents import BOS, END, EOS, ROLES
from foretoken.train.rendering import has_markers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSISTANT = "<|assistant|>"
_TURNS = tuple(f"<|{role}|>" for role in ROLES)


class Replies:
    """Finds the used positions for one tokenizer.

    Args:
        tokenizer: one without the zoo's markers has all of its positions used, prompts included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.known = has_markers(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._names: dict[int, str] = {
            vocabulary[name]: name for name in (BOS, EOS, END, *_TURNS) if self.known and name in vocabulary
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
        marked_BT = torch.isin(tokens_BT, self._ids)
        for tokens_T, marked_T, used_T in zip(tokens_BT, marked_BT, used_BT, strict=True):
            places: list[int] = marked_T.nonzero().flatten().tolist()
            markers = [(place, self._names[int(tokens_T[place])]) for place in places]
            for first, last in _replies(markers, len(tokens_T)):
                used_T[max(first - 1, 0) : max(last - 1, 0)] = True
        return used_BT.to(tokens_BT.device)


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
