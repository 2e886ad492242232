"""Request bodies: OpenAI's fields, the sampling fields that vLLM adds, and ``speculation``.

Parsing is strict: a number is not a string, and an unknown field is refused, because it may be meant to change the
answer. :class:`Ignored` lists the fields that have no effect here; they are accepted and named in the header
``x-foretoken-ignored``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from foretoken.options.sampling import SamplingParams
from foretoken.serve.fields import request_of


def _a_boolean(given: Any) -> Any:
    """Accept only a JSON boolean: in Python, 0 equals False."""
    if given is not None and not isinstance(given, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return given


def _an_integer(given: Any) -> Any:
    """Accept only a JSON integer: in Python, False equals 0."""
    if given is not None and type(given) is not int:
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return given


_AsItIs = "A vLLM field; only the value that turns it off is accepted."
_One = Annotated[float | None, Field(ge=1, le=1, description=_AsItIs)]
_Zero = Annotated[Literal[0] | None, BeforeValidator(_an_integer), Field(description=_AsItIs)]
_No = Annotated[Literal[False] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
_Yes = Annotated[Literal[True] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
OF_RESPONSES = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""The sampling parameters of /v1/responses: OpenAI's set."""

LOGPROBS = "message.output_text.logprobs"  # the fields that request them in /v1/responses
_Count = Annotated[int, Field(ge=1)]
_Index = Annotated[int, Field(ge=0)]
_Name = Annotated[str, Field(min_length=1)]
_TokenIds = list[_Index]


class Fields(BaseModel):
    """Base class of all parts of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        """Drop unknown fields that are null: clients often write whole objects."""
        if isinstance(given, dict) and any(value is None for value in given.values()):
            names = {field.alias or name for name, field in cls.model_fields.items()} | {*cls.model_fields}
            return {name: value for name, value in given.items() if value is not None or name in names}
        return given


class Ignored(Fields):
    """Fields that do not change the answer: the user, the storage, the price class."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """Return the names of the fields that were sent with a value."""
        return [name for name in Ignored.model_fields if getattr(self, name) is not None]


class Speculation(Fields):
    """The ``speculation`` extension. Under a lossless recipe it changes the time and not the distribution."""

    enabled: Annotated[bool, Field(description="False: decode without drafts.")] = True
    num_speculative_tokens: Annotated[
        _Index | None, Field(description="Maximum number of draft tokens per step; null: the server's setting.")
    ] = None
    show: Annotated[bool, Field(description="Report for each token whether it was drafted.")] = False

    @property
    def max_draft(self) -> int | None:
        """Maximum number of draft nodes per step; None: the recipe's setting."""
        return self.num_speculative_tokens if self.enabled else 0


class StreamOptions(Fields):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None,
        Field(description="Add the usage so far to every chunk, and the speculation statistics at the end."),
    ] = None
    include_obfuscation: Annotated[bool | None, Field(description="Accepted; adds nothing.")] = None


class JsonSchema(Fields):
    """A named schema in the form of chat completions."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class AnyText(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObject(Fields):
    """A JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Fields):
    """Text that matches a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyText | JsonObject | SchemaFormat, Field(discriminator="type")]


class Structured(Fields):
    """The form of the answer: an extension with vLLM's names. Exactly one field is set."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(request_of(SamplingParams, Ignored)):  # type: ignore[misc]  # its fields are declared there
    """Fields that all endpoints share. Null or absent: the checkpoint's default, else OpenAI's."""

    model: str
    seed: Annotated[int | None, Field(description="Seed of all random choices; taken modulo 2**63.")] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: Structured | None = None
    speculation: Speculation | None = None
    cache_salt: Annotated[
        str | None, Field(min_length=1, description="Only requests with the same salt share a cached prompt prefix.")
    ] = None
    use_beam_search: _No = None
    length_penalty: _One = None
    early_stopping: _No = None
    spaces_between_special_tokens: _Yes = None
    priority: _Zero = None


_Cached = Annotated[Any, Field(description="Accepted: prompt prefixes are always cached.")]


class TextPart(Fields):
    """A content part of a message."""

    type: Literal["text"]
    text: str
    cache_control: _Cached = None

    @model_validator(mode="before")
    @classmethod
    def _by_other_names(cls, given: Any) -> Any:
        """Convert parts in the form of ``/v1/responses``; a refusal in an earlier answer becomes text."""
        given = _refusal_as_text(given)
        if isinstance(given, dict) and given.get("type") in ("input_text", "output_text"):
            return {**given, "type": "text"}
        return given


def _refusal_as_text(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "refusal" and "refusal" in given:
        return {"text" if name == "refusal" else name: each for name, each in given.items()} | {"type": "text"}
    return given


class FunctionCall(Fields):
    """The name and arguments of a call."""

    name: str
    arguments: str
    parsed_arguments: Annotated[Any, Field(description="Accepted: clients add it to the calls that they received.")] = (
        None
    )


class ToolCall(Fields):
    """A tool call in an earlier answer."""

    id: str
    index: Annotated[int | None, Field(description="Accepted: streamed calls have it.")] = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Any = None
    cache_control: _Cached = None
    provider_specific_fields: Annotated[Any, Field(description="Accepted: LiteLLM adds it to earlier answers.")] = None

    @property
    def text(self) -> str:
        """Return the content as one text; parts are joined by line ends."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(Fields):
    """A function that the model may call."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call; only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, Field(exclude=True, description="Accepted, as in messages.")] = None


class FunctionName(Fields):
    """A reference to a function by its name."""

    name: str


class NamedTool(Fields):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables of the model's chat template, such as enable_thinking.")
    ] = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Annotated[Literal["medium"] | None, Field(description="Accepted: the model decides.")] = None
    echo: _No = None
    add_generation_prompt: _Yes = None
    continue_final_message: _No = None
    add_special_tokens: _No = None


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[_TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[_TokenIds], Field(min_length=1)]
    )
    max_tokens: _Index | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    suffix: None = None
    add_special_tokens: _Yes = None


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
        return _refusal_as_text(given)


class InputMessage(Fields):
    """A message of ``/v1/responses``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1)]
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


class ResponseTool(Fields):
    """A function in the form of ``/v1/responses``."""

    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(FunctionName):
    """The tool to call, in the form of ``/v1/responses``."""

    type: Literal["function"]


class NamedSchema(JsonSchema):
    """Text that matches a JSON schema, in the form of ``/v1/responses``."""

    type: Literal["json_schema"]


class TextFormat(Fields):
    """The form of the answer."""

    format: Annotated[AnyText | JsonObject | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields):
    """Settings of the reasoning."""

    effort: str | None = None
    summary: Annotated[Any, Field(description="Accepted; reasoning is returned in full.")] = None
    generate_summary: Any = None


class ResponsesRequest(request_of(SamplingParams, Ignored, OF_RESPONSES)):  # type: ignore[misc]
    """``POST /v1/responses``: stateless, text and function tools."""

    user: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    safety_identifier: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Ignored, and returned in the response.")] = None
    metadata: Annotated[dict[str, str] | None, Field(description="Ignored, and returned in the response.")] = None
    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream: bool | None = None
    text: TextFormat | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: Annotated[
        int | None, Field(ge=1, description="Accepted: it limits tools that run on the server, and there are none.")
    ] = None
    previous_response_id: None = None
    conversation: None = None
    background: bool | None = None
    include: Annotated[
        list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None,
        Field(
            description="The second value requests log-probabilities; the first is accepted, and nothing is encrypted."
        ),
    ] = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
