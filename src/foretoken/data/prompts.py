"""Prompt files: JSON Lines with ``prompt``, or Spec-Bench's ``turns`` and ``category``. An invalid record refuses the
whole file.

One record per line::

    {"id": "m1", "category": "arithmetic", "turns": ["Maria has 24 apples ...", "And if she ..."]}
    {"prompt": "Once upon a time"}

The first turn is the prompt: later turns would need the model's own answers, which differ between models, so a
benchmark of several methods on several models would no longer compare like with like. Files that end in ``.gz`` or
``.xz`` are decompressed.

Files of requests (``foretoken generate --prompts``) may also have ``messages``, a conversation to answer, and their own
sampling params (``max_tokens``, ``temperature``, ...); other fields are refused. A suite is data: additional
descriptive fields are ignored, but fields that would change the request are refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, InputError, nearest
from foretoken.data.readers import json_type, read_placed_records
from foretoken.options.sampling import SamplingParams

BUNDLED_SUITE = Path(__file__).resolve().parent / "prompts.jsonl"
NO_CATEGORY = "uncategorised"

_SAID = ("prompt", "turns", "messages")
_ABOUT = (
    "id",
    "question_id",
    "category",
    "reference",
    "answer",
    "source",
    "metadata",
)  # descriptive fields of a record, without effect
_PARAMS = tuple(each.name for each in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a suite.

    Attributes:
        id: the record's ``id`` or ``question_id``, else its number in the file.
        text: the user's text; the first of the record's turns, the last message of a conversation.
        category: the record's category, or "uncategorised".
        place: file and line, for messages.
        messages: a conversation to answer; empty: the text is the whole prompt.
        params: the record's sampling params.
    """

    id: str
    text: str
    category: str = NO_CATEGORY
    place: str = "the prompt"
    messages: tuple[dict[str, Any], ...] = ()
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


def check_text(text: object, place: str) -> str:
    """Return a prompt's text if a tokenizer accepts it.

    Args:
        text: the record's value.
        place: its place, for the message.
    Raises:
        InputError: not a string, empty, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise InputError(f"{place} must be a string, not {json_type(text)}")
    if not text.strip():
        raise InputError(f"{place} is empty: write something for the model to continue")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place} is not valid Unicode (character {error.start + 1}): save it as UTF-8") from None
    return text


def read_prompts(path: str | Path, *, requests: bool = False) -> list[Prompt]:
    """Read a whole prompt file, or refuse it with the number of its first bad line.

    Args:
        requests: whether records may be conversations, and have their own sampling params.
    Raises:
        InputError: missing or unreadable file, invalid UTF-8 or JSON, a record without a usable prompt, a repeated id,
            no records.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    places: dict[str, str] = {}  # id -> its place
    for place, record in read_placed_records(path, strict=True):
        prompts.append(_parse_record(record, place, len(prompts), requests))
        first = places.setdefault(prompts[-1].id, place)
        if first != place:
            raise InputError(f"{place}: has the id '{prompts[-1].id}' of {first}: ids must be unique")
    if not prompts:
        raise InputError(f"{path}: no prompts in this file: write one JSON object per line, with 'prompt' or 'turns'")
    return prompts


def limit_per_category(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """Return the first ``limit`` prompts of every category, in file order; all of them if ``limit`` is None."""
    kept: list[Prompt] = []
    seen: dict[str, int] = {}
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def filled_up(prompts: Iterable[Prompt], size: int) -> list[Prompt]:
    """Append copies of each category's first prompts until all batches of ``size`` are full."""
    found = list(prompts)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in found:
        by_category.setdefault(prompt.category, []).append(prompt)
    for own in by_category.values():
        found += [replace(own[place % len(own)]) for place in range(-len(own) % size)]
    return found


def _parse_record(record: dict[str, Any], place: str, index: int, requests: bool) -> Prompt:
    said = [key for key in _SAID if key in record]
    if not requests and len(said) > 1 and "messages" in said:
        said.remove("messages")  # a dialogue's record may have all of its messages in addition to the turns
    if not said:
        found = ", ".join(f"'{key}'" for key in list(record)[:5]) or "no fields"
        needed = "'prompt', 'messages' or 'turns'" if requests else "'prompt' or 'turns'"
        raise InputError(f"{place}: needs {needed} (found {found})")
    if len(said) > 1:
        raise InputError(f"{place}: has both '{said[0]}' and '{said[1]}': keep one")
    asked = _asked(record, place, requests)
    messages: tuple[dict[str, Any], ...] = ()
    if "messages" in said:
        messages = _conversation(record["messages"], place)
        text = str(messages[-1]["content"])
    elif "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{place}: field 'turns' must be a non-empty list of strings")
        texts = [check_text(turn, f"{place}: field 'turns[{i}]'") for i, turn in enumerate(turns)]
        text = texts[0]
    else:
        text = check_text(record["prompt"], f"{place}: field 'prompt'")
    category = record.get("category", NO_CATEGORY)
    if category is None:
        category = NO_CATEGORY
    if not isinstance(category, str):
        raise InputError(f"{place}: field 'category' must be a string, not {json_type(category)}")
    identity = record.get("id", record.get("question_id", index))
    return Prompt(str(identity), text, category or NO_CATEGORY, place, messages, asked)


_FOR_ALL = {name: f"it is common to all prompts: use --{name}" for name in ("model", "method", "system", "dtype")}


def _asked(record: dict[str, Any], place: str, requests: bool) -> dict[str, Any]:
    """Return the sampling params of a record; unknown fields are refused."""
    known = (*_SAID, *_ABOUT, *_PARAMS)
    for key in record:
        if requests and key not in known:
            instead = SamplingParams.remedy(key) or _FOR_ALL.get(key)
            remedy = instead or f"{nearest(key, known)}; put your own fields into 'metadata'"
            raise InputError(f"{place}: unknown field '{key}': {remedy}")
        if not requests and (key in _PARAMS or (key == "messages" and "turns" not in record)):
            raise InputError(
                f"{place}: field '{key}' works only in 'foretoken generate --prompts'; here prompts share parameters: "
                "leave it out"
            )
    asked = {key: record[key] for key in record if key in _PARAMS} if requests else {}
    try:
        params = SamplingParams.from_dict(asked)
    except ConfigError as error:
        raise InputError(f"{place}: {error}") from None
    return {name: getattr(params, name) for name in asked}


def _conversation(messages: Any, place: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of a record; the chat template checks them later, when there is a model."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place}: field 'messages' must be a non-empty list of messages")
    for index, message in enumerate(messages):
        where = f"{place}: field 'messages[{index}]'"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{where} must be an object with 'role' and 'content'")
        check_text(message.get("content"), f"{where}: 'content'")
    return tuple(messages)
