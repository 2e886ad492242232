"""Documents as the tokens of any tokenizer: the zoo's markers where it has them, else its own chat template.

What a model with another chat format wrote is in that format already; it does not begin as the zoo's documents do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from foretoken.core.errors import InputError
from foretoken.data.documents import BOS, END, EOS, ROLES, parts
from foretoken.train.mixture import Encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARKERS = (BOS, EOS, END, *(f"<|{role}|>" for role in ROLES if role != "system"))


@lru_cache(maxsize=4)  # for every document; a copy of the vocabulary takes milliseconds
def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether documents are in this tokenizer's own chat format already."""
    vocabulary = tokenizer.get_vocab()
    return all(marker in vocabulary for marker in MARKERS)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Turns documents into ids; a model with another chat format sees its own."""
    direct = has_markers(tokenizer)

    def encode(documents: list[str]) -> list[list[int]]:
        texts = documents if direct else [_rendered(document, tokenizer) for document in documents]
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    return encode


def beginning(opening: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of a document as the prompt for a model with this tokenizer."""
    if has_markers(tokenizer):
        return opening
    turns = _parts(opening, tokenizer)
    if turns[0][0] == "text":
        return f"{tokenizer.bos_token or ''}{turns[0][1]}"
    if tokenizer.chat_template:
        return templated(turns, tokenizer, add_generation_prompt=True)
    return "".join(f"{content}\n" for _, content in turns)


def _rendered(document: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not document.startswith(BOS):
        return document
    turns = _parts(document, tokenizer)
    if turns[0][0] == "text":
        return f"{tokenizer.bos_token or ''}{turns[0][1]}{tokenizer.eos_token or ''}"
    if tokenizer.chat_template:
        return templated(turns, tokenizer)
    return "\n".join(content for _, content in turns) + (tokenizer.eos_token or "\n")


def _parts(document: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The parts of a document, in which nothing is read as a special token of this tokenizer."""
    turns = parts(document)
    for special in tokenizer.all_special_tokens:
        turns = [(role, content.replace(special, f"{special[0]} {special[1:]}")) for role, content in turns]
    return turns


def templated(turns: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    """Messages of (role, content) as a tokenizer's chat template renders them.

    Raises:
        InputError: it refuses them.
    """
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:
        raise InputError(f"the model's chat template refuses a conversation of the corpus ({error})") from None
