"""Keys of JSON objects that are being written, so that none is given twice.

A grammar of JSON cannot count: with ``patternProperties`` or ``additionalProperties`` it permits a key a second time.
So the keys of each open object are removed from the permitted tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_MOST_AHEAD = 64  # tokens that are looked ahead for an end of a key
_Ahead = Callable[[list[int]], np.ndarray[Any, Any]]


class TokenBytes:
    """The bytes of every token, and the tokens that may begin or end a key.

    Args:
        tokens: their bytes, by id.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.of = tokens
        self._ids = {text: index for index, text in enumerate(tokens)}
        self.with_quote = _ids(tokens, re.compile(rb'"'))
        self.with_comma = _ids(tokens, re.compile(rb","))
        self.with_both = _ids(tokens, re.compile(rb'".*,', re.DOTALL))

    def beginning(self, text: bytes) -> Iterable[int]:
        """Return the tokens with which a text may begin."""
        found = (self._ids.get(text[:end]) for end in range(1, len(text) + 1))
        return [each for each in found if each is not None]


def _ids(tokens: Sequence[bytes], pattern: re.Pattern[bytes]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.array([index for index, text in enumerate(tokens) if pattern.search(text)], int)
    return found


class JsonKeys:
    """Follows a JSON text, which a grammar keeps valid, from its first byte.

    Args:
        after: the JSON text begins after these bytes; b"": at the first byte.
        optional: whether it may also begin at the first byte; a preceding text begins with "<" then.
    Attributes:
        twice: an object has been given a key for the second time.
    """

    def __init__(self, after: bytes = b"", *, optional: bool = False) -> None:
        self._after = after
        self._optional = optional
        self._before = b""  # the preceding text so far
        self._objects: list[set[str] | None] = []  # keys of each open object; None: an array
        self._awaits_key = False
        self._in_string = self._in_key = self._escaped = False
        self._string = bytearray()
        self.twice = False

    def copy(self) -> "JsonKeys":
        """Return a twin that goes on by itself."""
        twin = JsonKeys(self._after, optional=self._optional)
        twin.__dict__.update(self.__dict__)
        twin._objects = [None if each is None else set(each) for each in self._objects]
        twin._string = bytearray(self._string)
        return twin

    def feed(self, data: bytes) -> None:
        """Read on."""
        if self._after:
            data = self._skip(data)
        for byte in data:
            if self._in_string:
                self._feed_string(byte)
            elif byte == 0x22:  # "
                self._in_string, self._in_key = True, self._awaits_key
                self._string.clear()
            elif byte in b"{[":
                self._objects.append(set() if byte == 0x7B else None)
                self._awaits_key = byte == 0x7B
            elif byte in b"}]":
                if self._objects:
                    self._objects.pop()
                self._awaits_key = False
            elif byte == 0x2C:  # ,
                self._awaits_key = bool(self._objects) and self._objects[-1] is not None
            elif byte == 0x3A:  # :
                self._awaits_key = False

    def _skip(self, data: bytes) -> bytes:
        self._before += data
        begun = self._before.lstrip()
        if self._optional and begun and not begun.startswith(b"<"):
            self._after = b""
            return begun
        _, found, rest = self._before.partition(self._after)
        if found:
            self._after = b""
        return rest

    def _feed_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == 0x5C:
            self._escaped = True
        elif byte == 0x22:
            self._in_string = False
            if self._in_key:
                self._end_key()
            return
        if self._in_key:
            self._string.append(byte)

    def _end_key(self) -> None:
        keys = self._objects[-1] if self._objects else None
        try:
            key = json.loads(b'"' + bytes(self._string) + b'"')
        except ValueError:  # no JSON: the grammar permits none
            return
        if keys is not None:
            self.twice |= key in keys
            keys.add(key)

    @property
    def _keys(self) -> set[str]:
        """The keys of the innermost object; empty in an array."""
        return (self._objects[-1] if self._objects else None) or set()

    def _rests(self) -> list[bytes]:
        """Return how keys that are there already would go on from here."""
        begun = bytes(self._string) if self._in_string else b""
        written = (json.dumps(key, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass") for key in self._keys)
        return [each[len(begun) :] for each in written if each.startswith(begun)]

    @property
    def _may_get_stuck(self) -> bool:
        """Whether a key is awaited or begun that may turn out to be there already, or to be none that is permitted."""
        if self._in_string:
            return self._in_key and (not self._string or bool(self._rests()))
        return self._awaits_key

    def refuse(self, allowed: np.ndarray[Any, Any], tokens: TokenBytes, ahead: _Ahead | None) -> list[int]:
        """Return the tokens among those allowed that would give a key twice, or lead to where no key is left.

        Args:
            allowed: a truth value for each token.
            tokens: their bytes.
            ahead: returns the tokens allowed after more tokens, as ``allowed``; None: keys may be any text, so that one
                is always left.
        """
        return [each for each in self._suspects(allowed, tokens) if self._leads_nowhere([each], tokens, ahead)]

    def _suspects(self, allowed: np.ndarray[Any, Any], tokens: TokenBytes) -> list[int]:
        if self._after or not self._objects:
            return []
        if self._awaits_key and not self._in_string:
            return [int(each) for each in np.flatnonzero(allowed)]  # few: a quotation mark, perhaps after a space
        if not self._in_string:
            among = tokens.with_comma
        else:
            among = tokens.with_quote if self._in_key else tokens.with_both
        found = among[allowed[among]].tolist()
        if self._in_key and self._in_string:
            found += [each for rest in self._rests() for each in tokens.beginning(rest) if allowed[each]]
        return sorted(set(found))

    def _leads_nowhere(self, path: list[int], tokens: TokenBytes, ahead: _Ahead | None) -> bool:
        after = self.copy()
        after.feed(tokens.of[path[-1]])
        if after.twice:
            return True
        if ahead is None or not after._may_get_stuck or len(path) > _MOST_AHEAD:
            return False
        allowed = ahead(path)
        suspects = after._suspects(allowed, tokens)
        return len(suspects) == int(allowed.sum()) and all(
            after._leads_nowhere([*path, each], tokens, ahead) for each in suspects
        )
