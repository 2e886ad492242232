"""The tokenizer that a GGUF file describes, built with the library ``tokenizers``.

Two kinds are read, by ``tokenizer.ggml.model``:

    gpt2     byte-level BPE: tokens, merges, and a *name* for how text is split before merging (``tokenizer.ggml.pre``)
    llama    SentencePiece BPE with byte fallback: tokens and scores, from which the merges follow

How text is split cannot be seen in the file, and a wrong split is another text, silently; so a name that is not in
tokenizer.json is refused. The library's own conversion is not used: it takes unknown names for GPT-2's, adds an end of
text to vocabularies without one, and differs between the versions that we support.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foretoken.core.errors import ModelError
from foretoken.models.gguf.container import GGUFFile, text_field

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")  # rows of the embedding beyond the vocabulary, as converters name them
_WORDS = {str: "texts", int: "whole numbers", float: "numbers"}


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before merging.

    Attributes:
        pattern: pieces of text that stay together.
        digits: whether every digit is cut off first.
        whole: whether a piece that is a token is taken as it is, whatever the merges say.
        composed: whether accents are composed first (NFC).
        begin: whether a text begins with the token for it where the file does not say.
    """

    pattern: str
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begin: bool = False


_TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SPLITS = {
    name: _Split(_TABLES["patterns"][pattern], **ways)
    for names, pattern, ways in map(dict.values, _TABLES["splits"])
    for name in names
}
_TURN_ENDS = frozenset(_TABLES["turn_ends"])  # as llama.cpp knows them by their text
_GEMMA = ("gemma", "gemma2", "gemma3")  # architectures
_SPACES = re.compile("  +")


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The file's tokenizer, with its chat template if there is one.

    Raises:
        ModelError: there is none, it is of a kind that is not read, or its fields do not fit each other.
    """
    return _Vocabulary(file).tokenizer()


class _Given:
    """A tokenizer that the library does not copy, which would write all of it as text and read it again."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._backend


class _Vocabulary:
    """The vocabulary of the file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._fields = {
            name.removeprefix("tokenizer.ggml."): value
            for name, value in file.fields.items()
            if name.startswith("tokenizer.ggml.")
        }
        kind = self._fields.get("model")
        if kind is None or "tokens" not in self._fields:
            raise self._odd("it holds no tokenizer ('tokenizer.ggml.model', 'tokenizer.ggml.tokens'): convert it again")
        if not isinstance(kind, str) or kind not in _BUILDERS:
            raise self._odd(f"its tokenizer is of kind {kind!r:.40}, which is not read: {', '.join(_BUILDERS)} are")
        self._build = _BUILDERS[kind]
        self.tokens = list(self._list("tokens", None, str))
        self.kinds = list(self._list("token_type", len(self.tokens), int))
        self._gemma = kind == "llama" and file.fields.get("general.architecture") in _GEMMA
        if self._gemma:  # converters write the ▁ of these tokens as spaces, and mark them as if they were not merged
            for index, token in enumerate(self.tokens):
                if _SPACES.fullmatch(token):
                    self.tokens[index], self.kinds[index] = "▁" * len(token), _NORMAL

    @property
    def ids(self) -> dict[str, int]:
        """Of every token but the rows that stand for none."""
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED or not _PADDING.fullmatch(token)
        }

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The library's object."""
        backend, begins = self._build(self)
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            marked = [token for token, each in zip(self.tokens, self.kinds, strict=True) if each == kind]
            backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in marked])
        named = {
            f"{name}_token": self.tokens[index]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (index := self._index(key)) is not None
        }
        begins = bool(self._fields.get("add_bos_token", begins)) and "bos_token" in named
        ends = bool(self._fields.get("add_eos_token", False)) and "eos_token" in named
        before = [named["bos_token"]] if begins else []
        after = [named["eos_token"]] if ends else []
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(text, self.tokens.index(text)) for text in {*before, *after}],
        )
        made = PreTrainedTokenizerFast(
            tokenizer_object=_Given(backend),
            chat_template=text_field(self._file.fields, "tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            additional_special_tokens=[
                token
                for token, kind in zip(self.tokens, self.kinds, strict=True)
                if kind == _CONTROL and token not in named.values()
            ],
            **named,
        )
        made.turn_end_ids = self._turn_ends()
        return made

    def _turn_ends(self) -> list[int]:
        """Return control tokens that are known to end a turn; older files have no field that says so."""
        ends = _TURN_ENDS - ({"<|end|>"} if "<|return|>" in self.tokens else set())  # there it ends a part of an answer
        marked = zip(self.tokens, self.kinds, strict=True)
        return [index for index, (token, kind) in enumerate(marked) if kind == _CONTROL and token in ends]

    def byte_level(self) -> tuple[Tokenizer, bool]:
        """BPE over bytes; whether texts begin with a token for it."""
        name = self._fields.get("pre")
        split = _SPLITS.get(name) if isinstance(name, str) else None
        if split is None:
            what = "does not say how text is split before merging ('tokenizer.ggml.pre')"
            if name is not None:
                what = f"splits text before merging as {name!r:.40} does, which is not known here"
            raise self._odd(f"its tokenizer {what}: {', '.join(_SPLITS)} are read")
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", None, str)]
        ids = self.ids
        parts = {part for pair in merges for part in pair}.union(map("".join, merges))
        if not parts <= ids.keys() or set(map(len, merges)) - {2}:
            raise self._odd("merges of its tokenizer name tokens that it does not have")
        backend = Tokenizer(BPE(ids, merges, ignore_merges=split.whole))
        if split.composed:
            backend.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *steps,
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        return backend, split.begin

    def sentence_piece(self) -> tuple[Tokenizer, bool]:
        """BPE over characters, spaces written as ▁; whether texts begin with a token for it."""
        scores, ids = self._list("scores", len(self.tokens), float), self.ids
        if self._gemma:  # its merges follow the order of the tokens; those of spaces have no score
            scores = [-float(index) for index in range(len(self.tokens))]
        # llama.cpp first merges the neighbours with the best score of the merged token; a merge's rank is that order
        merges = [
            (-scores[index], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
            for token, index in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges.sort()
        unknown = self._index("unknown")
        backend = Tokenizer(
            BPE(
                ids,
                [(left, right) for *_, left, right in merges],
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefixed = bool(self._fields.get("add_space_prefix", True))
        spaced = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaced]) if prefixed else spaced
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
        return backend, True

    def _list(self, name: str, length: int | None, kind: type) -> list[Any]:
        found = self._fields.get(name)
        if not isinstance(found, list) or not all(type(each) is kind for each in found):
            what = "is missing" if found is None else f"is no list of {_WORDS[kind]}"
            raise self._odd(f"its field 'tokenizer.ggml.{name}' {what}")
        if length is not None and len(found) != length:
            raise self._odd(f"its field 'tokenizer.ggml.{name}' has not one entry for each of its {length} tokens")
        return found

    def _index(self, name: str) -> int | None:
        found = self._fields.get(f"{name}_token_id")
        if found is None or (isinstance(found, int) and 0 <= found < len(self.tokens)):
            return found
        raise self._odd(f"its field 'tokenizer.ggml.{name}_token_id' is {found!r:.40}, of {len(self.tokens)} tokens")

    def _odd(self, what: str) -> ModelError:
        return ModelError(f"model '{self._file.path}': {what}")


_BUILDERS: Mapping[str, Callable[[_Vocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _Vocabulary.byte_level,
    "llama": _Vocabulary.sentence_piece,
}
