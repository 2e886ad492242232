"""Request bodies: OpenAI's fields, the sampling fields that vLLM adds, and ``speculation``.

Parsing is strict about types: a number is not a string. An unknown field is accepted and named in the header
``x-foretoken-ignored``, like the fields of :class:`Ignored`, unless it would change the answer (unknown_fields.py).
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from foretoken.options.sampling import SamplingParams
from foretoken.serve import unknown_fields
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


def _a_limit(given: Any) -> Any:
    """Accept -1 as no limit, as llama.cpp and Ollama do, and a float without a fraction."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return None if given == -1 and type(given) is int else given


_AsItIs = "A vLLM field; only the value that turns it off is accepted."
_One = Annotated[float | None, Field(ge=1, le=1, description=_AsItIs)]
_Zero = Annotated[Literal[0] | None, BeforeValidator(_an_integer), Field(description=_AsItIs)]
_No = Annotated[Literal[False] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
_Cached = Annotated[Any, Field(description="Accepted: prompt prefixes are always cached.")]
Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_a_limit)]
_Yes = Annotated[Literal[True] | None, BeforeValidator(_a_boolean), Field(description=_AsItIs)]
_Index = Annotated[int, Field(ge=0)]
_Name = Annotated[str, Field(min_length=1)]
_TokenIds = list[_Index]


class Fields(BaseModel):
    """Base class of all parts of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """The fields that clients may send."""
        return frozenset({field.alias or name for name, field in cls.model_fields.items()} | {*cls.model_fields})

    @model_validator(mode="before")
    @classmethod
    def _check_unknown(cls, given: Any) -> Any:
        """Drop unknown fields that are null, and refuse misspelt ones."""
        return unknown_fields.check(given, cls.names()) if isinstance(given, dict) else given


class Body(Fields):
    """A whole body.

    Attributes:
        ignored: paths of the fields that were sent and have no effect, such as ``tools[].defer_loading``.
    """

    _unknown: list[str] = PrivateAttr(default_factory=list)

    def model_post_init(self, context: Any, /) -> None:
        """Note the unknown fields, at any depth."""
        super().model_post_init(context)
        self._unknown = list(dict.fromkeys(_take_unknown(self)))

    @property
    def unknown(self) -> list[str]:
        """Paths of the fields that no part of the body declares."""
        return self._unknown

    @property
    def ignored(self) -> list[str]:
        """Return the paths of the fields that were sent with a value and have no effect."""
        return [name for name in Ignored.model_fields if getattr(self, name, None) is not None] + self._unknown

    def ignore(self, path: str) -> None:
        """Note that a field has no effect with this model."""
        if path not in self._unknown:
            self._unknown.append(path)

    def use(self, path: str) -> None:
        """Note that an undeclared field has an effect with this model."""
        if path in self._unknown:
            self._unknown.remove(path)


class Ignored(Body):
    """The fields that do not change the answer: the user, the storage, the price class."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        """Rename the fields of other programs."""
        return unknown_fields.translate(given, cls.names()) if isinstance(given, dict) else given


def _take_unknown(part: Any, place: str = "") -> Iterator[str]:
    """Remove undeclared fields and yield their paths; elements of lists share one path.

    Messages keep them: a chat template may read them.
    """
    if isinstance(part, list):
        for each in part:
            yield from _take_unknown(each, f"{place}[]")
    elif isinstance(part, Fields):
        before = f"{place}." if place else ""
        yield from (f"{before}{name}" for name in part.model_extra or ())
        if part.model_extra and not isinstance(part, Message):
            part.model_extra.clear()
        for name, field in type(part).model_fields.items():
            yield from _take_unknown(getattr(part, name), f"{before}{field.alias or name}")


class Speculation(Fields):
    """The ``speculation`` extension. Under a lossless recipe it changes the time and not the distribution."""

    enabled: Annotated[bool, Field(description="False: decode without drafts.")] = True
    num_speculative_tokens: Annotated[
        _Index | None, Field(description="Maximum number of draft tokens per step; null: the server's setting.")
    ] = None
    method: Annotated[
        str | None,
        Field(
            description="What drafts: 'none', the server's method, or one of the two that it chooses between; "
            "null: the server's method."
        ),
    ] = None
    show: Annotated[
        bool, Field(description="Report the drafter of each token, and how many of a draft were refused.")
    ] = False
    metrics: Annotated[
        Literal["none", "summary", "detailed"] | None,
        Field(description="Report metrics.speculative_decoding with the usage; null: the server's setting."),
    ] = None

    @property
    def max_draft(self) -> int | None:
        """Maximum number of draft nodes per step; None: the recipe's setting."""
        return self.num_speculative_tokens if self.enabled and self.method != "none" else 0

    @property
    def source(self) -> str | None:
        """The only drafter of this request; None: the recipe's choice."""
        return None if self.method == "none" else self.method


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


class TextPart(Fields):
    """A content part of a message."""

    type: Literal["text"]
    text: str
    cache_control: _Cached = None

    @model_validator(mode="before")
    @classmethod
    def _by_other_names(cls, given: Any) -> Any:
        """Convert parts in the form of ``/v1/responses``; a refusal in an earlier answer becomes text."""
        given = refusal_as_text(given)
        if isinstance(given, dict) and given.get("type") in ("input_text", "output_text"):
            return {**given, "type": "text"}
        return given


