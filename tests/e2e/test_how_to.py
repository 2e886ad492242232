"""The pages about other programs: their settings lead to paths of the server, and it takes what those programs send.

The programs are not installed here; each page names the version with which it was tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.serving import NAME, Served, served
from helpers.zoo_llms import with_config

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how_to"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
BLOCKS = [
    (page.stem, *found.groups()) for page in sorted(HOW_TO.glob("*.md")) for found in BLOCK.finditer(page.read_text())
]
SHOWN = "http://127.0.0.1:8000"
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 8}},
    "required": ["title"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# what the programs sent in November 2026, shortened
CODEX = {
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]},
    ],
    "tools": [
        {"type": "function", "name": "get_goal", "description": "", "strict": False, "parameters": NO_ARGUMENTS},
        {"type": "namespace", "name": "agents", "description": "", "tools": []},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2233b-1cc8-74a1-b2cb-45902ca74736",
    "client_metadata": {"thread_id": "01a2233b-1cc8-74a1-b2cb-45902ca74736"},
    "max_output_tokens": 4,  # ours: Codex sends no limit
}
CLAUDE_CODE = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
    "system": [{"type": "text", "text": "Write a title.", "cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "{}"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "max_tokens": 32,
    "stream": True,
}
OPENCODE = {
    "messages": [{"role": "system", "content": "Write a title."}, {"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "auto"})) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/responses", CODEX, "event: response.incomplete"),
        ("/v1/messages?beta=true", CLAUDE_CODE, "event: message_stop"),
        ("/v1/chat/completions", OPENCODE, "data: [DONE]"),
    ],
)
def test_the_server_takes_what_an_agent_sends(server: Served, path: str, body: dict[str, Any], end: str) -> None:
    status, text, _ = server.send(path, {"model": NAME, **body})
    assert status == 200, text
    assert end in text


def test_every_address_of_a_page_is_a_path_of_the_server(server: Served) -> None:
    """An address with /v1 is followed by paths of OpenAI's, one without by those of Anthropic's or by all."""
    found = {url for _, _, text in BLOCKS for url in re.findall(rf"{SHOWN}[\w/]*", text)}
    assert found == {SHOWN, f"{SHOWN}/v1", f"{SHOWN}/v1/completions"}
    for url in found:
        path = url.removeprefix(SHOWN)
        wanted = path if path.count("/") > 1 else f"{path.removesuffix('/v1')}/v1/models"
        assert server.get(wanted)[0] in (200, 405), url


def test_settings_can_be_read() -> None:
    tomllib = pytest.importorskip("tomllib")
    read = {"json": json.loads, "toml": tomllib.loads}
    settings = [read[language](text) for _, language, text in BLOCKS if language in read]
    assert len(settings) == 2


@pytest.mark.parametrize("package", ["langchain_openai", "llama_index.llms.openai_like"])
def test_a_framework_runs_as_its_page_says(server: Served, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [text for _, language, text in BLOCKS if language == "python" and f"from {package} import" in text]
    compile(block, package, "exec")
    pytest.importorskip(package.partition(".")[0])
    pytest.importorskip(package)
    exec(block.replace(SHOWN, server.url).replace("zoo:smollm2-135m", NAME), {})
    assert capsys.readouterr().out.strip()
