"""What a prompt may be, and the token ids that the model sees of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, InputError, nearest
from foretoken.core.plain import plain
from foretoken.engine.intake import limits

if TYPE_CHECKING:
    from foretoken.models.language_model import LanguageModel

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

OWN_VARIABLES = (  # what the conversation and this program give to a template
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_dict", "return_tensors"),
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")  # of a message
_ADDED = ("refusal", "audio", "annotations", "cache_control", "provider_specific_fields")  # by clients
_FIELDS = ("prompt", "prompt_token_ids")
_ELSEWHERE = {  # keys that prompts have in other programs
    "input_ids": "write {'prompt_token_ids': IDS}",
    "messages": "chat answers conversations",
    "cache_salt": "new_requests and the server take one",
    **dict.fromkeys(("multi_modal_data", "prompt_embeds"), "text and token ids are all that is read here"),
}


class PromptReader:
    """Reads prompts and conversations for one target.

    Args:
        target: its tokenizer, vocabulary and context length count.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._tokenizer = target.tokenizer

    def ids(self, prompt: Prompt, index: int, kept: int | None = None) -> list[int]:
        """The token ids of a prompt.

        Args:
            index: its place among the prompts of a call, for messages.
            kept: how many of them are kept, the last ones; None: all.
        Raises:
            InputError: it is empty, too long or of the wrong kind.
        """
        where = f"prompt {index}"
        if isinstance(prompt, Mapping):
            prompt = _only_field(prompt, where)
        prompt = plain(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise InputError(f"{where} is empty: give at least one character")
            _check_unicode(prompt, where)
            ids = list(self._tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            ids = [plain(each) for each in prompt]
            for token in ids:
                if not isinstance(token, int) or isinstance(token, bool):
                    raise InputError(f"{where} must be a string or a list of token ids, not one of {token!r:.60}")
        else:
            raise InputError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise InputError(f"{where} is empty: give at least one token")
        vocab_size = self._target.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InputError(f"{where} has token id {token}: the vocabulary has {vocab_size} entries")
        if kept is not None:
            ids = ids[-kept:]
        if len(ids) >= self._target.max_length:
            # programs look for these words, to shorten a prompt by themselves
            raise InputError(
                f"{where} has {len(ids)} tokens, and this model's maximum context length is "
                f"{self._target.max_length} tokens, the output included: shorten it"
            )
        return ids

    def of_chat(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, list[int]]:
        """The prompt that the chat template makes of a conversation; see ``LLM.chat_prompt``."""
        name = self._target.name
        if chat_template is not None and not isinstance(chat_template, str):
            raise InputError(f"chat_template must be a text in Jinja, not {type(chat_template).__name__}")
        if chat_template and "{" not in chat_template:
            raise InputError(
                f"chat_template {chat_template!r:.60} says nothing of a conversation: give the text of a template in "
                "Jinja, not the name of its file"
            )
        if tools is not None:
            listed = isinstance(tools, Sequence) and not isinstance(tools, (str, bytes))
            if not listed or not all(isinstance(tool, Mapping) for tool in tools):
                raise InputError(f"tools must be a list of mappings, JSON schemas of functions: {tools!r:.60}")
        template = chat_template or self._tokenizer.chat_template
        if not template:
            raise InputError(f"model '{name}' has no chat template: use generate with a plain prompt")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InputError(f"a conversation must be a list of messages, not {type(messages).__name__}")
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        if tools and "tools" not in str(template):
            raise InputError(f"the chat template of model '{name}' knows no tools: leave them out")
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise InputError(f"chat_template_kwargs must be a mapping, not {type(chat_template_kwargs).__name__}")
        limits.check_flags(add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        for key, value in (chat_template_kwargs or {}).items():
            _check_variable(key, value, str(template))
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message goes with add_generation_prompt=False only")
        said = [_message(message, f"message {index}", str(template)) for index, message in enumerate(messages)]
        try:
            ids = self._tokenizer.apply_chat_template(
                said,
                tools=list(tools) if tools else None,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=True,
                **(chat_template_kwargs or {}),
            )["input_ids"]
        except Exception as error:
            # templates raise jinja errors of their own choosing, e.g. "roles must alternate"
            raise InputError(f"the conversation does not fit the model's chat template: {error}") from error
        return {"prompt_token_ids": list(ids)}


def _check_variable(name: Any, value: Any, template: str) -> None:
    """Refuse a variable that the template does not have: it was meant to change the prompt, unless it is off."""
    if name in OWN_VARIABLES:
        raise InputError(f"chat_template_kwargs has '{name}', which is no variable of a template: leave it out")
    if value is None or value is False:
        return
    if not isinstance(name, str) or not names_in(template, name):
        raise InputError(f"chat_template_kwargs has {name!r:.60}: the chat template has no such variable: leave it out")


def names_in(template: str, name: str) -> bool:
    """Whether a word stands in a template: a variable, a key or a role."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several: a list of integers or an array of one dimension is one prompt.

    Raises:
        InputError: it is neither, or there are none.
    """
    prompts = plain(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InputError(f"prompts must be a string, a mapping or a list of them, not {type(prompts).__name__}")
    found = [plain(each) for each in prompts]
    if found and all(isinstance(each, int) for each in found):
        return [found]
    if not found:
        raise InputError("there are no prompts: give at least one")
    return found


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or several.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f"messages must be a list of messages, or of conversations, not {type(messages).__name__}")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def _only_field(prompt: Mapping[str, Any], where: str) -> Any:
    """The text or the token ids of a prompt that is a mapping."""
    prompt = {key: each for key, each in prompt.items() if each is not None or key not in _ELSEWHERE}
    unknown = [str(key) for key in prompt if key not in _FIELDS]
    if unknown or not prompt:
        remedy = _ELSEWHERE.get(unknown[0]) or nearest(unknown[0], _FIELDS) if unknown else f"give one of {_FIELDS}"
        raise InputError(f"{where} has keys {sorted(map(str, prompt))}: {remedy}")
    if len(prompt) > 1:
        raise InputError(f"{where} has both 'prompt' and 'prompt_token_ids': keep one")
    (value,) = prompt.values()
    if isinstance(value, str) and "prompt_token_ids" in prompt:
        raise InputError(f"{where} has a text in 'prompt_token_ids': write 'prompt'")
    if isinstance(value, Mapping) and "input_ids" in value:  # what tokenizers give
        raise InputError(f"{where} has a {type(value).__name__} in '{next(iter(prompt))}': give its ['input_ids']")
    return value


def _message(message: Any, place: str, template: str) -> dict[str, Any]:
    """A message as the chat template reads it: its content in one text, and nothing that it would drop in silence."""
    if not isinstance(message, Mapping):
        raise InputError(f"{place} must be a mapping with 'role' and 'content', not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InputError(f"{place} needs a string 'role': {message!r:.80}")
    if role not in _ROLES and not names_in(template, role):
        raise InputError(f"{place} has the role {role!r:.60}: {nearest(role, _ROLES)}")
    if role == "developer" and not names_in(template, role):  # OpenAI's later name of it
        role = "system"
    for key, value in message.items():
        known = key in _KEYS or key in _ADDED or value is None
        if not known and not (isinstance(key, str) and names_in(template, key)):
            raise InputError(
                f"{place} has the key {key!r:.60}, which the chat template does not read: {nearest(str(key), _KEYS)}"
            )
    if message.get("tool_calls") and "tool" not in template:
        raise InputError(f"{place} has tool_calls, and the chat template knows no tools: write them as text")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)) and content:
        content = "\n".join(_part(part, f"{place}, part {index}") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise InputError(f"{place} needs a string 'content', or a list of text parts: {message!r:.80}")
    _check_unicode(content, place)
    return {**message, "role": role, "content": content}


def _part(part: Any, place: str) -> str:
    """The text of a part of a message; there are no other parts here."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InputError(f"{place} is of type {kind!r}: models are run on text, give {{'type': 'text', 'text': ...}}")
    return str(part["text"])


def _check_unicode(text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place} is not valid Unicode (character {error.start + 1}): save it as UTF-8") from None
