"""A draft model with another tokenizer than its target's: the text in its tokens, and its drafts in the target's.

    shared   the draft's distribution on the tokens that both have, normalised again: q, which proposals are drawn from
    text     the draft's most probable tokens as text, spelled in the target's tokens: a point mass

Both are exact, whatever the draft is shown: a verifier knows the distribution of each proposed target token. Tokens
are paired by their bytes, not by their spelling in a vocabulary.

Paper: token-level intersection and string-level exact match, Timor et al. 2025, arXiv:2502.05202. Differs: a string is
proposed as a point mass, which every lossless verifier takes.

Letters: C tokens that both have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretoken.core.columns import Columns
from foretoken.core.errors import MismatchError
from foretoken.models.language_model import LanguageModel
from foretoken.models.token_text import TokenText

FEWEST_SHARED = 200
_RESPLIT_BYTES, _RESPLIT_TOKENS = 64, 10  # how far back a longer text may split its last tokens otherwise
_ANCHORS = ("\n", ".", "a")  # texts before a fragment, where a tokenizer changes the beginning of a text


@dataclass(slots=True)
class _Text:
    """One request's text.

    Attributes:
        read: the target's tokens that are in it.
        data: its bytes.
        ids, ends: the draft's tokens, and the bytes up to the end of each.
        fixed: tokens that are not split again.
    """

    read: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    fixed: int = 0


class OtherVocabulary:
    """Translates between a target and a draft model.

    Attributes:
        columns: the target's tokens that the draft has, too.
        draft_C: these tokens in the draft.

    Raises:
        MismatchError: they share too few tokens.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self._target, self._draft = _Side(target), _Side(draft)
        partner_of = {raw: token for token, raw in reversed(self._draft.bytes_of.items())}
        self._draft_of = {
            token: partner_of[raw] for token, raw in reversed(self._target.bytes_of.items()) if raw in partner_of
        }
        taken: dict[int, int] = {}
        for token in sorted(self._draft_of):  # copies of a token: the first one stands for all
            taken.setdefault(self._draft_of[token], token)
        self._draft_of = {token: own for own, token in taken.items()}
        if len(taken) < min(FEWEST_SHARED, len(self._draft.bytes_of) // 2):
            raise MismatchError(
                f"draft model '{draft.name}' shares {len(taken)} tokens with '{target.name}', too few to draft with: "
                "use a draft model of the target's language and kind of tokenizer"
            )
        self._special = self._roles()
        pairs = {**self._draft_of, **{token: own for token, own in self._special.items() if own is not None}}
        self._target_of_special = {own: token for token, own in self._special.items() if own is not None}
        ids = sorted(pairs)
        self.share = len(ids) / len(self._draft.bytes_of)
        self.columns = Columns(torch.tensor(ids, device=target.device), target.vocab_size)
        self.draft_C = torch.tensor([pairs[token] for token in ids], device=target.device)
        self._pairs = pairs
        self._texts: dict[int, _Text] = {}

    def _roles(self) -> dict[int, int | None]:
        """Every special token of the target, and the draft's of the same role or content."""
        ours, theirs = self._target.tokenizer, self._draft.tokenizer
        names = {theirs.convert_ids_to_tokens(token): token for token in self._draft.special}
        found = {token: names.get(ours.convert_ids_to_tokens(token)) for token in self._target.special}
        for role in ("bos_token_id", "eos_token_id"):
            token, own = getattr(ours, role), getattr(theirs, role)
            if token is not None and own is not None and own not in found.values():
                found[token] = own
        return found

    def draft_token(self, token: int) -> int:
        """The draft's token for one of the shared tokens."""
        return self._pairs[token]

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self._texts.pop(request_id, None)

    def text_of(self, request_id: int, tokens: Sequence[int]) -> list[int]:
        """Return a text in the draft's tokens; empty while it ends within a character.

        Args:
            tokens: the target's; a request's later texts mostly continue its earlier ones.
        """
        text = self._texts.get(request_id)
        if text is None or text.read != tokens[: len(text.read)]:
            text = self._texts[request_id] = _Text(ids=list(self._draft.first), ends=[0] * len(self._draft.first))
            text.fixed = len(text.ids)
        for token in tokens[len(text.read) :]:
            text.read.append(token)
            if token not in self._special:
                text.data += self._target.bytes_of.get(token, b"")
            elif (own := self._special[token]) is None:
                text.data += self._target.name_of(token)
            elif text.ids != [own] or text.data:  # the beginning may be marked already
                self._spell(text, len(text.data))
                text.ids.append(own)
                text.ends.append(len(text.data))
                text.fixed = len(text.ids)
        whole = len(text.data) - _incomplete(text.data)
        self._spell(text, whole)
        return list(text.ids) if whole == len(text.data) else []

    def _spell(self, text: _Text, end: int) -> None:
        """Give the draft's tokens for the bytes up to ``end``; the last ones may be split otherwise than before."""
        if (text.ends[-1] if text.ends else 0) >= end:
            return
        kept = len(text.ids)
        while kept > text.fixed:
            begin = text.ends[kept - 2] if kept > 1 else 0
            if len(text.ids) - kept >= _RESPLIT_TOKENS or end - begin > _RESPLIT_BYTES:
                break
            kept -= 1
            if text.data[begin : begin + 1] in b" \n" and len(text.ids) - kept > 1:
                break
        begin = text.ends[kept - 1] if kept else 0
        while kept > text.fixed and text.data[begin] & 0xC0 == 0x80:  # within a character
            kept -= 1
            begin = text.ends[kept - 1] if kept else 0
        fragment = bytes(text.data[begin:end]).decode("utf-8", "replace")
        ids = self._draft.encode(fragment)
        del text.ids[kept:], text.ends[kept:]
        text.ids += ids
        for token in ids:
            begin = min(end, begin + len(self._draft.bytes_of.get(token, b"")))
            text.ends.append(begin)
        if text.ends:
            text.ends[-1] = end
        if self._draft.text_of(ids) != fragment:  # its tokenizer changes texts: their ends are not known
            text.fixed = len(text.ids)

    def spelled(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, int]]:
        """Return the target's tokens for a drafted text, and how many drafted tokens each is complete after.

        Args:
            tokens: the target's committed ones.
            drafted: the draft's.
        """
        raw, ends, last = b"", [], None
        for number, token in enumerate(drafted):
            if token not in self._draft.bytes_of:
                last = self._target_of_special.get(token), number + 1
                break
            raw += self._draft.bytes_of[token]
            ends.append(len(raw))
        raw = raw[: len(raw) - _incomplete(raw)]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return []
        fresh = self._continued(tokens, text)
        found, size = [], 0
        for token in fresh:
            size += len(self._target.bytes_of[token])
            found.append((token, 1 + sum(end < size for end in ends)))
        if last is not None and last[0] is not None and size == len(raw) == (ends[-1] if ends else 0):
            found.append((last[0], last[1]))
        return found

    def _continued(self, tokens: Sequence[int], text: str) -> list[int]:
        """The target's tokens for a text after its committed ones, as its tokenizer would split both together."""
        begin = len(tokens)
        while begin > max(0, len(tokens) - _RESPLIT_TOKENS) and tokens[begin - 1] in self._target.bytes_of:
            begin -= 1
            if self._target.bytes_of[tokens[begin]][:1] in (b" ", b"\n"):
                break
        tail, raw = list(tokens[begin:]), text.encode("utf-8")
        before = b"".join(self._target.bytes_of[token] for token in tail)
        try:
            together = self._target.encode(before.decode("utf-8") + text)
        except UnicodeDecodeError:
            together = []
        for ids in (together[len(tail) :] if together[: len(tail)] == tail else [], self._target.encode(text)):
            if ids and b"".join(self._target.bytes_of.get(token, b"") for token in ids) == raw:
                return ids
        return []


