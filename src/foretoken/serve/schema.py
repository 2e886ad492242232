"""What a client may send. OpenAI's fields, the sampling fields that vLLM adds, and ``speculation``.

Strict: a number is no string, and an unknown field is refused, since a field that is not understood may have been meant
to change the answer. What is known to change nothing here is listed in :class:`Ignored`, taken, and named in the header
``x-foretoken-ignored``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from foretoken.options.sampling import SamplingParams
from foretoken.serve.fields import request_of


def _a_boolean(given: Any) -> Any:
    """What a JSON boolean is: for Python 0 is False."""
    if given is not None and not isinstance(given, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return given


def _an_integer(given: Any) -> Any:
    """The same of an integer: False is none."""
    if given is not None and type(given) is not int:
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return given


_AsItIs = "Of vLLM's; only the value that asks for nothing is taken."
_One = Annotated[float | None, Field(ge=1, le=1, description=_AsItIs)]
_Zero = Annotated[Literal[0] | None, BeforeValidator(_an_integer), Field(description=_AsItIs)]
_No = Annotated[Literal[False] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
_Yes = Annotated[Literal[True] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
OF_RESPONSES = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters of /v1/responses: those that OpenAI has there."""

LOGPROBS = "message.output_text.logprobs"  # what asks for them in /v1/responses
_Count = Annotated[int, Field(ge=1)]
_Index = Annotated[int, Field(ge=0)]
_Name = Annotated[str, Field(min_length=1)]
_TokenIds = list[_Index]


class Fields(BaseModel):
    """Base of all parts of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        """Leave out fields that are not known and null: they say nothing, and clients write whole objects so."""
        if isinstance(given, dict) and any(value is None for value in given.values()):
            names = {field.alias or name for name, field in cls.model_fields.items()} | {*cls.model_fields}
            return {name: value for name, value in given.items() if value is not None or name in names}
        return given


class Ignored(Fields):
    """Fields that change nothing of the answer: whose it is, where it is kept, what it costs."""

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
        """Those that were sent, with a value."""
        return [name for name in Ignored.model_fields if getattr(self, name) is not None]


class Speculation(Fields):
    """How a request is sped up: an extension. Under a lossless recipe it changes the time and not the distribution."""

    enabled: Annotated[bool, Field(description="False: plain decoding.")] = True
    num_speculative_tokens: Annotated[
        _Index | None, Field(description="Draft tokens a step, at most; null: as the server has it.")
    ] = None
    show: Annotated[bool, Field(description="Say of each token whether it was drafted.")] = False

    @property
    def max_draft(self) -> int | None:
        """Draft nodes a step, at most; None: as the recipe has it."""
        return self.num_speculative_tokens if self.enabled else 0


class StreamOptions(Fields):
    """What a stream says next to the text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="Say with every chunk what was used so far; how speculation went, at the end.")
    ] = None
    include_obfuscation: Annotated[bool | None, Field(description="Taken; nothing is added.")] = None


class JsonSchema(Fields):
    """A named schema, as chat completions write it."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class AnyText(Fields):
    """The answer may be any text."""

    type: Literal["text"]


class JsonObject(Fields):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Fields):
    """The answer fits a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyText | JsonObject | SchemaFormat, Field(discriminator="type")]


class Structured(Fields):
    """What the answer has to be: an extension, with vLLM's names. Exactly one of them."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(request_of(SamplingParams, Ignored)):  # type: ignore[misc]  # its fields are declared there
    """Fields of every way to ask. Null or left out: as the checkpoint asks, else OpenAI's default."""

    model: str
    seed: Annotated[int | None, Field(description="Fix every random choice; taken modulo 2**63.")] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: Structured | None = None
    speculation: Speculation | None = None
    cache_salt: Annotated[
        str | None, Field(min_length=1, description="Only requests with the same one share what was read of a prompt.")
    ] = None
    use_beam_search: _No = None
    length_penalty: _One = None
    early_stopping: _No = None
    spaces_between_special_tokens: _Yes = None
    priority: _Zero = None


_Cached = Annotated[Any, Field(description="Taken: what was read of a prompt is kept without being asked.")]


class TextPart(Fields):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    cache_control: _Cached = None

    @model_validator(mode="before")
    @classmethod
    def _by_other_names(cls, given: Any) -> Any:
        """Take pieces as ``/v1/responses`` write them, and a refusal in an earlier answer as what it says."""
        given = _refusal_as_text(given)
        if isinstance(given, dict) and given.get("type") in ("input_text", "output_text"):
            return {**given, "type": "text"}
        return given


def _refusal_as_text(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "refusal" and "refusal" in given:
        return {"text" if name == "refusal" else name: each for name, each in given.items()} | {"type": "text"}
    return given


class FunctionCall(Fields):
    """Which function an answer has called."""

    name: str
    arguments: str
    parsed_arguments: Annotated[Any, Field(description="Taken: clients add it to what they were sent.")] = None


class ToolCall(Fields):
    """A call in an earlier answer."""

    id: str
    index: Annotated[int | None, Field(description="Taken: streams have it.")] = None
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
    provider_specific_fields: Annotated[Any, Field(description="Taken: LiteLLM adds it to earlier answers.")] = None

    @property
    def text(self) -> str:
        """Its content as one text; parts are joined by line ends."""
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
    """A tool that the model may use; functions are known."""

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, Field(exclude=True, description="Taken, as in messages.")] = None


class FunctionName(Fields):
    """A function that is meant."""

    name: str


class NamedTool(Fields):
    """The tool that is to be called."""

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
    verbosity: Annotated[Literal["medium"] | None, Field(description="As the model writes.")] = None
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
    """A piece of an input message of ``/v1/responses``."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, given: Any) -> Any:
        """Take a refusal in an earlier answer as what it says."""
        return _refusal_as_text(given)


class InputMessage(Fields):
    """A message of ``/v1/responses``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1)]
    id: str | None = None
    status: str | None = None
    phase: Annotated[str | None, Field(description="Taken: what an earlier message was for.")] = None


class InputCall(Fields):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Fields):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None


class InputReasoning(Fields):
    """What an earlier answer has thought; taken, and not shown to the model again."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """What an input item is; a message need not say so."""
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
    """A function, as ``/v1/responses`` writes it."""

    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(FunctionName):
    """The tool that is to be called, as ``/v1/responses`` writes it."""

    type: Literal["function"]


class NamedSchema(JsonSchema):
    """The answer fits a JSON schema, as ``/v1/responses`` write it."""

    type: Literal["json_schema"]


class TextFormat(Fields):
    """The form of the answer."""

    format: Annotated[AnyText | JsonObject | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields):
    """How an answer is to be thought about."""

    effort: str | None = None
    summary: Annotated[Any, Field(description="Taken; reasoning is given as it is written.")] = None
    generate_summary: Any = None


class ResponsesRequest(request_of(SamplingParams, Ignored, OF_RESPONSES)):  # type: ignore[misc]
    """``POST /v1/responses``: stateless, text and function tools."""

    user: Annotated[str | None, Field(description="Ignored, and given back.")] = None
    safety_identifier: Annotated[str | None, Field(description="Ignored, and given back.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Ignored, and given back.")] = None
    metadata: Annotated[dict[str, str] | None, Field(description="Ignored, and given back.")] = None
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
    max_tool_calls: Annotated[int | None, Field(ge=1, description="Taken: of tools that run here; there are none.")] = (
        None
    )
    previous_response_id: None = None
    conversation: None = None
    background: bool | None = None
    include: Annotated[
        list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None,
        Field(description="The second asks for log-probabilities; the first is taken, and nothing is encrypted."),
    ] = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
