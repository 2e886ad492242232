"""What a prompt may be, and the token ids that the model sees of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.errors import InputError
from foretoken.models.language_model import LanguageModel

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class PromptReader:
    """Reads prompts and conversations for one target.

    Args:
        target: whose tokenizer, vocabulary and context.
    """

    def __init__(self, target: LanguageModel) -> None:
        self._target = target
        self._tokenizer = target.tokenizer

    def ids(self, prompt: Prompt, index: int) -> list[int]:
        """The token ids of a prompt.

        Args:
            index: its place among the prompts of a call, for messages.
        Raises:
            InputError: it is empty, too long or of the wrong kind.
        """
        where = f"prompt {index}"
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise InputError(f"{where} has keys {sorted(prompt)}: give 'prompt' or 'prompt_token_ids'")
        if isinstance(prompt, str):
            if not prompt:
                raise InputError(f"{where} is empty: give at least one character")
            _check_unicode(prompt, where)
            ids = list(self._tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            ids = list(prompt)
        else:
            raise InputError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise InputError(f"{where} is empty: give at least one token")
        vocab_size = self._target.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InputError(f"{where} has token id {token}: the vocabulary has {vocab_size} entries")
        if len(ids) >= self._target.max_length:
            raise InputError(
                f"{where} has {len(ids)} tokens; the context holds {self._target.max_length}, "
                "the output included: shorten it"
            )
        return ids

    def of_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, list[int]]:
        """The prompt that the chat template makes of a conversation.

        Args:
            messages: mappings with ``role`` and ``content``, and what else the template reads.
            tools: functions that the model may call, as JSON schemas.
        Raises:
            InputError: the model has no chat template, or messages or tools do not fit it.
        """
        if not self._tokenizer.chat_template:
            raise InputError(f"model '{self._target.name}' has no chat template: use generate with a plain prompt")
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                    raise InputError(f"message {index} needs a string '{key}': {message!r:.80}")
            _check_unicode(message["content"], f"message {index}")
        if tools and "tools" not in str(self._tokenizer.chat_template):
            raise InputError(f"the chat template of model '{self._target.name}' knows no tools: leave them out")
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )["input_ids"]
        except Exception as error:
            # templates raise jinja errors of their own choosing, e.g. "roles must alternate"
            raise InputError(f"the conversation does not fit the model's chat template: {error}") from error
        return {"prompt_token_ids": list(ids)}


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several: a list of integers is one prompt.

    Raises:
        InputError: it is neither, or there are none.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts must be a string, a mapping or a list of them, not {type(prompts).__name__}")
    if prompts and all(isinstance(each, int) for each in prompts):
        return [prompts]
    if not prompts:
        raise InputError("there are no prompts: give at least one")
    return list(prompts)


def _check_unicode(text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place} is not valid Unicode (character {error.start + 1}): save it as UTF-8") from None
