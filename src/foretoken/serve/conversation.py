"""The prompt of a conversation, the constraint on its answer, and the parser of the answer.

Tools go through the chat template. If a template does not support tools, messages describe them and their results, in
the form of Hermes, which is also the form of the parsed calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.engine.intake.prompts import OWN_VARIABLES
from foretoken.engine.request import Request
from foretoken.engine.text.reasoning import Thinking
from foretoken.engine.updates import Update
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.schema import Message
from foretoken.serve.service import Service
from foretoken.serve.tool_choice import ToolChoice
from foretoken.serve.tools import CLOSE, OPEN, CallReader

_TOOLS = """\
You may call functions. These are their names, purposes and parameters, one a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments, in this form:
{begin}
{{"name": "the function's name", "arguments": {{"the parameter's name": "its value"}}}}
{end}"""


@dataclass(frozen=True, slots=True)
class Piece:
    """New parts of an answer: reasoning, text, and calls as OpenAI streams them."""

    reasoning: str
    content: str
    calls: list[dict[str, Any]]


class AnswerReader:
    """Parses one answer into reasoning, text and calls.

    Args:
        thinking: separates the reasoning; None: there is none.
        calls: parses calls; None: there are none.
    """

    def __init__(self, thinking: Thinking | None, calls: CallReader | None) -> None:
        self._thinking = thinking
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return 0 if self._thinking is None else self._thinking.num_tokens

    def read(self, delta: Update) -> Piece:
        """Parse a delta."""
        final, reasoning, content, calls = delta.finish_reason is not None, "", delta.text, list[dict[str, Any]]()
        if self._thinking is not None:
            reasoning, content = self._thinking.read(content, delta.token_ids, final=final)
        if self._calls is not None:
            content, calls = self._calls.read(content, final=final)
        return Piece(reasoning, content, calls)

    def pieces(self, delta: Update) -> Iterator[Piece]:
        """Parse up to the end of each call, so that text and calls keep their order."""
        *calls, rest = delta.text.split(CLOSE) if self._calls is not None else [delta.text]
        tokens = delta.token_ids
        for text in calls:
            yield self.read(replace(delta, text=text + CLOSE, token_ids=tokens, finish_reason=None))
            tokens = []
        yield self.read(replace(delta, text=rest, token_ids=tokens))

    def reason(self, delta: Update) -> str | None:
        """Return the reason for the end of an answer, in OpenAI's terms."""
        return "tool_calls" if self.num_calls and delta.finish_reason == "stop" else delta.finish_reason


class Conversation:
    """A conversation to answer.

    Args:
        service: the model.
        messages: the conversation.
        choice: the tools.
        settings: variables of the chat template.
        effort: the reasoning effort, and its field.
    Raises:
        ApiError: 400: the model has no template, or the template refuses these messages or settings.
    Attributes:
        prompt: token ids.
    """

    def __init__(
        self,
        service: Service,
        messages: Sequence[Message],
        choice: ToolChoice,
        settings: Mapping[str, Any] | None = None,
        effort: tuple[str | None, str] = (None, ""),
    ) -> None:
        self._service = service
        self._choice = choice
        template = str(service.llm.tokenizer.chat_template)
        tools = [tool.model_dump(exclude_none=True) for tool in choice.tools]
        plain = [_plain(message, place) for place, message in enumerate(messages)]
        if "tools" not in template:
            plain, tools = _introduced(plain, tools, system=not tools or _takes_system(service.llm.tokenizer)), []
        try:
            self.prompt = service.llm.chat_prompt(
                plain, tools=tools, chat_template_kwargs=_settings(settings, template) | _effort(*effort, template)
            )
        except ForetokenError as error:
            raise api_error(error, "messages") from None
        self._reasons = (
            Thinking(service.llm.tokenizer, self.prompt["prompt_token_ids"]).form if service.reasoning else None
        )

    def structure(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The constraint on the answer as ``structured_outputs``; None: any text."""
        return self._choice.structure(form)

    def completed(self, params: SamplingParams) -> SamplingParams:
        """Add the conversation's constraints to the params: a structure follows the reasoning; tools end a text."""
        wanted = params.structured_outputs
        if isinstance(wanted, StructuredOutputs):
            params = replace(params, structured_outputs=replace(wanted, reasoning=self._reasons))
        if self._choice.stop is not None:
            params = replace(params, stop=[*params.stop_strings, self._choice.stop])
        return params

    def reader(self, request: Request) -> AnswerReader:
        """Return a parser for one answer."""
        thinking = None
        if self._service.reasoning:
            thinking = Thinking(self._service.llm.tokenizer, request.tokens[: request.num_prompt])
        return AnswerReader(thinking, CallReader() if self._choice.tools else None)


def _plain(message: Message, place: int) -> dict[str, Any]:
    """Convert a message for the template, where arguments of calls are mappings."""
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, f"messages[{place}] of role '{message.role}' has no content", param="messages")
    said: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    said["content"] = message.text
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in said["tool_calls"]:
            call["function"]["arguments"] = _mapping(call["function"]["arguments"])
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        said["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            said[name] = getattr(message, name)
    return said


def _mapping(arguments: str) -> Any:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _takes_system(tokenizer: Any) -> bool:
    """Return whether the chat template renders a system message; some refuse it, and some leave it out."""
    mark = "is this shown?"
    probe = [{"role": "system", "content": mark}, {"role": "user", "content": "-"}]
    try:
        return mark in tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:  # a template may raise any error
        return False


def _introduced(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Rewrite a conversation for a template without tools, calls and results.

    Args:
        system: whether the template supports a system message; else the first user message describes the tools.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("of_tools"):  # templates require user and assistant in turns
                found[-1]["content"] += "\n" + content
            else:
                found.append({"role": "user", "content": content, "of_tools": True})
            continue
        if message["role"] == "user" and found and found[-1].get("of_tools"):
            found[-1]["content"] += "\n\n" + content
            continue
        calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
        content = "\n".join([*([content] if content else []), *calls])
        found.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content})
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        words = _TOOLS.format(tools=lines, begin=OPEN, end=CLOSE)
        first = next((place for place, message in enumerate(found) if message["role"] == "user"), None)
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{words}"}
        elif system or first is None:
            found.insert(0, {"role": "system" if system else "user", "content": words})
        else:
            found[first] = {**found[first], "content": f"{words}\n\n{found[first]['content']}"}
    return [{key: value for key, value in message.items() if key != "of_tools"} for message in found]


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def _settings(given: Mapping[str, Any] | None, template: str) -> dict[str, Any]:
    """Return the template's variables. A variable that the template does not use must be null, since it would have no
    effect.
    """
    found = {}
    for name, value in (given or {}).items():
        if name in OWN_VARIABLES:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is reserved for the server: leave it out",
                param="chat_template_kwargs",
            )
        if re.search(rf"\b{re.escape(name)}\b", template):
            found[name] = value
        elif value:
            message = f"chat_template_kwargs.{name}: the model's chat template has no such variable: leave it out"
            raise ApiError(400, message, param="chat_template_kwargs")
    return found


def _effort(value: str | None, field: str, template: str) -> dict[str, Any]:
    """Return the template's variables for the reasoning effort, if it has any."""
    if value is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": value}
    if value == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    raise ApiError(400, f"{field}='{value}': the model's chat template has no such setting: leave it out", param=field)
