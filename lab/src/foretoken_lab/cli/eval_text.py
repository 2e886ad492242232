"""``foretoken eval --text``: what a model keeps of language while it is made good at tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from foretoken.cli.shared.console import emit, emit_json
from foretoken.core.errors import InputError

_OF_A_DOCUMENT = 2048  # tokens: a corpus of long texts is not judged by its first one alone


def read_text(llm: Any, model: str, path: Path, limit: int, as_json: bool, arguments: Sequence[str]) -> None:
    """Read ``limit`` tokens of a file, the first of each of its documents, and say how improbable they were.

    Raises:
        InputError: the file holds fewer than two tokens, or is not understood.
    """
    from foretoken.core.provenance import provenance
    from foretoken_lab.tasks.reading import WINDOW, read

    ids = list(islice(_tokens(llm, path), min(limit, sys.maxsize)))
    if len(ids) < 2:
        raise InputError(f"--text {path}: holds {len(ids)} tokens; at least 2 are needed")
    found = read(llm.target, ids, min(WINDOW, llm.target.max_length))
    if as_json:
        facts = provenance(arguments, model=model, dtype=llm.target.precision)
        emit_json({"model": model, "text": path.name, **asdict(found), "provenance": facts})
        return
    interval = "" if found.interval is None else f" (95 %: {found.interval[0]:.3f} to {found.interval[1]:.3f})"
    emit(
        f"{path.name}: {found.nats:.3f} nats a token{interval}, {found.num_tokens} token{'s' * (found.num_tokens != 1)}"
    )


def _tokens(llm: Any, path: Path) -> Iterator[int]:
    from foretoken.data.documents import documents
    from foretoken.train.rendering import encoder

    encode = encoder(llm.tokenizer)
    for document in documents(path):
        yield from encode([document[: 16 * _OF_A_DOCUMENT]])[0][:_OF_A_DOCUMENT]