class _Side:
    """One model's tokenizer.

    Attributes:
        special: its special tokens.
        bytes_of: bytes of every other token that the model has a row for.
        first: tokens that it puts before a text.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.tokenizer: Any = model.tokenizer
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            raise MismatchError(
                f"the tokenizer of '{model.name}' has no table of its tokens' bytes, so no draft model of another "
                "vocabulary goes with it: use its fast tokenizer"
            )
        known = TokenText(self.tokenizer)
        self.special, self._known = known.special, known
        ids = range(min(len(self.tokenizer), model.vocab_size))
        self.bytes_of = {token: raw for token in ids if token not in self.special and (raw := known(token)[1])}
        self.first = [token for token in self.tokenizer("").input_ids if token == self.tokenizer.bos_token_id]

    def name_of(self, token: int) -> bytes:
        """A special token as text."""
        return self._known(token)[1]

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(self.bytes_of.get(token, b"") for token in ids).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Tokens of a fragment; where the tokenizer changes beginnings, those after a text that it leaves alone."""
        ids = self._encoded(text)
        if self.text_of(ids) == text:
            return ids
        for anchor in _ANCHORS:
            before, both = self._encoded(anchor), self._encoded(anchor + text)
            if both[: len(before)] == before and self.text_of(both[len(before) :]) == text:
                return both[len(before) :]
        return ids

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _incomplete(data: bytes | bytearray) -> int:
    """Bytes of an incomplete character at the end."""
    for count in range(1, min(4, len(data) + 1)):
        byte = data[-count]
        if byte >= 0xC0:
            return count if count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0
