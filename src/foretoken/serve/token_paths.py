"""``/tokenize``, ``/detokenize``, ``/apply-template`` and ``/tokenizer_info``, in the forms of vLLM and llama.cpp."""

from typing import Annotated, Any

from pydantic import Field

from foretoken.serve.conversation import Conversation, offered
from foretoken.serve.errors import ApiError
from foretoken.serve.schema import AnyTool, ChatRequest, Fields, Message, Tool
from foretoken.serve.service import Service
from foretoken.serve.tool_choice import ToolChoice

_INFO = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")


class TokenizeRequest(Fields):
    """``prompt`` or ``messages`` (vLLM), or ``content`` (llama.cpp)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: list[AnyTool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[bool | None, Field(description="Default: true for a prompt.")] = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Fields):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class TemplateRequest(Fields):
    """A conversation to render."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[AnyTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Convert a text or a conversation to token ids.

    Raises:
        ApiError: 400: there is no text, or there are several.
    """
    service.check_model(body.model)
    given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, f"give one of prompt, messages and content, not {given or 'nothing'}", param="prompt")
    tokenizer = service.llm.tokenizer
    if body.content is not None:
        ids = _of_text(tokenizer, body.content, special=body.add_special, parse=body.parse_special)
        return {"tokens": [{"id": id_, "piece": _piece(service, id_)} for id_ in ids] if body.with_pieces else ids}
    if body.prompt is not None:
        ids = _of_text(tokenizer, body.prompt, special=body.add_special_tokens is not False)
    else:
        fields = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        opened = body.add_generation_prompt and not (
            body.continue_final_message and "add_generation_prompt" not in body.model_fields_set
        )
        ids = _of_messages(service, {name: getattr(body, name) for name in fields} | {"add_generation_prompt": opened})
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.target.max_length, "tokens": ids}
    return found | {"token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None}


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, str]:
    """Convert token ids to text, under the names of both programs.

    Raises:
        ApiError: 400: an id is outside of the vocabulary.
    """
    service.check_model(body.model)
    size = service.llm.target.vocab_size
    for token in body.tokens:
        if token >= size:
            raise ApiError(400, f"tokens has the id {token}: the vocabulary has {size} entries", param="tokens")
    text = service.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}


def apply_template(service: Service, body: TemplateRequest) -> dict[str, str]:
    """Render a conversation as the prompt of its answer."""
    service.check_model(body.model)
    fields = {"messages": body.messages, "tools": body.tools, "chat_template_kwargs": body.chat_template_kwargs}
    ids = _of_messages(service, fields)
    return {"prompt": service.llm.tokenizer.decode(ids, skip_special_tokens=False)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the tokenizer's special tokens and template, as lm-eval's remote tokenizer reads them."""
    tokenizer = service.llm.tokenizer
    return {"tokenizer_class": type(tokenizer).__name__} | {name: getattr(tokenizer, name, None) for name in _INFO}


def _of_text(tokenizer: Any, text: str, *, special: bool, parse: bool = True) -> list[int]:
    more = {} if parse else {"split_special_tokens": True}
    return list(tokenizer(text, add_special_tokens=special, **more)["input_ids"])


def _of_messages(service: Service, fields: dict[str, Any]) -> list[int]:
    """Return the token ids that a chat request with these fields has."""
    body = ChatRequest.model_construct(**{"model": None, **fields})
    tools = [tool for tool in offered(body) if isinstance(tool, Tool)]
    choice = ToolChoice(tools, None, None, parallel=None, writes=service.tool_grammar)
    return list(Conversation(service, body.messages, choice, body).prompt["prompt_token_ids"])


def _piece(service: Service, token: int) -> str | list[int]:
    """Return a token's text; its bytes, where they are a part of a character."""
    raw = service.token_text(token)[1]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
