"""Files of requests: how they are read, and the answers after an engine died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ForetokenError, InputError
from foretoken.serve import batch
from helpers.serving import NAME
from helpers.zoo_llms import with_config


def line(name: str, **more: Any) -> str:
    body = {"model": NAME, "prompt": "Once", "temperature": 0, "max_tokens": 4, **more}
    return json.dumps({"custom_id": name, "url": "/v1/completions", "body": body}, ensure_ascii=False)


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_the_end_of_a_line_ends_it(tmp_path: Path, begin: str, end: str) -> None:
    """JSON may have what Unicode calls line separators, as they are, inside a text."""
    file = tmp_path / "asked.jsonl"
    text = "one\u2028two\u2029three\x85four"
    file.write_text(begin + end.join([line("a", prompt=text), line("b")]), encoding="utf-8", newline="")
    assert [(each.custom_id, each.body["prompt"]) for each in batch.read(file)] == [("a", text), ("b", "Once")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            line("a").replace('"prompt"', '"max_tokens": 5, "prompt"'),
            "^[^:]*, line 2 has 'max_tokens' twice in one object",
        ),
        (line("a").replace("Once", "\\ud800"), "line 2: body.prompt has a lone surrogate"),
        (line("\\ud800").replace("\\\\", "\\"), "line 2: custom_id has a lone surrogate"),
        (line("a").replace("4", "NaN"), "line 2: body.max_tokens is nan"),
        (line("a")[:-1], "line 2 is not JSON"),
    ],
)
def test_lines_are_read_as_strictly_as_bodies_are(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(f"{line('b')}\n{text}\n")
    with pytest.raises(InputError, match=says):
        batch.read(file)


def test_a_dead_engine_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without an answer can be sent again; an answer that says so would be one for ever."""
    llm = with_config({"method": "suffix"})

    def dies() -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(llm.engine, "step", dies)
    written: list[dict[str, Any]] = []
    asked = [batch.Line(name, "/v1/completions", {"model": NAME, "prompt": "Once"}) for name in "abc"]
    with pytest.raises(ForetokenError, match="the engine has died: no memory"):
        batch.run(llm, NAME, asked, written.append)
    assert written == []
