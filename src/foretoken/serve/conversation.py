"""The prompt of a conversation, the constraint on its answer, and the parser of the answer.

Tools go through the chat template. If a template does not support tools, messages describe them and their results, in
the form of Hermes, which is also the form of the parsed calls.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.engine.intake.prompts import OWN_VARIABLES, names_in
from foretoken.engine.request import Request
from foretoken.engine.text.reasoning import Thinking, marks_of
from foretoken.engine.updates import Update
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.harmony import HarmonyReader
from foretoken.serve.messages_schema import CountRequest
from foretoken.serve.responses_schema import ResponsesRequest, ResponseTool
from foretoken.serve.schema import ChatRequest, ConversationRequest, HostedTool, Message, Tool
from foretoken.serve.service import Service
from foretoken.serve.tool_choice import ToolChoice
from foretoken.serve.tool_formats import HARMONY
from foretoken.serve.tool_reader import Reader, reader_of
from foretoken.serve.tools import CLOSE, OPEN, json_or_none

_ENDS = ("<|call|>", "<|return|>")  # of an answer in harmony
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
        close: the end of a call; "": none is written.
        dropped: special tokens in the text that mark no call.
    """

    def __init__(
        self, thinking: Thinking | None, calls: Reader | None, close: str = CLOSE, dropped: Sequence[str] = ()
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._close = close
        self._dropped = re.compile("|".join(map(re.escape, dropped))) if dropped else None

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        if isinstance(self._calls, HarmonyReader):
            return self._calls.reasoning_tokens
        return 0 if self._thinking is None else self._thinking.num_tokens

    def read(self, delta: Update) -> Piece:
        """Parse a delta."""
        final, reasoning, content, calls = delta.finish_reason is not None, "", delta.text, list[dict[str, Any]]()
        if self._dropped is not None:  # the text of a token comes whole
            content = self._dropped.sub("", content)
        if isinstance(self._calls, HarmonyReader):
            self._calls.count(delta.token_ids)
            return Piece(*self._calls.parts(content, final=final))
        if self._thinking is not None:
            reasoning, content = self._thinking.read(content, delta.token_ids, final=final)
        if self._calls is not None:
            content, calls = self._calls.read(content, final=final)
        return Piece(reasoning, content, calls)

    def pieces(self, delta: Update) -> Iterator[Piece]:
        """Parse up to the end of each call, so that text and calls keep their order."""
        close = self._close
        *calls, rest = delta.text.split(close) if self._calls is not None and close else [delta.text]
        tokens = delta.token_ids
        for text in calls:
            yield self.read(replace(delta, text=text + close, token_ids=tokens, finish_reason=None))
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
        body: the request; its settings of the chat template and of the reasoning apply.
    Raises:
        ApiError: 400: the model has no template, or the template refuses these messages or settings.
    Attributes:
        prompt: token ids.
    """

    def __init__(
        self, service: Service, messages: Sequence[Message], choice: ToolChoice, body: ConversationRequest
    ) -> None:
        self._service = service
        self._choice = choice
        self._dropped: tuple[str, ...] = ()
        template = str(service.llm.tokenizer.chat_template)
        tools = [tool.model_dump(exclude_none=True) for tool in choice.tools]
        called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
        plain = [_plain(message, place, template, body, called) for place, message in enumerate(messages)]
        continued = bool(getattr(body, "continue_final_message", None) or messages[-1].prefix)
        if continued and messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of role 'assistant', which the answer continues"
            raise ApiError(400, message, param="messages")
        opened = getattr(body, "add_generation_prompt", None)
        if "tools" not in template:
            plain, tools = _introduced(plain, tools, system=not tools or _takes_system(service.llm.tokenizer)), []
        try:
            self.prompt = service.llm.chat_prompt(
                plain,
                tools=tools,
                add_generation_prompt=not continued if opened is None else opened,
                continue_final_message=continued,
                chat_template_kwargs=_settings(body, template, reasons=service.reasoning),
            )
        except ForetokenError as error:
            raise api_error(error, "messages") from None
        self._budget = _budget(body, reasons=service.reasoning)
        self._reasons = (
            Thinking(service.llm.tokenizer, self.prompt["prompt_token_ids"]).form if service.reasoning else None
        )

    def structure(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The constraint on the answer as ``structured_outputs``; None: any text."""
        return self._choice.structure(form)

    def completed(self, params: SamplingParams) -> SamplingParams:
        """Add the conversation's constraints to the params: a structure follows the reasoning; tools end a text."""
        if self._budget is not None:
            params = replace(params, thinking_token_budget=self._budget)
        wanted = params.structured_outputs
        thoughts = (marks_of(self._service.llm.tokenizer) or ()) if self._service.reasoning else ()
        of_thoughts = {each for each in self._service.special for mark in thoughts if each in mark}
        if isinstance(wanted, StructuredOutputs) and not of_thoughts:  # a grammar knows marks that are text
            params = replace(params, structured_outputs=replace(wanted, reasoning=self._reasons))
        if self._choice.stop is not None:
            params = replace(params, stop=[*params.stop_strings, self._choice.stop])
        if self._choice.form is HARMONY:  # the model's config may not end a text there
            ends = [self._service.special[each] for each in _ENDS if each in self._service.special]
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        self._dropped = ()
        shown = self._choice.marks | of_thoughts
        if shown and params.skip_special_tokens:
            self._dropped = tuple(each for each in self._service.special if each not in shown)
            params = replace(params, skip_special_tokens=False)
        return params

    def reader(self, request: Request) -> AnswerReader:
        """Return a parser for one answer."""
        thinking = None
        if self._service.reasoning:
            thinking = Thinking(self._service.llm.tokenizer, request.tokens[: request.num_prompt])
        choice = self._choice
        if choice.form is HARMONY:
            reader = HarmonyReader(only=choice.forced, end=self._service.special.get("<|end|>"))
            return AnswerReader(None, reader, choice.form.close, self._dropped)
        if not choice.tools:
            return AnswerReader(thinking, None, dropped=self._dropped)
        properties = {
            tool.function.name: found if isinstance(found, Mapping) else {}
            for tool in choice.tools
            for found in ((tool.function.parameters or {}).get("properties", {}),)
        }
        calls = reader_of(choice.form, properties, only=choice.forced)
        return AnswerReader(thinking, calls, choice.form.close, self._dropped)


def offered(body: ChatRequest | ResponsesRequest) -> list[Tool | ResponseTool]:
    """Return the functions among the tools of a request; those that the server would run are noted as ignored."""
    found: list[Tool | ResponseTool] = []
    for tool in body.tools or ():
        if isinstance(tool, HostedTool):
            body.ignore(f"tools[].{tool.type}")
        else:
            found.append(tool)
    return found


def _plain(
    message: Message, place: int, template: str, body: ConversationRequest, called: Mapping[str, str]
) -> dict[str, Any]:
    """Convert a message for the template, where arguments of calls are mappings and results name their function.

    Args:
        called: the functions of the conversation's calls, by the ids of these.
    """
    nothing = message.content is None and message.refusal is None
    if nothing and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, f"messages[{place}] of role '{message.role}' has no content", param="messages")
    said: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    said["content"] = message.text
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in said["tool_calls"]:
            call["function"]["arguments"] = _mapping(call["function"]["arguments"])
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        own = names_in(template, "thinking") and not names_in(template, "reasoning_content")
        said["thinking" if own else "reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            said[name] = getattr(message, name)
    if message.role == "tool" and (function := called.get(message.tool_call_id or "")):
        said.setdefault("name", function)
    for name, value in (message.model_extra or {}).items():
        if names_in(template, name):
            said[name] = value
            body.use(f"messages[].{name}")
    return said


def _mapping(arguments: str) -> Any:
    found = json_or_none(arguments or "{}")
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


def _settings(body: ConversationRequest, template: str, *, reasons: bool) -> dict[str, Any]:
    """Return the template's variables.

    A variable of ``chat_template_kwargs`` that the template does not use must be null, since it would have no effect. A
    wish about reasoning that the template cannot express is noted as ignored: clients send it to every model.
    """
    found = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        if name in OWN_VARIABLES:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is reserved for the server: leave it out",
                param="chat_template_kwargs",
            )
        if names_in(template, name):
            found[name] = value
        elif value:
            message = f"chat_template_kwargs.{name}: the model's chat template has no such variable: leave it out"
            raise ApiError(400, message, param="chat_template_kwargs")
    for variable, wishes in _wishes(body).items():
        for path, value in wishes.items():
            # "none" asks for no reasoning, which is what a model without reasoning does
            idle = value in (False, "none") and not reasons
            if not names_in(template, variable):
                if not idle and not (value == "none" and names_in(template, "enable_thinking")):
                    body.ignore(path)
            elif found.setdefault(variable, value) != value:
                message = f"{path} differs from another field that sets {variable}={found[variable]!r}: keep one"
                raise ApiError(400, message, param=path)
    return found


