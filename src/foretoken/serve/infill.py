"""Infill: the prompt from which a model writes the text between a prefix and a suffix (fill in the middle)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.serve.errors import ApiError


class Form(NamedTuple):
    """The marks before prefix, suffix and answer; the answer's is empty where the model writes after the prefix.

    ``suffix_first``: the suffix stands before the prefix.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


_FILE = Path(__file__).with_suffix(".json")  # the forms by the families of models that have them
FORMS = tuple(Form(*form) for form in json.loads(_FILE.read_text(encoding="utf-8")).values())
_FILE_MARKS = ("<|file_sep|>", "<file_sep>")  # before the name of a file
# marks of another file or of the end, where an answer is complete
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<reponame>", "<|endoftext|>", "<EOT>", "▁<EOT>")


class Infill:
    """The form of one model's infill prompts.

    Args:
        tokenizer: the model's.
    Raises:
        ApiError: 400: it has the marks of no form.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = tokenizer.get_vocab()
        form = next((form for form in FORMS if all(mark in known for mark in form[:3] if mark)), None)
        if form is None:
            looked_for = ", ".join(form.suffix for form in FORMS)
            message = f"this model has no tokens for infill ({looked_for}): leave 'suffix' out"
            raise ApiError(400, message, param="suffix")
        self._form, self._known, self._tokenizer = form, known, tokenizer
        self.stops = [known[mark] for mark in _ENDS if mark in known]

    def prompt(
        self,
        prefix: str | Sequence[int],
        suffix: str,
        limit: int,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
    ) -> list[int]:
        """The token ids of a prompt; marks inside the texts are text.

        Args:
            prefix: as text, or as tokens.
            files: names and texts of other files, which stand in front; as many of the last ones as fit into a half.
            begun: the begin of the answer.
            limit: tokens that the prompt may have. If both texts have more, the suffix keeps its beginning, a quarter
                of the limit at least, and the prefix its end.
        """
        before = self._tokens(prefix) if isinstance(prefix, str) else list(prefix)
        after = self._tokens(suffix)
        empty = list(map(int, self._tokenizer("")["input_ids"]))  # what begins every text of this model
        start = empty if empty == [self._tokenizer.bos_token_id] else []
        separator = next(([self._known[each]] for each in _FILE_MARKS if each in self._known), [])
        shown = [token for name, text in files for token in (*separator, *self._tokens(f"{name}\n{text}\n"))]
        start, end = [*start, *shown[max(0, len(shown) - limit // 2) :], *separator[: len(files)]], self._tokens(begun)
        limit = max(limit - len(start) - len(end) - sum(1 for mark in self._form[:3] if mark), 2)
        after = after[: max(limit // 4, limit - len(before))]
        before = before[max(0, len(before) - (limit - len(after))) :]
        parts = [self._known[self._form.prefix], *before], [self._known[self._form.suffix], *after]
        first, second = reversed(parts) if self._form.suffix_first else parts
        return [*start, *first, *second, *([self._known[self._form.middle]] if self._form.middle else []), *end]

    def _tokens(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(map(int, ids))