class Prediction(Fields):
    """What the answer is expected to repeat, such as a file to edit."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The predicted text; parts follow each other directly."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ModelName(Fields):
    """A model of this server."""

    model: Annotated[str | None, Field(description="May be absent where one model is served.")] = None


class AdapterName(ModelName):
    """An adapter's name for clients, and its base model."""

    lora_name: Annotated[str, Field(min_length=1)]


class LoadAdapter(AdapterName):
    """A LoRA folder on the server's machine."""

    lora_path: Annotated[str, Field(min_length=1)]


class Sampling(request_of(SamplingParams, Ignored)):  # type: ignore[misc]  # its fields are declared there
    """Fields that all endpoints share. Null or absent: the checkpoint's default, else OpenAI's."""

    model: Annotated[str | None, Field(description="May be absent where one model is served.")] = None
    seed: Annotated[int | None, Field(description="Seed of all random choices; taken modulo 2**63.")] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: Structured | None = None
    prediction: Annotated[
        Prediction | None, Field(description="What the answer is expected to repeat: its tokens are drafts.")
    ] = None
    speculation: Speculation | None = None
    cache_salt: Annotated[
        str | None, Field(min_length=1, description="Only requests with the same salt share a cached prompt prefix.")
    ] = None
    use_beam_search: _No = None
    length_penalty: _One = None
    early_stopping: _No = None
    spaces_between_special_tokens: _Yes = None
    priority: _Zero = None


def refusal_as_text(given: Any) -> Any:
    """Convert a refusal in an earlier answer to a part of text."""
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

    role: Annotated[
        _Name, Field(description="system, developer, user, assistant, tool, or one of the chat template's.")
    ]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    prefix: Annotated[bool | None, Field(description="True in the last message: the answer continues it.")] = None
    refusal: str | None = None
    audio: Annotated[Any, Field(description="Accepted: an earlier answer's audio.")] = None
    annotations: Any = None
    cache_control: _Cached = None
    provider_specific_fields: Annotated[Any, Field(description="Accepted: LiteLLM adds it to earlier answers.")] = None

    @model_validator(mode="before")
    @classmethod
    def _as_tools(cls, given: Any) -> Any:
        """Convert the form that preceded tools: the role ``function``, and ``function_call`` in an answer."""
        if not isinstance(given, dict):
            return given
        if given.get("role") == "function":
            given = {**given, "role": "tool"}
        call = given.get("function_call")
        if isinstance(call, dict) and not given.get("tool_calls"):
            rest = {name: value for name, value in given.items() if name != "function_call"}
            return {**rest, "tool_calls": [{"id": f"call_{call.get('name')}", "function": call}]}
        return given

    @property
    def text(self) -> str:
        """Return the content as one text; parts are joined by line ends."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or self.refusal or ""


class Function(Fields):
    """A function that the model may call."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, Field(exclude=True, description="Accepted, as in messages.")] = None


class HostedTool(BaseModel):
    """A tool that the server would run, such as ``web_search``: left out, and named in ``x-foretoken-ignored``."""

    model_config = ConfigDict(extra="ignore")
    type: _Name


def is_hosted(tool: Any) -> str:
    """Return "hosted" for a tool that the server would run, else "function"."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    return "function" if kind == "function" or not isinstance(kind, str) else "hosted"


AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[HostedTool, Tag("hosted")], Discriminator(is_hosted)]


class FunctionName(Fields):
    """A reference to a function by its name."""

    name: str


class NamedTool(Fields):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class Reasoning(Fields):
    """Settings of the reasoning."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=0, description="OpenRouter's name of thinking_token_budget.")] = None
    summary: Annotated[Any, Field(description="Accepted; reasoning is returned in full.")] = None
    generate_summary: Any = None


class Thinking(Fields):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=0, description="Anthropic's name of thinking_token_budget.")] = None


Verbosity = Annotated[str | None, Field(description="Accepted: the model decides.")]


class ConversationRequest(Sampling):
    """Fields of the paths that answer a conversation."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables of the model's chat template, such as enable_thinking.")
    ] = None
    reasoning_effort: str | None = None
    reasoning: Annotated[
        Reasoning | None, Field(description="The effort, as /v1/responses and OpenRouter name it.")
    ] = None
    thinking: Annotated[Thinking | None, Field(description="Anthropic's form of enable_thinking.")] = None
    enable_thinking: Annotated[bool | None, Field(description="The chat template's variable.")] = None
    parallel_tool_calls: bool | None = None


class ChatRequest(ConversationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity = None
    echo: _No = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="The answer continues the last message, which is the assistant's.")
    ] = None
    add_special_tokens: _No = None


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[_TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[_TokenIds], Field(min_length=1)]
    )
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_a_limit)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    suffix: Annotated[str | None, Field(description="Text after the answer, for models with tokens for infill.")] = None
    add_special_tokens: _Yes = None


class ExtraFile(Fields):
    """Another file that the model sees."""

    filename: str = ""
    text: str


class InfillRequest(Sampling):
    """``POST /infill``, as llama.cpp has it."""

    prompt: Annotated[str, Field(description="Begin of the answer.")] = ""
    input_prefix: Annotated[str, Field(description="Text before the answer.")] = ""
    input_suffix: Annotated[str, Field(description="Text after the answer.")] = ""
    input_extra: Annotated[list[ExtraFile] | None, Field(description="Other files, filename and text.")] = None
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    max_tokens: Limit = None
