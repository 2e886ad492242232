"""Arguments of calls that are checked by hand: a queue's length, switches."""

from typing import Any

from foretoken.core.errors import ConfigError
from foretoken.core.plain import plain


def check_queue(max_queue: Any) -> None:
    """Refuse a length of a queue that is none.

    Raises:
        ConfigError: names the bounds.
    """
    length = plain(max_queue)
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length < 2**31:
        raise ConfigError(f"max_queue={max_queue!r:.60} must be an integer between 0 and {2**31 - 1}")


def check_flags(**flags: Any) -> None:
    """Refuse switches that are neither on nor off.

    Raises:
        ConfigError: names the first of them.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r:.60} must be True or False")
