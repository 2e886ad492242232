"""The request body of Anthropic's ``POST /v1/messages``, and its conversation as chat messages."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from foretoken.serve.errors import ApiError
from foretoken.serve.schema import (
    ConversationRequest,
    Fields,
    Function,
    FunctionCall,
    Message,
    Thinking,
    Tool,
    ToolCall,
)

_BILLING = "x-anthropic-billing-header:"  # a line of Claude Code that differs in every request


class TextBlock(Fields):
    """Text."""

    type: Literal["text", "mid_conv_system"] = "text"
    text: str
    cache_control: Any = None
    citations: Any = None


class ToolUse(Fields):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolResult(Fields):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class ThinkingBlock(Fields):
    """The reasoning of an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class Dropped(BaseModel):
    """Reasoning that only its author can read."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["redacted_thinking"]


_TYPES = ("text", "mid_conv_system", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _kind(block: Any) -> str:
    found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "text" if found == "mid_conv_system" else str(found)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[Dropped, Tag("redacted_thinking")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message=f"a content block must be one of {', '.join(_TYPES)}: models here read text only",
    ),
]


class Turn(Fields):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Fields):
    """A function that the client runs."""

    type: Annotated[Literal["custom"] | None, Field(description="Tools that the server would run are refused.")] = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None


class Choice(Fields):
    """Which tools the answer may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """The effort and the form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(ConversationRequest):
    """``POST /v1/messages/count_tokens``: a conversation, without the limit of its answer."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    max_tokens: int | None = None
    metadata: Any = None
    cache_control: Any = None
    n: None = None

    def conversation(self) -> list[Message]:
        """Return the conversation as chat messages.

        Raises:
            ApiError: 400: a block is not of its message's role.
        """
        blocks = [TextBlock(text=self.system)] if isinstance(self.system, str) else self.system or []
        system = "\n\n".join(text for each in blocks if (text := _without_billing(each.text)))
        found = [Message(role="system", content=system)] if system else []
        for place, turn in enumerate(self.messages):
            found += _turn(turn, place)
        if found[-1].role == "assistant" and not found[-1].tool_calls:
            found[-1].prefix = True
        return found

    def offered(self) -> list[Tool]:
        """Return the tools in the form of chat completions."""
        return [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in self.tools or ()
        ]


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]


def _without_billing(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest if first.startswith(_BILLING) else text


def _turn(turn: Turn, place: int) -> Iterator[Message]:
    """Yield the chat messages of a turn: results of tools precede the text of the same turn."""
    blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
    texts: list[str] = []
    calls: list[ToolCall] = []
    reasoning: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            if block.type == "mid_conv_system":
                yield Message(role="system", content=block.text)
            else:
                texts.append(block.text)
        elif isinstance(block, ToolResult):
            if turn.role != "user":
                raise ApiError(400, "a tool_result must be in a message of role 'user'", param=f"messages.{place}")
            content = block.content or ""
            text = content if isinstance(content, str) else "\n".join(each.text for each in content)
            text = f"Error: {text}" if block.is_error else text
            yield Message(role="tool", content=text, tool_call_id=block.tool_use_id)
        elif isinstance(block, (ToolUse, ThinkingBlock)):
            if turn.role != "assistant":
                message = f"a {block.type} must be in a message of role 'assistant'"
                raise ApiError(400, message, param=f"messages.{place}")
            if isinstance(block, ToolUse):
                function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCall(id=block.id, function=function))
            else:
                reasoning.append(block.thinking)
    if texts or calls or not any(isinstance(block, ToolResult) for block in blocks):
        found = Message(role=turn.role, content="\n".join(texts))
        found.tool_calls = calls or None
        found.reasoning_content = "\n".join(reasoning) if reasoning else None
        yield found
