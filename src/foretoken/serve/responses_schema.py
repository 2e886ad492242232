"""The request body of ``POST /v1/responses``: OpenAI's newer form of a conversation, without stored responses."""

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from foretoken.serve.schema import (
    AnyText,
    ConversationRequest,
    Fields,
    Function,
    FunctionName,
    HostedTool,
    JsonObject,
    JsonSchema,
    Limit,
    Verbosity,
    is_hosted,
    refusal_as_text,
)

LOGPROBS = "message.output_text.logprobs"  # the value of ``include`` that requests log-probabilities


class InputPart(Fields):
    """A content part of an input message of ``/v1/responses``."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """Convert a refusal in an earlier answer to text."""
        return refusal_as_text(given)


class InputMessage(Fields):
    """A message of ``/v1/responses``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: str | None = None
    phase: Annotated[str | None, Field(description="Accepted: the phase of an earlier message.")] = None


class InputCall(Fields):
    """A tool call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Fields):
    """The output of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None


class InputReasoning(Fields):
    """The reasoning of an earlier answer; accepted, and not part of the prompt."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """Return the type of an input item; it is optional for a message."""
    found = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if found is None else str(found)


_KINDS = "message, function_call, function_call_output or reasoning"
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind, custom_error_type="item_type", custom_error_message=f"an item must be of type {_KINDS}"),
]


class ResponseTool(Function):
    """A function in the form of ``/v1/responses``."""

    type: Literal["function"]


AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag("function")] | Annotated[HostedTool, Tag("hosted")], Discriminator(is_hosted)
]


class NamedResponseTool(FunctionName):
    """The tool to call, in the form of ``/v1/responses``."""

    type: Literal["function"]


class NamedSchema(JsonSchema):
    """Text that matches a JSON schema, in the form of ``/v1/responses``."""

    type: Literal["json_schema"]


class TextFormat(Fields):
    """The form of the answer."""

    format: Annotated[AnyText | JsonObject | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Verbosity = None


class ResponsesRequest(ConversationRequest):
    """``POST /v1/responses``: stateless, text and function tools."""

    user: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    safety_identifier: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    metadata: Annotated[dict[str, str] | None, Field(description="Ignored, and returned in the response.")] = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit = None
    max_tokens: None = None
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    text: TextFormat | None = None
    tools: list[AnyResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Field(description="Accepted: a prompt that is too long is refused.")
    ] = None
    max_tool_calls: Annotated[
        int | None, Field(ge=1, description="Accepted: it limits tools that run on the server, and there are none.")
    ] = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    include: Annotated[
        list[str] | None,
        Field(description="message.output_text.logprobs requests log-probabilities; other values have no effect."),
    ] = None

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """See :meth:`Fields.names`; ``max_tokens`` is a spelling of ``max_output_tokens``."""
        names: frozenset[str] = super().names()
        return names - {"max_tokens"}
