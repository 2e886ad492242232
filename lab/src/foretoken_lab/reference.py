"""Rows of the reference pages, from the declarations: HTTP fields, metrics, commands and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import typer

from foretoken.cli import main
from foretoken.options.option import declared
from foretoken.options.sampling import SamplingParams
from foretoken.serve.messages_schema import CountRequest, MessagesRequest
from foretoken.serve.metrics import LoopCollector, Timings
from foretoken.serve.ollama import OllamaChat, OllamaGenerate
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import (
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    Ignored,
    InfillRequest,
    Sampling,
    Speculation,
)
from foretoken.serve.token_paths import DetokenizeRequest, TemplateRequest, TokenizeRequest

BODIES: dict[str, tuple[str, type[Any]]] = {  # of the paths that take one, by their names in a page
    "chat": ("/v1/chat/completions", ChatRequest),
    "completions": ("/v1/completions", CompletionRequest),
    "infill": ("/infill", InfillRequest),
    "responses": ("/v1/responses", ResponsesRequest),
    "messages": ("/v1/messages", MessagesRequest),
    "count_tokens": ("/v1/messages/count_tokens", CountRequest),
    "ollama_chat": ("/api/chat", OllamaChat),
    "ollama_generate": ("/api/generate", OllamaGenerate),
    "tokenize": ("/tokenize", TokenizeRequest),
    "detokenize": ("/detokenize", DetokenizeRequest),
    "template": ("/apply-template", TemplateRequest),
}
_SHARED = {"every_path": Sampling, "conversations": ConversationRequest, "speculation": Speculation}
_AS_ELSEWHERE = {
    **dict.fromkeys(("messages", "count_tokens"), "as in Anthropic's API"),
    "infill": "as in llama.cpp",
    **dict.fromkeys(("ollama_chat", "ollama_generate"), "as in Ollama's API"),
}
_LAB = (
    *("analyze", "eval", "rag", "calibrate"),
    *("bench serve", "bench verify", "train base", "train features", "train judge"),
)


def http_fields(name: str) -> list[tuple[str, str, str]]:
    """Rows of a body: field, type and meaning; without the fields that it has in common with other paths.

    Args:
        name: of ``BODIES``, or "every_path", "conversations" (their common fields) or "speculation".
    """
    body = _SHARED[name] if name in _SHARED else BODIES[name][1]
    common = [_properties(each) for each in (Sampling, ConversationRequest) if issubclass(body, each) and body != each]
    options = {each.name for each in declared(SamplingParams)} if name == "every_path" else set()
    own = {"tokenize", "detokenize", "template"}
    elsewhere = _AS_ELSEWHERE.get(name, "as in vLLM" if name in own else "as in OpenAI's API")
    rows = []
    for field, schema in _properties(body).items():
        if not any(each.get(field) == schema for each in common):
            meaning = "[option](options.md)" if field in options else schema.get("description") or elsewhere
            if field in Ignored.model_fields and "description" not in schema:
                meaning = "accepted; has no effect"
            rows.append((f"`{field}`", type_of(schema), meaning))
    return rows


def _properties(body: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = body.model_json_schema()["properties"]
    return found


def type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words: "integer from 0 to 20", "text or list"."""
    if "anyOf" in schema or "oneOf" in schema:
        parts = [type_of(each) for each in schema.get("anyOf", schema.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(part for part in parts if part != "null")) or "null"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value}`".lower() if isinstance(value, bool) else f"`{value}`" for value in values)
    words = {"string": "text", "array": "list", "boolean": "true or false", "object": "object"}
    kind = schema.get("type", "object" if "$ref" in schema else "any")
    bounds = [f" {word} {schema[key]:g}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return words.get(kind, kind) + "".join(bounds)


def metrics() -> list[tuple[str, str, str, str]]:
    """Rows of ``/metrics``: name, kind, labels and meaning."""
    totals = SimpleNamespace(
        **dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "tokens", "drafts", "draft_tokens", "accepted_tokens", "steps"), 0
        ),
        accepted_at=[0], ended={"stop": 0}, sources={("suffix", "accepted"): 0}, off_steps={"controller": 0},
    )  # fmt: skip
    model: Any = SimpleNamespace(name="model", totals=totals, loop=None)
    rows = []
    for family in (*Timings("model").all.registry.collect(), *LoopCollector([model]).collect()):
        if family.name.startswith(("process_", "python_")):
            continue
        ends = "_total" if family.type == "counter" else ""
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        rows.append((f"`{family.name}{ends}`", family.type, ", ".join(labels), family.documentation))
    return rows


def exit_codes() -> list[tuple[str, str]]:
    """Rows of the codes with which commands end, from the first page of cli/main.py."""
    said = re.search(r"Exit codes: (.*)\.", main.__doc__ or "")
    assert said is not None
    return [(f"`{code}`", what) for code, _, what in (each.partition(" ") for each in said[1].split("; "))]


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the product with its name, those of the lab left out."""
    yield from _commands("", typer.main.get_command(main.app))


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "list_commands", None)
    if inner is None or getattr(command, "invoke_without_command", False):
        yield path, command
    for name in inner(typer.Context(command)) if inner is not None else ():
        whole = f"{path} {name}".strip()
        if whole not in _LAB:
            yield from _commands(whole, command.get_command(typer.Context(command), name))


def command_rows() -> list[tuple[str, str]]:
    """Rows of the commands: name and purpose, in one sentence."""
    return [
        (f"`foretoken {name}`", " ".join((command.help or "").split("\n\n")[0].split()).partition(". ")[0].rstrip("."))
        for name, command in commands()
    ]
