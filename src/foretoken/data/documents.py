"""Convert records to documents: training text, including special tokens.

A chat goes through the chat template; a text gets ``<|bos|>`` and ``<|eos|>``. Special-token markers inside the data
are broken up first, so that data cannot end a turn.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.data.readers import is_json_lines, read_paragraphs, read_placed_records

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
ROLES = ("user", "assistant", "system")

_TURN = re.compile(rf"<\|({'|'.join(ROLES)})\|>\n(.*?)<\|end\|>", re.DOTALL)
_MARKER = re.compile(r"<\|(?=[a-z]+\|>)")


def plain(text: str) -> str:
    """Return the text with its special-token markers broken up."""
    return _MARKER.sub("< |", text)


def chat(turns: list[tuple[str, str]]) -> str:
    """Format a conversation of (role, content) turns with the zoo's chat template."""
    return BOS + "".join(f"<|{role}|>\n{plain(content)}{END}\n" for role, content in turns)


def exchange(prompt: str, response: str) -> str:
    """Format one question and its answer."""
    return chat([("user", prompt), ("assistant", response)])


def text(content: str) -> str:
    """Format a whole text."""
    return f"{BOS}{plain(content)}{EOS}"


def parts(document: str) -> list[tuple[str, str]]:
    """The source of a document: its (role, content) turns, or one part with the role "text"."""
    body = document.removeprefix(BOS)
    turns = _TURN.findall(body)
    if not turns:
        return [("text", body.removesuffix(EOS))]
    return [(role, content) for role, content in turns]


def documents(path: Path) -> Iterator[str]:
    """Yield every record of a file as a document, depending on its fields.

    ``messages`` (role and content each) is a chat; ``prompt`` with ``response`` is one too; ``text`` is a text, under
    its ``title`` if there is one; ``question`` with ``answers`` is a short exchange; ``document`` with ``queries`` is a
    long text and then a chat about it, and alone a long text; ``turns`` with ``reference`` are the questions and
    answers of a chat. A file that is not JSON Lines is plain text; blank pieces are skipped.

    Raises:
        InputError: the file cannot be read, or a record has none of these fields, or one of the wrong type.
    """
    if not is_json_lines(path):
        yield from (text(piece) for piece in read_paragraphs(path) if piece.strip())
        return
    for place, record in read_placed_records(path):
        yield _document(record, place)


def _document(record: dict[str, Any], place: str) -> str:
    for fields, render in _LAYOUTS:
        if all(field in record for field in fields):
            return render(record, place)
    known = "; ".join(" + ".join(fields) for fields, _ in _LAYOUTS)
    found = ", ".join(f"'{key}'" for key in list(record)[:6]) or "no fields"
    raise InputError(f"{place}: no fields of a known document type (found {found}); known: {known}")


def _string(record: dict[str, Any], field: str, place: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise InputError(f"{place}: field '{field}' must be a string, not {type(value).__name__}")
    return value


def _objects(
    record: dict[str, Any], field: str, needed: tuple[str, str], place: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a non-empty list, each with its place."""
    objects = record[field]
    if not isinstance(objects, list) or not objects:
        raise InputError(f"{place}: field '{field}' must be a non-empty list")
    for index, each in enumerate(objects):
        where = f"{place}: {field}[{index}]"
        if not isinstance(each, dict) or not all(name in each for name in needed):
            raise InputError(f"{where}: must be an object with '{needed[0]}' and '{needed[1]}'")
        yield each, where


def _messages(record: dict[str, Any], place: str) -> str:
    turns = []
    for message, where in _objects(record, "messages", ("role", "content"), place):
        role = _string(message, "role", where)
        if role not in ROLES:
            raise InputError(f"{where}: role '{role}' is not one of {', '.join(ROLES)}")
        turns.append((role, _string(message, "content", where)))
    return chat(turns)


def _exchange(record: dict[str, Any], place: str) -> str:
    return exchange(_string(record, "prompt", place), _string(record, "response", place))


def _text(record: dict[str, Any], place: str) -> str:
    body, title = _string(record, "text", place), record.get("title")
    titled = isinstance(title, str) and title and not body.startswith("#")
    return text(f"# {title}\n\n{body}" if titled else body)


def _question(record: dict[str, Any], place: str) -> str:
    answers = record["answers"]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"{place}: field 'answers' must be a non-empty list of strings")
    return exchange(_string(record, "question", place), answers[0])


def _queries(record: dict[str, Any], place: str) -> str:
    turns = []
    opening = _string(record, "document", place) + "\n\n"
    for query, where in _objects(record, "queries", ("query", "answer"), place):
        turns += [("user", opening + _string(query, "query", where)), ("assistant", _string(query, "answer", where))]
        opening = ""
    return chat(turns)


def _dialogue(record: dict[str, Any], place: str) -> str:
    asked, answered = record["turns"], record["reference"]
    for field, each in (("turns", asked), ("reference", answered)):
        if not isinstance(each, list) or not each or not all(isinstance(said, str) for said in each):
            raise InputError(f"{place}: field '{field}' must be a non-empty list of strings")
    said = zip(asked, answered, strict=False)  # the last turn may be the user's
    return chat([turn for user, assistant in said for turn in (("user", user), ("assistant", assistant))])


def _long_text(record: dict[str, Any], place: str) -> str:
    return text(_string(record, "document", place))


_LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any], str], str]], ...] = (
    (("messages",), _messages),
    (("prompt", "response"), _exchange),
    (("question", "answers"), _question),
    (("document", "queries"), _queries),
    (("turns", "reference"), _dialogue),
    (("document",), _long_text),
    (("text",), _text),
)