def _budget(body: ConversationRequest, *, reasons: bool) -> int | None:
    """Return the limit of the reasoning from the fields of other programs; Anthropic's clients send it to every model.

    Raises:
        ApiError: 400: two fields differ.
    """
    given: dict[str, int | None] = {"thinking_token_budget": body.thinking_token_budget}
    if body.reasoning is not None:
        given["reasoning.max_tokens"] = body.reasoning.max_tokens
    if body.thinking is not None and body.thinking.type == "enabled":
        given["thinking.budget_tokens"] = body.thinking.budget_tokens
        if not reasons and given.pop("thinking.budget_tokens") is not None:
            body.ignore("thinking.budget_tokens")
    found = {path: value for path, value in given.items() if value is not None}
    if len(set(found.values())) > 1:
        path = list(found)[-1]
        raise ApiError(400, f"{' and '.join(found)} differ: keep one", param=path)
    return next(iter(found.values()), None)


def _wishes(body: ConversationRequest) -> dict[str, dict[str, Any]]:
    """Return what the fields about reasoning ask for: variable of the template -> path of the field -> value."""
    effort: dict[str, Any] = {"reasoning_effort": body.reasoning_effort}
    think: dict[str, Any] = {"enable_thinking": body.enable_thinking}
    if body.reasoning is not None:
        effort["reasoning.effort"] = body.reasoning.effort
        think["reasoning.enabled"] = body.reasoning.enabled
    if isinstance(body, CountRequest) and body.output_config is not None:
        effort["output_config.effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type != "adaptive":
        think["thinking.type"] = body.thinking.type == "enabled"
    think |= {path: False for path, value in effort.items() if value == "none"}
    given = {"reasoning_effort": effort, "enable_thinking": think}
    return {name: {path: value for path, value in each.items() if value is not None} for name, each in given.items()}
