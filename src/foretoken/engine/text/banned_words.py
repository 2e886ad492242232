"""From ``bad_words`` and ``allowed_token_ids`` to a constraint: how words are split is the tokenizer's affair."""

import torch

from foretoken.core.errors import ConfigError
from foretoken.core.words import Words
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams


def words_of(params: SamplingParams, target: LanguageModel) -> Words | None:
    """The constraint of a request at its beginning; None if it asks for none.

    A word is forbidden as it is split at the beginning of a text and as it is split after a space. vLLM leaves the
    second out where it has another number of tokens, so that most words could still be written.

    Raises:
        ConfigError: a word has no tokens, or nothing is left that could be written.
    """
    allowed = params.allowed_token_ids
    if allowed is None and not params.bad_words:
        return None
    allowed_V = torch.full((target.vocab_size,), allowed is None, device=target.device)
    if allowed is not None:
        allowed_V[torch.tensor(allowed, device=target.device)] = True
    forbidden = [ids for word in params.bad_words for ids in _splits(word, target)]
    words = Words(allowed_V, forbidden)
    begin_V = words.allowed([])
    if not begin_V.any():
        raise ConfigError("bad_words forbid all that allowed_token_ids allow: nothing could be written")
    return words


def _splits(word: str, target: LanguageModel) -> list[list[int]]:
    """The token sequences of a word."""
    bare = word.lstrip()
    plain, behind = (list(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (bare, f" {bare}"))
    if not plain:
        raise ConfigError(f"bad_words has {word!r:.60}, which has no tokens: leave it out")
    return [plain, behind] if behind and behind != plain else [plain]
