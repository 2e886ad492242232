"""A user's functions that change logits, called for every row of a draft with the tokens before that row."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.errors import InputError

_EVERY = 64  # so many calls, and one is made twice: a result that differs depends on more than the arguments


class LogitsProcessors:
    """The functions of one request.

    Args:
        functions: f(output_ids, logits), f(prompt_ids, output_ids, logits), or a ``LogitsProcessor`` of transformers,
            which takes ids [1, T] and logits [1, V].
        prompt: token ids.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], prompt: Sequence[int]) -> None:
        self._functions = [_of_output(each, list(prompt)) for each in functions]
        self._output: list[int] = []
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._functions)

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        if self._functions:
            self._output += tokens

    def copy(self) -> "LogitsProcessors":
        """The same functions with a history of their own."""
        twin = LogitsProcessors((), ())
        twin._functions, twin._output = self._functions, list(self._output)
        return twin

    def apply(self, logits: Tensor, path: Sequence[int], columns: Columns | None) -> Tensor:
        """Logits after all functions, [V], or [C] where they are of columns.

        Args:
            logits: float32, not modified.
            path: tokens after the output, as if they had been emitted.
        Raises:
            InputError: a result is no row of logits, or another one for the same arguments.
        """
        whole_V = logits if columns is None else columns.spread(logits, -torch.inf)
        for function in self._functions:
            found_V = self._called(function, path, whole_V)
            if self._calls % _EVERY == 0 and not torch.equal(found_V, self._called(function, path, whole_V)):
                raise InputError(
                    "a logits processor returned other logits for the same tokens: it is called for drafts that may "
                    "be refused, so its result must depend on its arguments alone"
                )
            self._calls += 1
            whole_V = found_V
        return whole_V if columns is None else whole_V[columns.ids_C]

    def _called(self, function: Callable[..., Any], path: Sequence[int], logits_V: Tensor) -> Tensor:
        found = function([*self._output, *path], logits_V.clone())
        if not isinstance(found, Tensor) or found.shape != logits_V.shape or bool(found.isnan().any()):
            wrong = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"a logits processor returned {wrong}: it must return [{len(logits_V)}] logits, none NaN")
        return found


def _of_output(function: Callable[..., Any], prompt: list[int]) -> Callable[[list[int], Tensor], Any]:
    """The function of output and logits that a user's function is for this prompt."""
    if any(each.__name__ == "LogitsProcessor" for each in type(function).__mro__):
        return partial(_as_in_transformers, function, prompt)
    return function if len(signature(function).parameters) == 2 else partial(function, prompt)


def _as_in_transformers(function: Callable[..., Any], prompt: list[int], output: list[int], logits_V: Tensor) -> Any:
    ids_1T = torch.tensor([[*prompt, *output]], device=logits_V.device)
    return function(ids_1T, logits_V[None])[0]
