"""Every error that a user can cause, and nothing else.

ForetokenError                  exit code 1
├── ConfigError                 unknown, contradictory or out-of-range option; exit code 2
├── InputError                  a prompt or a data file that cannot be used; exit code 2
├── ModelError                  a checkpoint that cannot be loaded or run
│   ├── UnsupportedArchitecture attention that does not go through the library's interface
│   ├── MismatchError           draft and target do not fit each other
│   └── NoMemory                the weights take more memory than there is
└── RequestError                one request failed while it ran (the others go on)
"""

import difflib
from collections.abc import Iterable


class ForetokenError(Exception):
    """Base of all errors that carry a message meant for a person."""

    exit_code = 1


class ConfigError(ForetokenError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""

    exit_code = 2


class InputError(ForetokenError, ValueError):
    """A prompt or a file of prompts cannot be used; the message names the place."""

    exit_code = 2


class ModelError(ForetokenError):
    """A checkpoint cannot be loaded or run."""


class UnsupportedArchitecture(ModelError):
    """The architecture lacks what a feature needs; the message names both."""


class MismatchError(ModelError):
    """Two models do not fit each other (vocabulary, tokenizer, width)."""


class NoMemory(ModelError):
    """The weights take more memory than there is."""


class RequestError(ForetokenError):
    """One request failed while it ran; other requests are not affected."""


class NothingFits(RequestError):
    """Nothing can be written that is what a request asks for: the fault is the request's own."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, capitals or not, or all of them."""
    names = sorted(known)
    folded = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f"did you mean '{folded[close[0]]}'?" if close else f"known: {', '.join(names)}."
